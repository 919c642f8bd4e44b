"""The elements of plans and outcomes: a sequence's share of a step, its new tokens, its end, and block moves."""

from dataclasses import dataclass, field

from block_manager.cache_rules import Pair
from scheduler_svc.core.request import Sequence, SequenceStatus


@dataclass(slots=True)
class ScheduledSequence:
    """One sequence's share of a step.

    - `num_tokens` tokens from offset `computed_before` are computed, the last `num_drafts` of them draft
      tokens.
    - `fresh`: the worker holds no state of it, or an outdated block table, and gets `token_ids` (all tokens so
      far) and all block ids; otherwise `new_block_ids` holds only those appended since the last plan.
    - `resumed`: it was preempted before.
    - `samples`: the step reaches the last token and samples a new one (under v0 a group of n samples n at the
      end of its prompt).
    - `is_prefill`: more than a plain decode.
    - `num_cached_blocks`: leading blocks that need no computing although their tokens are scheduled (v0 with
      prefix caching).
    - `num_children`: sequences that its next sample yields, itself included.
    - `told_token_ids`: tokens that the worker did not sample itself: the beam search's choice.
    """

    name: str
    request_id: str
    index: int
    num_tokens: int
    computed_before: int
    new_block_ids: list[int]
    fresh: bool
    resumed: bool
    samples: bool
    is_prefill: bool
    num_prompt_tokens: int
    token_ids: list[int] | None = None
    num_drafts: int = 0
    num_cached_blocks: int = 0
    num_children: int = 1
    told_token_ids: list[int] = field(default_factory=list)


@dataclass(slots=True)
class SequenceInFlight:
    """One sequence's share of a plan that is being made or is in flight; fields as in `ScheduledSequence`.

    `ticket`: its group's once the plan is made; ascending within plans of v1.
    """

    sequence: Sequence
    num_tokens: int
    computed_before: int
    num_drafts: int = 0
    samples: bool = False
    is_prefill: bool = False
    num_cached_blocks: int = 0
    ticket: int = -1

    @property
    def has_left(self) -> bool:
        """True if the sequence was preempted since: the blocks it was to fill are reused, or are free and still
        cached.
        """
        return self.ticket != self.sequence.group.ticket or self.sequence.status is not SequenceStatus.RUNNING


@dataclass(frozen=True, slots=True)
class StepGrant:
    """Steps that the worker may repeat after a plan (`policies/mixed/decode_grants`).

    A step in which a sequence draws one of `stop_token_ids`, ascending, is the last of them.
    """

    num_steps: int
    stop_token_ids: tuple[int, ...] = ()


@dataclass(slots=True)
class EndedSequence:
    """A sequence that ended. `request_done`: it was the last of its request."""

    name: str
    request_id: str
    index: int
    status: SequenceStatus
    num_output_tokens: int
    request_done: bool
    stop_token_id: int | None = None
    error: str | None = None


@dataclass(slots=True)
class BlockMoves:
    """(source, destination) block pairs in order, and the number of pairs of each request."""

    pairs: list[Pair] = field(default_factory=list)
    by_request: dict[str, int] = field(default_factory=dict)

    def add(self, request_id: str, pairs: list[Pair]) -> None:
        """Append a request's pairs."""
        if pairs:
            self.pairs += pairs
            self.by_request[request_id] = self.by_request.get(request_id, 0) + len(pairs)

    def discard(self, request_id: str, pairs: list[Pair]) -> None:
        """Remove pairs of a request."""
        for pair in pairs:
            self.pairs.remove(pair)
            self.by_request[request_id] -= 1
        if not self.by_request.get(request_id, 1):
            del self.by_request[request_id]


@dataclass(slots=True)
class SequenceTokens:
    """New output tokens of one sequence from output offset `offset` on, after stop rules; tokens behind a stop are
    cut off.

    `forked_from`: the sequence is new, and its first `offset` output tokens are those of the named sequence.
    """

    name: str
    request_id: str
    index: int
    offset: int
    token_ids: list[int]
    forked_from: str | None = None
