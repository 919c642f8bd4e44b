"""Plans and results: what the core decides and what it learns. The wire forms are `SchedulerOutputs` and
`WorkerOutputs`.

Sequences are named `<request id>/<index>`. Block ids are zero-based per device; under rules that reserve block
0 as the null block, device ids start at 1.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from operator import itemgetter
from typing import NamedTuple

from block_manager.cache_rules import Pair, StateMoves
from scheduler_svc.core.entries import EndedSequence, ScheduledSequence, SequenceTokens, StepGrant
from scheduler_svc.core.fast_decode.rows import Ints
from scheduler_svc.core.fast_decode.share import FastRuns, FastShare
from scheduler_svc.core.reasons import CoreEvent, Numbers, Revocation

__all__ = [
    "BatchSignature",
    "EndedSequence",
    "ScheduledSequence",
    "SequenceTokens",
    "StepGrant",
    "StepOutcome",
    "StepPlan",
    "StepResult",
]


class BatchSignature(NamedTuple):
    """Identity of the rows of a fast-decode plan, and the tokens of the first one computed before it."""

    rows: object
    num_computed: int

    def follows(self, last: "BatchSignature | None") -> bool:
        """True if a plan has the rows of the worker's `last` plan, each one token further."""
        return last is not None and self.rows is last.rows and self.num_computed == last.num_computed + 1


@dataclass(slots=True)
class StepPlan:
    """One step for one lane, in scheduling order. Block pairs are (source, destination): (host, device) in `swap_in`,
    (device, host) in `swap_out`, (device, device) in `copy`.

    - `left`: sequences that the worker may forget (finished, aborted or preempted since the last plan), sent
      once; those of a repeat are in the next plan again.
    - `finished`: requests that ended since the last plan, sent once.
    - `preempted`: (request id, "recompute" | "swap") in order; `num_preempted` of them for lack of blocks.
    - `num_cumulative_preemptions`: all since the start, these included.
    - `lookups`: (request id, cached tokens found) in order.
    - `ended`: sequences that ended while planning; reported only here.
    - `num_batched_tokens`: tokens taken from the budget.
    - `late`: requests that are no longer scheduled while their end is pending (`async_output`).
    - `num_decode_steps`: decode steps that the worker runs for this plan; above 1 only if all shares are
      decodes.
    - `entries`: all shares except the fast-decode ones in `fast`, with `tickets` giving their positions among
      those; `scheduled` has all.
    - `placed`: by image (`live_move`), pairs of index in it and device block, placed before all other moves; the image is then
      dropped.
    - `swapped_in`, `swapped_out`, `copied`: number of pairs of each request.
    - `states`: see `StateMoves`; None if the model has none.
    - `fast`: None where no row is scheduled.
    - `events`: changes of state and reason since the last plan.
    - `grant`: steps that the worker may repeat after this one; None where there are none.
    - `is_repeat`: the worker runs this step by an earlier plan's grant, so that it is not sent.
    - `revoked`: why the grant before was revoked; None if it was not.

    A plan without work may still carry `left` and `ended`.
    """

    step: int
    lane: int
    entries: list[ScheduledSequence] = field(default_factory=list)
    fast: FastShare | None = None
    tickets: list[int] = field(default_factory=list)
    written_out: list[ScheduledSequence] | None = None
    swap_in: list[Pair] = field(default_factory=list)
    swap_out: list[Pair] = field(default_factory=list)
    copy: list[Pair] = field(default_factory=list)
    placed: Mapping[str, list[Pair]] = field(default_factory=dict)
    swapped_in: Mapping[str, int] = field(default_factory=dict)
    swapped_out: Mapping[str, int] = field(default_factory=dict)
    copied: Mapping[str, int] = field(default_factory=dict)
    states: StateMoves | None = None
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
    events: list[CoreEvent] = field(default_factory=list)
    head_numbers: Mapping[str, Numbers] = field(default_factory=dict)
    grant: StepGrant | None = None
    is_repeat: bool = False
    revoked: Revocation | None = None

    @property
    def scheduled(self) -> list[ScheduledSequence]:
        """All shares in scheduling order; fast-decode rows are expanded on first access."""
        if self.fast is None:
            return self.entries
        if self.written_out is None:
            entries = [*zip(self.tickets, self.entries, strict=True), *self.fast.entries()]
            self.written_out = [entry for _, entry in sorted(entries, key=itemgetter(0))]
        return self.written_out

    @property
    def batch_signature(self) -> BatchSignature | None:
        """Batch signature of a plan that consists of fast-decode rows only, else None."""
        if self.fast is None or self.entries:
            return None
        return BatchSignature(self.fast.batch_signature, int(self.fast.computed_before[0]))

    @property
    def num_scheduled(self) -> int:
        """Number of sequences with a share."""
        return len(self.entries) + (0 if self.fast is None else len(self.fast.rows))

    @property
    def num_tokens(self) -> int:
        """Tokens of all shares."""
        num_tokens = 0 if self.fast is None else len(self.fast.rows)
        for entry in self.entries:
            num_tokens += entry.num_tokens
        return num_tokens

    @property
    def is_empty(self) -> bool:
        """True if the worker has nothing to execute."""
        return not (self.entries or self.fast or self.swap_in or self.swap_out or self.copy or self.placed)


@dataclass(frozen=True, slots=True)
class StepResult:
    """Result of a plan, by sequence name.

    - `tokens`: tokens that continue a sequence.
    - `children`: one token per child where a sequence branches: the first continues the sequence, the others
      fork it, an empty list drops it.
    - `candidates`: (token, logprob) continuations of a beam, best first; the core chooses.
    - `logprobs`: of `tokens` or `children`, where samples are ranked.
    - `failed`: error messages of sequences that failed while the step succeeded.
    - `mask_s`: seconds by which a sequence's grammar delayed the step beyond what grammars usually take
      (`slow_masks`).
    - `column`: given instead of `tokens` for the plan's fast-decode rows: int64, one token per row in order, -1
      = none.
    - `duration_s`: time the worker took, 0 = unknown; used only to pay off mask time.
    - `queued_s`: time the plan waited at the worker; for recordings only.
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
    """What `update()` did with a result. A sequence's run precedes its entry in `ended`. `dropped`: losing beams.

    `entries`: all runs except the fast-decode ones in `fast`, with `tickets` giving their positions among
    those.
    """

    entries: list[SequenceTokens] = field(default_factory=list)
    ended: list[EndedSequence] = field(default_factory=list)
    dropped: list[str] = field(default_factory=list)
    fast: FastRuns | None = None
    tickets: list[int] = field(default_factory=list)

    @property
    def has_tokens(self) -> bool:
        """True if any sequence gained a token."""
        return bool(self.entries) or (self.fast is not None and len(self.fast.rows) > 0)

    @property
    def runs(self) -> list[SequenceTokens]:
        """All runs in the plan's order; fast-decode rows are expanded."""
        if self.fast is None:
            return self.entries
        runs = self.fast.runs()
        if not self.entries:
            return runs
        both = [*zip(self.tickets, self.entries, strict=True), *zip(self.fast.tickets(), runs, strict=True)]
        return [run for _, run in sorted(both, key=itemgetter(0))]
