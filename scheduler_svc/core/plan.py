"""What the core decides and learns: plans out, results in. `SchedulerOutputs` and `WorkerOutputs` are their wire form.

Sequences are named `<request id>/<c>`. Block ids are zero-based per device; device ids start at 1 under rules that keep block 0
as the null block.
"""

from dataclasses import dataclass, field

from scheduler_svc.core.request import SequenceStatus


@dataclass(frozen=True, slots=True)
class ScheduledSequence:
    """One sequence's share of a step.

    `num_tokens` tokens from offset `computed_before` are computed. `fresh`: the worker holds nothing of it (new, or back after a
    preemption) and must get `token_ids` (all known ones) and all blocks; else `new_block_ids` are only those appended since
    the last plan. `samples`: the step reaches the last known token and yields one. `is_prefill`: more than a plain decode.
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
class StepPlan:
    """One step for one lane, in scheduling order. Pairs are (source, destination).

    `left`: sequences that the worker may forget (finished, aborted or preempted since the last plan), told once (R126, R135).
    `finished`: requests that ended since the last plan, told once (R135).
    `preempted`: (request id, "recompute" | "swap") in order of happening. `lookups`: (request id, cached tokens found) in order.
    `ended`: sequences that were given up while planning; their end is told here and nowhere else.
    A plan without work may still carry `left` and `ended`.
    """

    step: int
    lane: int
    scheduled: list[ScheduledSequence] = field(default_factory=list)
    swap_in: list[tuple[int, int]] = field(default_factory=list)
    swap_out: list[tuple[int, int]] = field(default_factory=list)
    copy: list[tuple[int, int]] = field(default_factory=list)
    preempted: list[tuple[str, str]] = field(default_factory=list)
    left: list[str] = field(default_factory=list)
    finished: list[str] = field(default_factory=list)
    ended: list[EndedSequence] = field(default_factory=list)
    lookups: list[tuple[str, int]] = field(default_factory=list)
    num_waiting: int = 0
    num_running: int = 0
    num_swapped: int = 0
    free_gpu: int = 0
    free_cpu: int = 0

    @property
    def num_tokens(self) -> int:
        """Tokens of all entries: what the step takes of the token budget (R128)."""
        return sum(entry.num_tokens for entry in self.scheduled)

    @property
    def is_empty(self) -> bool:
        """Nothing to execute (R6)."""
        return not (self.scheduled or self.swap_in or self.swap_out or self.copy)


@dataclass(frozen=True, slots=True)
class StepResult:
    """What came back for a plan: tokens by sequence name, and sequences that failed alone (name -> why)."""

    step: int
    tokens: dict[str, list[int]]
    failed: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class TokenRun:
    """New output tokens of one sequence from `offset` on, after stop rules; what lies behind a stop is cut off."""

    name: str
    request_id: str
    index: int
    offset: int
    token_ids: list[int]


@dataclass(slots=True)
class StepOutcome:
    """What `update()` did with a result; `runs[i]` of a sequence precede its entry in `ended`."""

    runs: list[TokenRun] = field(default_factory=list)
    ended: list[EndedSequence] = field(default_factory=list)
