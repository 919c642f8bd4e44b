"""What the core decides and learns: plans out, results in. `SchedulerOutputs` and `WorkerOutputs` are their wire form.

Sequences are named `<request id>/<c>`. Block ids are zero-based per device; device ids start at 1 under rules that keep block 0
as the null block.
"""

from dataclasses import dataclass, field

from scheduler_svc.core.request import SequenceStatus


@dataclass(frozen=True, slots=True)
class ScheduledSequence:
    """One sequence's share of a step.

    `num_tokens` tokens from offset `computed_before` are computed, the last `num_drafts` of them guesses. `fresh`: the worker holds
    nothing of it, or a table that is not right any more, and must get `token_ids` (all known ones) and all blocks; else
    `new_block_ids` are only those appended since the last plan. `resumed`: it was preempted before. `samples`: the step reaches
    the last token and yields one (under v0 a group of n yields n at its prompt's end). `is_prefill`: more than a plain decode.
    `num_cached_blocks`: leading blocks that need no computing although they are scheduled (v0 with prefix caching).
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


@dataclass(frozen=True, slots=True)
class EndedSequence:
    """A sequence that came to its end. `request_done`: it was the last of its request."""

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
    """(source, destination) pairs in order, and how many of them each request has."""

    pairs: list[tuple[int, int]] = field(default_factory=list)
    by_request: dict[str, int] = field(default_factory=dict)

    def add(self, request_id: str, pairs: list[tuple[int, int]]) -> None:
        """A request's pairs behind the others."""
        if pairs:
            self.pairs += pairs
            self.by_request[request_id] = self.by_request.get(request_id, 0) + len(pairs)

    def discard(self, request_id: str, pairs: list[tuple[int, int]]) -> None:
        """Takes pairs of a request out again."""
        for pair in pairs:
            self.pairs.remove(pair)
            self.by_request[request_id] -= 1
        if not self.by_request.get(request_id, 1):
            del self.by_request[request_id]


@dataclass(slots=True)
class StepPlan:
    """One step for one lane, in scheduling order. Pairs are (source, destination).

    `left`: sequences that the worker may forget (finished, aborted or preempted since the last plan), told once (R126, R135).
    `finished`: requests that ended since the last plan, told once (R135).
    `preempted`: (request id, "recompute" | "swap") in order of happening; `num_preempted` of them for lack of blocks (R46).
    `lookups`: (request id, cached tokens found) in order. `ended`: sequences whose end was decided while planning; it is told
    here and nowhere else. `num_batched_tokens`: what the step takes of the token budget. `late`: requests whose end is
    only not handled yet and that are scheduled no more (R59).
    A plan without work may still carry `left` and `ended`.
    """

    step: int
    lane: int
    scheduled: list[ScheduledSequence] = field(default_factory=list)
    swap_in_moves: BlockMoves = field(default_factory=BlockMoves)
    swap_out_moves: BlockMoves = field(default_factory=BlockMoves)
    copy_moves: BlockMoves = field(default_factory=BlockMoves)
    preempted: list[tuple[str, str]] = field(default_factory=list)
    left: list[str] = field(default_factory=list)
    finished: list[str] = field(default_factory=list)
    ended: list[EndedSequence] = field(default_factory=list)
    lookups: list[tuple[str, int]] = field(default_factory=list)
    late: list[str] = field(default_factory=list)
    num_batched_tokens: int = 0
    num_prefill_groups: int = 0
    num_preempted: int = 0
    num_lookahead_slots: int = 0
    num_waiting: int = 0
    num_running: int = 0
    num_swapped: int = 0
    free_gpu: int = 0
    free_cpu: int = 0

    @property
    def num_tokens(self) -> int:
        """Tokens of all entries."""
        return sum(entry.num_tokens for entry in self.scheduled)

    @property
    def swap_in(self) -> list[tuple[int, int]]:
        """Host to device pairs."""
        return self.swap_in_moves.pairs

    @property
    def swap_out(self) -> list[tuple[int, int]]:
        """Device to host pairs."""
        return self.swap_out_moves.pairs

    @property
    def copy(self) -> list[tuple[int, int]]:
        """Device to device pairs of copy-on-write."""
        return self.copy_moves.pairs

    @property
    def is_empty(self) -> bool:
        """Nothing to execute (R6)."""
        return not (self.scheduled or self.swap_in or self.swap_out or self.copy)


@dataclass(frozen=True, slots=True)
class StepResult:
    """What came back for a plan, by sequence name.

    `tokens`: those that continue it. `children`: where it branches, one token for each child: the first continues the sequence, the
    others are forks of it, none drops it (R94). `candidates`: (token, logprob) guesses of a beam, best first; the core chooses.
    `logprobs`: of `tokens` or `children`, where samples are ranked. `failed`: sequences that failed alone, and why.
    """

    step: int
    tokens: dict[str, list[int]] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)
    children: dict[str, list[int]] = field(default_factory=dict)
    candidates: dict[str, list[tuple[int, float]]] = field(default_factory=dict)
    logprobs: dict[str, list[float]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class TokenRun:
    """New output tokens of one sequence from `offset` on, after stop rules; what lies behind a stop is cut off.

    `forked_from`: the sequence is new and has the first `offset` tokens of that one.
    """

    name: str
    request_id: str
    index: int
    offset: int
    token_ids: list[int]
    forked_from: str | None = None


@dataclass(slots=True)
class StepOutcome:
    """What `update()` did with a result; `runs[i]` of a sequence precede its entry in `ended`. `dropped`: beams that lost."""

    runs: list[TokenRun] = field(default_factory=list)
    ended: list[EndedSequence] = field(default_factory=list)
    dropped: list[str] = field(default_factory=list)
