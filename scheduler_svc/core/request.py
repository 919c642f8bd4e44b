"""Requests, groups and sequences: the data that the scheduler works on.

A *request* is what the client sent. A *group* is scheduled as a whole: all its live sequences act together.
Under v0 a request is one group; under v1 each sample is its own group, and only beams share one (`grouping`). A
*sequence* is one token stream.

Counters replace mode flags: `num_tokens` prompt and output tokens so far; `num_computed_tokens` of them have KV
in blocks (or will, by a step in flight); `num_placeholders` tokens that steps in flight will generate;
`prefill_end` the offset at which prefill ends.
"""

import enum
import math
from dataclasses import dataclass, field

from scheduler_svc.core.reasons import Reason
from scheduler_svc.core.request_rules import BeamRules, StopRules

MOST_CLASSES = 10
"""Highest priority class, and with a minus sign the lowest."""


class SequenceStatus(enum.IntEnum):
    """Status of a sequence; every value above SWAPPED is final."""

    WAITING = 0
    RUNNING = 1
    PREEMPTED = 2
    SWAPPED = 3
    FINISHED_STOPPED = 4
    FINISHED_LENGTH_CAPPED = 5
    FINISHED_ABORTED = 6
    FINISHED_IGNORED = 7

    @property
    def is_finished(self) -> bool:
        """True for every final status."""
        return self > _SWAPPED

    @property
    def finish_reason(self) -> str | None:
        """The API's finish reason; an ignored request reports "length". None while unfinished."""
        return _FINISH_REASONS.get(self)


_SWAPPED = SequenceStatus.SWAPPED  # members of an enum are slow to look up in Python 3.11
_FINISH_REASONS = {
    SequenceStatus.FINISHED_STOPPED: "stop",
    SequenceStatus.FINISHED_LENGTH_CAPPED: "length",
    SequenceStatus.FINISHED_ABORTED: "abort",
    SequenceStatus.FINISHED_IGNORED: "length",
}


