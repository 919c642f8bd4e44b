"""What the core decides and learns: plans out, results in. `SchedulerOutputs` and `WorkerOutputs` are their wire form.

Sequences are named `<request id>/<c>`. Block ids are zero-based per device; device ids start at 1 under rules that keep block 0
as the null block.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from heapq import merge
from operator import itemgetter

from scheduler_svc.core.entries import BlockMoves, EndedSequence, ScheduledSequence, TokenRun
from scheduler_svc.core.policies.mixed.fast_decode.rows import Ints
from scheduler_svc.core.policies.mixed.fast_decode.share import SteadyRuns, SteadyShare
from scheduler_svc.core.reasons import Event, Numbers

__all__ = [
    "BlockMoves",
    "EndedSequence",
    "ScheduledSequence",
    "StepOutcome",
    "StepPlan",
    "StepResult",
    "TokenRun",
]


@dataclass(slots=True)
class StepPlan:
    """One step for one lane, in scheduling order. Pairs are (source, destination).

    `left`: sequences that the worker may forget (finished, aborted or preempted since the last plan), told once (R126, R135).
    `finished`: requests that ended since the last plan, told once (R135).
    `preempted`: (request id, "recompute" | "swap") in order of happening; `num_preempted` of them for lack of blocks (R46);
    `num_cumulative_preemptions`: all since the start, these included (R80).
    `lookups`: (request id, cached tokens found) in order. `ended`: sequences whose end was decided while planning; it is told
    here and nowhere else. `num_batched_tokens`: what the step takes of the token budget. `late`: requests whose end is
    only not handled yet and that are scheduled no more (R59).
    `num_decode_steps`: decode steps that the worker runs for it, above 1 only where all decode (R91).
    A plan without work may still carry `left` and `ended`. `entries` are the shares but the `steady` ones, with the `tickets`
    that say where they stand among those; `scheduled` is all of them. `events`: changes of state and reason since the last plan.
    """

    step: int
    lane: int
    entries: list[ScheduledSequence] = field(default_factory=list)
    steady: SteadyShare | None = None
    tickets: list[int] = field(default_factory=list)
    written_out: list[ScheduledSequence] | None = None
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
    num_cumulative_preemptions: int = 0
    num_lookahead_slots: int = 0
    num_decode_steps: int = 1
    num_waiting: int = 0
    num_running: int = 0
    num_swapped: int = 0
    free_gpu: int = 0
    free_cpu: int = 0
    events: list[Event] = field(default_factory=list)
    head_numbers: Mapping[str, Numbers] = field(default_factory=dict)

    @property
    def scheduled(self) -> list[ScheduledSequence]:
        """All shares in scheduling order; the steady ones are written out for who asks first."""
        if self.steady is None:
            return self.entries
        if self.written_out is None:
            loose = zip(self.tickets, self.entries, strict=True)
            self.written_out = [entry for _, entry in merge(loose, self.steady.entries(), key=itemgetter(0))]
        return self.written_out

    @property
    def course(self) -> tuple[object, int] | None:
        """Of plans that have steady rows alone; equal where these are the same, each one token further for each step."""
        if self.steady is None or self.entries or not len(self.steady):
            return None
        return self.steady.course, int(self.steady.computed_before[0]) - self.step

    @property
    def grown(self) -> list[ScheduledSequence]:
        """Shares with new blocks or that are fresh; those with a new block alone may come last."""
        loose = [entry for entry in self.entries if entry.new_block_ids or entry.fresh]
        return loose if self.steady is None else loose + self.steady.grown()

    @property
    def num_scheduled(self) -> int:
        """How many sequences have a share."""
        return len(self.entries) + (0 if self.steady is None else len(self.steady))

    @property
    def num_tokens(self) -> int:
        """Tokens of all shares."""
        steady = 0 if self.steady is None else len(self.steady)
        return steady + sum(entry.num_tokens for entry in self.entries)

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
        return not (self.num_scheduled or self.swap_in or self.swap_out or self.copy)


@dataclass(frozen=True, slots=True)
class StepResult:
    """What came back for a plan, by sequence name.

    `tokens`: those that continue it. `children`: where it branches, one token for each child: the first continues the sequence, the
    others are forks of it, none drops it (R94). `candidates`: (token, logprob) guesses of a beam, best first; the core chooses.
    `logprobs`: of `tokens` or `children`, where samples are ranked. `failed`: sequences that failed alone, and why.
    `mask_s`: seconds by which a sequence's grammar held the step up beyond what grammars usually take (`mask_pace`).
    `column`: instead of `tokens` for the plan's `steady` rows: int64, one token for each in order, -1 = none.
    `duration_s`: how long the worker took, 0 = it did not say: it pays for masks and decides nothing else. `queued_s`: how long the
    plan had waited there; for recordings alone.
    """

    step: int
    tokens: dict[str, list[int]] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)
    children: dict[str, list[int]] = field(default_factory=dict)
    candidates: dict[str, list[tuple[int, float]]] = field(default_factory=dict)
    logprobs: dict[str, list[float]] = field(default_factory=dict)
    mask_s: dict[str, float] = field(default_factory=dict)
    column: Ints | None = None
    duration_s: float = 0.0
    queued_s: float = 0.0


@dataclass(slots=True)
class StepOutcome:
    """What `update()` did with a result; `runs[i]` of a sequence precede its entry in `ended`. `dropped`: beams that lost.

    `entries` are the runs but the `steady` ones, with the `tickets` that say where they stand among those.
    """

    entries: list[TokenRun] = field(default_factory=list)
    ended: list[EndedSequence] = field(default_factory=list)
    dropped: list[str] = field(default_factory=list)
    steady: SteadyRuns | None = None
    tickets: list[int] = field(default_factory=list)

    @property
    def has_tokens(self) -> bool:
        """Whether anybody gained a token."""
        return bool(self.entries) or (self.steady is not None and len(self.steady.rows) > 0)

    @property
    def runs(self) -> list[TokenRun]:
        """All runs in the plan's order; the steady ones are written out for it."""
        if self.steady is None:
            return self.entries
        if not self.entries:
            return [run for _, run in self.steady.runs()]
        loose = zip(self.tickets, self.entries, strict=True)
        return [run for _, run in merge(loose, self.steady.runs(), key=itemgetter(0))]
