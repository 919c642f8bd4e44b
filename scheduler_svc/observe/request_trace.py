"""The spans of one traced request in the scheduler, consecutive without gaps: queue, prefill, decode, and,
after a preemption, requeued, then prefill or decode again.

This module keeps the open span and its attributes; `observe.spans` maps events to it.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from opentelemetry.context import Context
from opentelemetry.trace import Span

from scheduler_svc.core.reasons import CoreEvent
from svc_common.errors import QuireError
from svc_common.observability import trace_names as names
from svc_common.observability.telemetry import Telemetry, set_error

Value = str | int | float | bool
Values = Mapping[str, Value]


@dataclass(frozen=True, slots=True)
class PlanMoment:
    """A plan in terms of spans. `step_id`: the worker's number for it within `epoch`; `at_ns`: Unix time of planning.

    `is_repeat`: the worker runs it by a grant, so that its result is taken before the next plan.
    """

    step: int
    at_ns: int
    step_id: int = 0
    epoch: int = 0
    lane: int = 0
    worker_id: str = ""
    is_repeat: bool = False

    @property
    def ids(self) -> dict[str, Value]:
        """Attributes that identify the step, here and at the worker."""
        return {names.STEP: self.step, names.STEP_ID: self.step_id}


@dataclass(slots=True)
class WaitingSample:
    """A waiting sample. `event`: its own last event; `position`: number of queue head events at that time.

    `told`: the last reason noted on the span, including the head's if the sample waits behind one.
    """

    event: CoreEvent
    position: int
    told: tuple[object, ...] = ()


@dataclass(slots=True, eq=False)
class RequestTrace:
    """The open span and its attributes. Samples are numbered as in events: waiting ones are in `waits`, others in `running`.

    Phases are counted in steps: a prefill's by plans, a decode's by results. `planned_step`: the plan that
    last started it, at `place`. `mode`: mode of the last preemption, empty = its worker was lost. `blocks`:
    lengths of block tables by sequence.
    """

    telemetry: Telemetry
    parent: Context
    request_id: str
    is_single: bool = True
    name: str = ""
    span: Span | None = None
    start_ns: int = 0
    planned_step: int = 0
    first_step: int = 0
    seen_step: int = 0
    num_steps: int = 0
    num_repeats: int = 0
    num_late_tokens: int = 0
    has_token: bool = False
    mode: str = ""
    place: dict[str, Value] = field(default_factory=dict)
    waits: dict[int, WaitingSample] = field(default_factory=dict)
    running: set[int] = field(default_factory=set)
    blocks: dict[str, int] = field(default_factory=dict)
    blocks_max: int = 0

    # --- spans --------------------------------------------------------------------------------------------------------

    def open(self, name: str, at_ns: int, attributes: Values) -> None:
        """Open the span of the next phase."""
        self.name, self.start_ns = name, at_ns
        self.first_step = self.num_steps = self.num_repeats = self.num_late_tokens = 0
        self.blocks_max = max(self.blocks.values(), default=0)
        own = {names.REQUEST_ID: self.request_id, **attributes}
        self.span = self.telemetry.span(name, parent=self.parent, attributes=own, start_ns=at_ns)

    def start(self, name: str, moment: PlanMoment, attributes: Values) -> None:
        """Open the span of a phase that runs on a worker from the plan of `moment` on."""
        self.planned_step = moment.step
        self.place = {names.WORKER_ID: moment.worker_id, names.LANE: moment.lane, names.EPOCH: moment.epoch}
        self.go_on(name, moment.at_ns, attributes)

    def go_on(self, name: str, at_ns: int, attributes: Values) -> None:
        """Open the span of the next phase at the same worker."""
        self.open(name, at_ns, {**self.place, **attributes})

    def close(self, at_ns: int) -> int:
        """Close the span, and return its end time, which is no earlier than its start."""
        assert self.span is not None
        at_ns = max(at_ns, self.start_ns)
        figures: dict[str, Value] = {names.NUM_STEPS: self.num_steps} if self.name in _ON_A_WORKER else {}
        if self.num_steps:
            figures |= {names.FIRST_STEP: self.first_step, names.LAST_STEP: self.seen_step}
        counts = (self.blocks_max, self.num_late_tokens, self.num_repeats)
        figures |= {name: count for name, count in zip(_WHERE_NOT_0, counts, strict=True) if count}
        self.span.set_attributes(figures)
        self.span.end(at_ns)
        self.span = None
        return at_ns

    def fail(self, error: QuireError) -> None:
        """Mark the open span with the error that ends the request."""
        assert self.span is not None
        set_error(self.span, error.reason, error.status)

    def event(self, name: str, at_ns: int, attributes: Values, sample: int = 0) -> None:
        """Add an event to the open span."""
        if self.span is not None:
            known = attributes if self.is_single else {**attributes, names.SAMPLE: sample}
            self.span.add_event(name, known, max(at_ns, self.start_ns))

    # --- figures ------------------------------------------------------------------------------------------------------

    def count_step(self, step: int, *, is_repeat: bool = False) -> None:
        """Count a step in which the request took part; once per step, for all its sequences."""
        if step != self.seen_step:
            self.first_step = self.first_step or step
            self.seen_step = step
            self.num_steps += 1
            self.num_repeats += is_repeat

    def hold(self, sequence: str, num_blocks: int, *, anew: bool) -> None:
        """Note new blocks of a sequence: its whole table (`anew`), or additional ones. A fork starts with its parent's count."""
        before = 0 if anew else self.blocks.get(sequence, max(self.blocks.values(), default=0))
        self.blocks[sequence] = held = before + num_blocks
        self.blocks_max = max(self.blocks_max, held)


_ON_A_WORKER = (names.PREFILL, names.DECODE)
_WHERE_NOT_0 = (names.BLOCKS_MAX, names.LATE_TOKENS, names.REPEATED_STEPS)