@dataclass(slots=True, eq=False)
class Sequence:
    """One token stream; `token_ids` is the prompt followed by the output.

    `draft_token_ids`: draft tokens that the next step verifies. `num_scheduled_tokens`: its tokens in the step
    planned last. `num_shared_tokens`: tokens that the group's oldest sequence recomputes on behalf of this one.
    `frees_at`: number of computed tokens from which on more blocks may be behind a window (`sliding_window`).
    """

    group: "Group"
    index: int
    token_ids: list[int]
    num_prompt_tokens: int
    status: SequenceStatus = SequenceStatus.WAITING
    num_computed_tokens: int = 0
    num_placeholders: int = 0
    num_shared_tokens: int = 0
    num_scheduled_tokens: int = 0
    prefill_end: int = 0
    frees_at: int = 0
    draft_token_ids: list[int] = field(default_factory=list)
    stop_token_id: int | None = None
    num_preemptions: int = 0
    cumulative_logprob: float = 0.0
    name: str = field(init=False)

    def __post_init__(self) -> None:
        self.name = f"{self.group.request.request_id}/{self.index}"
        self.prefill_end = self.prefill_end or len(self.token_ids)

    @property
    def request(self) -> "Request":
        """The request it belongs to."""
        return self.group.request

    @property
    def cache_salt(self) -> str:
        """The request's cache salt; only sequences with equal salts share prefix blocks."""
        return self.group.request.cache_salt

    @property
    def lora_id(self) -> int:
        """The request's LoRA adapter; 0 = none."""
        return self.group.request.lora_id

    @property
    def lane(self) -> int | None:
        """The lane of its group: selects the cache that holds its blocks."""
        return self.group.lane

    @property
    def no_cache_reuse(self) -> bool:
        """True if the request must not use cached blocks."""
        return self.group.request.no_cache_reuse

    @property
    def sibling_names(self) -> tuple[str, ...]:
        """Names of older samples of the request that are scheduled separately and may hold blocks of the same prompt."""
        groups = self.group.request.groups
        if len(groups) == 1:
            return ()
        return tuple(g.sequences[0].name for g in groups if g.sequences[0].index < self.index)

    @property
    def has_siblings(self) -> bool:
        """True if its group has other live sequences, which share the full blocks of its prompt when it starts."""
        return len(self.group.sequences) > 1 and len(self.group.live) > 1

    @property
    def num_tokens(self) -> int:
        """Prompt and output tokens so far."""
        return len(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        """Tokens generated so far; preemption keeps them."""
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def in_prefill(self) -> bool:
        """True while its prompt, or the tokens it must recompute, are not all computed."""
        return self.num_computed_tokens < self.prefill_end

    def restart(self) -> None:
        """Reset the computed counters for recomputation; generated tokens are kept."""
        self.num_computed_tokens = self.num_shared_tokens = self.num_scheduled_tokens = 0
        self.frees_at = 0
        self.prefill_end = len(self.token_ids)

    def fork(self, index: int) -> "Sequence":
        """A new sequence of the same group with a copy of this one's tokens and counters."""
        return Sequence(
            self.group,
            index,
            list(self.token_ids),
            self.num_prompt_tokens,
            status=self.status,
            num_computed_tokens=self.num_computed_tokens,
            prefill_end=self.prefill_end,
            cumulative_logprob=self.cumulative_logprob,
        )


class QueueKind(enum.Enum):
    """The queue that holds a group."""

    WAITING = "waiting"
    RUNNING = "running"
    SWAPPED = "swapped"
    NOWHERE = "nowhere"


@dataclass(slots=True, eq=False)
class Group:
    """Sequences that are scheduled as a whole.

    - `width`: number of sequences once the prompt is computed.
    - `num_fruitless`: preemptions in the same situation since any sequence gained a token; maintained by the
      progress guard.
    - `ticket`: order of entering the running queue.
    - `is_fast`: its counters are held by the fast decode path (`FastRows`).
    - `lane`: where it was planned last, under policies with several lanes of a worker; some never change it.
    - `worker`: number of the worker group that it runs on, or ran on last.
    - `outgrew`: blocks of the largest cache that turned out too small for it.
    - `turn`: its place in the rotation over worker groups (`placement.RoundRobin`); None before it was examined.
    - `passed_at`: since when it has been left to other worker groups, on the clock of `schedule`; None if it is not.
      `left_to`: the last of them, and how often that had planned; `left_until`: when it may start elsewhere.
    - `num_charged`: output tokens charged to its tenant while it runs (`tenant_accounts`).
    - `mask_debt_s`, `is_paused`: seconds by which its grammar masks delayed steps, and whether it sits out
      steps for that (`slow_masks`).
    - `waits_for`, `seen_heads`: the last reason reported for it, and the journal's head-of-line counter at that
      time.
    """

    request: "Request"
    sequences: list[Sequence] = field(default_factory=list)
    width: int = 1
    place: QueueKind = QueueKind.NOWHERE
    num_fruitless: int = 0
    num_indexes: int = 1
    ticket: int = -1
    is_fast: bool = False
    lane: int | None = None
    worker: int = 0
    outgrew: int = 0
    turn: int | None = None
    passed_at: float | None = None
    left_to: tuple[int, int] | None = None
    left_until: float = 0.0
    num_charged: int = 0
    mask_debt_s: float = 0.0
    is_paused: bool = False
    waits_for: Reason | None = None
    seen_heads: int = 0

    @property
    def live(self) -> list[Sequence]:
        """Unfinished sequences, oldest first."""
        return [s for s in self.sequences if s.status <= _SWAPPED]

    @property
    def is_finished(self) -> bool:
        """True if all its sequences have finished."""
        return all([s.status > _SWAPPED for s in self.sequences])

    @property
    def needs_result(self) -> bool:
        """True if it cannot be scheduled ahead of its last result.

        That holds for groups of several sequences and for every beam search, even of one beam, as the core and
        not the worker chooses the next token.
        """
        return self.width > 1 or self.request.beam is not None

    @property
    def num_children(self) -> int:
        """Sequences that its next sample yields: all of them at the end of the prompt; beams fork by choice instead."""
        return self.width if len(self.sequences) == 1 and self.request.beam is None else 1

    @property
    def max_num_running_seqs(self) -> int:
        """Sequences that it counts for in `max_num_seqs`: `width` during the prompt, then the live ones.

        A beam search always counts its full width, as new beams replace finished ones.
        """
        if self.request.beam is not None or self.width > len(self.sequences):
            return self.width
        return len(self.live)

    @property
    def in_prefill(self) -> bool:
        """True if any live sequence is in prefill; finished siblings do not count."""
        return any(s.in_prefill for s in self.live)

    @property
    def starts_over(self) -> bool:
        """True while it may neither be swapped nor moved: a part of a prompt is computed of which nothing may be reused.

        Workers keep sums of hidden states of such a prompt (embeddings, prompt logprobs) beside its blocks.
        """
        return self.request.no_cache_reuse and any(s.num_computed_tokens < s.num_prompt_tokens for s in self.live)

    def new_index(self) -> int:
        """The next index for a forked sequence; indexes are never reused."""
        self.num_indexes += 1
        return self.num_indexes - 1

    def find(self, index: int) -> Sequence:
        """The sequence with that index. ValueError if there is none."""
        for sequence in self.sequences:
            if sequence.index == index:
                return sequence
        raise ValueError(f"request {self.request.request_id} has no sequence {index}")

    def add(self, sequence: Sequence) -> None:
        """Add a forked sequence. ValueError if its index is taken."""
        if any(s.index == sequence.index for s in self.sequences):
            raise ValueError(f"request {self.request.request_id} has a sequence {sequence.index} already")
        self.sequences.append(sequence)

    def remove(self, index: int) -> None:
        """Remove a losing beam. ValueError if there is none with that index."""
        self.sequences.remove(self.find(index))


@dataclass(slots=True, eq=False)
class Request:
    """A client's request as the core sees it.

    - `priority`: lower = sooner. `priority_class`: the same, clamped to +-MOST_CLASSES.
    - `arrival_time`: seconds on the clock of `Scheduler.schedule`.
    - `n`: number of samples to return, of `best_of` generated (None: n).
    - `beam`: the samples are beams.
    - `lora_id`: adapter, 0 = none.
    - `long_lora_max_len`: the context length of a long-context adapter, which under v0 replaces the usual
      prompt limit.
    - `cache_salt`: only requests with equal salts share prefix blocks.
    - `committed`: output tokens generated before this submission, sample after sample.
    - `committed_counts`: how many belong to each sample, empty = all to the first.
    - `over`: indexes of samples that had already ended.
    - `num_samples`: sequences to generate: `best_of`, or `n` where that is None.
    - `deadline`: when the client stops waiting, seconds on the same clock, None = never.
    - `tenant`: key of the account that fair queueing charges; otherwise opaque.
    """

    request_id: str
    prompt_token_ids: list[int]
    stop: StopRules
    arrival_time: float
    priority: int = 0
    n: int = 1
    best_of: int | None = None
    beam: BeamRules | None = None
    lora_id: int = 0
    long_lora_max_len: int | None = None
    cache_salt: str = ""
    no_cache_reuse: bool = False
    deadline: float | None = None
    tenant: str = ""
    committed: list[int] = field(default_factory=list)
    committed_counts: list[int] = field(default_factory=list)
    over: list[int] = field(default_factory=list)
    num_samples: int = field(init=False)
    priority_class: int = field(init=False)
    groups: list[Group] = field(init=False, default_factory=list)
    num_cached_tokens: int | None = None
    first_scheduled_time: float | None = None
    first_token_time: float | None = None

    def __post_init__(self) -> None:
        self.num_samples = self.n if self.best_of is None else self.best_of
        self.priority_class = max(-MOST_CLASSES, min(MOST_CLASSES, self.priority))
        self.as_one_group()

    @property
    def sequences(self) -> list[Sequence]:
        """All sequences, group by group."""
        return [s for group in self.groups for s in group.sequences]

    @property
    def is_finished(self) -> bool:
        """True if all sequences have finished."""
        return all([group.is_finished for group in self.groups])

    @property
    def unfinished(self) -> list[Sequence]:
        """Unfinished sequences."""
        return [s for s in self.sequences if not s.status.is_finished]

    def as_one_group(self) -> None:
        """Make one group, with one sequence until the prompt is computed, or with all sequences that
        `committed_counts` lists.
        """
        num_known = self.num_samples if self.committed_counts else 1
        group = Group(self, width=self.num_samples, num_indexes=num_known)
        for index in range(num_known):
            group.sequences.append(self._sequence(group, index))
        self.groups = [group]

    def as_samples(self) -> None:
        """Make one group per sample; beams stay in one group, as they compete."""
        if self.beam is not None or self.num_samples == 1:
            return
        self.groups = [Group(self) for _ in range(self.num_samples)]
        for index, group in enumerate(self.groups):
            group.sequences.append(self._sequence(group, index))

    def _sequence(self, group: Group, index: int) -> Sequence:
        start = sum(self.committed_counts[:index])
        count = self.committed_counts[index] if self.committed_counts else (0 if index else len(self.committed))
        outputs = self.committed[start : start + count]
        sequence = Sequence(group, index, [*self.prompt_token_ids, *outputs], len(self.prompt_token_ids))
        if index in self.over:
            sequence.status = SequenceStatus.FINISHED_STOPPED
        return sequence

    def score(self, sequence: Sequence) -> float:
        """The score that ranks its samples: cumulative logprob, for beams divided by output length ** length_penalty."""
        if self.beam is None:
            return sequence.cumulative_logprob
        return sequence.cumulative_logprob / math.pow(max(1, sequence.num_output_tokens), self.beam.length_penalty)

    def best_sequences(self) -> list[Sequence]:
        """The `n` best samples, best first, ties by index; ignored and aborted ones rank last.

        Where all samples are returned and none are beams, they come in index order.
        """
        failed = (SequenceStatus.FINISHED_ABORTED, SequenceStatus.FINISHED_IGNORED)
        ranked = sorted(self.sequences, key=lambda s: (s.status in failed, -self.score(s), s.index))
        return ranked[: self.n] if self.num_samples > self.n or self.beam else sorted(ranked, key=lambda s: s.index)
