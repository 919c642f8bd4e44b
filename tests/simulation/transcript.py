"""What clients and workers saw of a run, as plain facts in the order in which they came: all that the outside checker knows."""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field

from scheduler_svc.core.plan import EndedSequence, StepOutcome, StepPlan
from scheduler_svc.core.request import Request
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.observe.run_observer import EndCause, RunObserver
from scheduler_svc.observe.step_record import StepOrigin
from scheduler_svc.worker_values import WorkerResult
from svc_common.errors import QuireError


@dataclass(frozen=True, slots=True)
class Arrived:
    """A client asked; `refusal`: and was told no at once, with that reason."""

    now: float
    request_id: str
    num_prompt_tokens: int
    max_tokens: int
    num_samples: int
    has_deadline: bool
    refusal: str | None


@dataclass(frozen=True, slots=True)
class Planned:
    """The worker was asked for this. `shares`: (sequence, request, tokens) in order. `taken`: what counts against the budget."""

    now: float
    step: int
    lane: int
    shares: tuple[tuple[str, str, int], ...]
    taken: int
    swaps_in: int
    swaps_out: int


@dataclass(frozen=True, slots=True)
class Got:
    """A client got tokens of a sequence, from `offset` on; `parent`: it shares what came before with that one."""

    now: float
    name: str
    request_id: str
    offset: int
    tokens: tuple[int, ...]
    parent: str | None


@dataclass(frozen=True, slots=True)
class Dropped:
    """A beam that lost: its client hears no more of it."""

    now: float
    name: str


@dataclass(frozen=True, slots=True)
class Cut:
    """A stop string: of a sequence's tokens only the first `num_tokens` count."""

    now: float
    name: str
    num_tokens: int


@dataclass(frozen=True, slots=True)
class Ended:
    """A sequence is over; `last`: and with it its request."""

    now: float
    name: str
    request_id: str
    status: str
    num_tokens: int
    stop_token: int | None
    error: str | None
    last: bool


@dataclass(frozen=True, slots=True)
class Complained:
    """The worker was asked for something that it cannot do right."""

    now: float
    what: str


@dataclass(frozen=True, slots=True)
class LostWorker:
    """All that the worker held is gone."""

    now: float


@dataclass(frozen=True, slots=True)
class Left:
    """What is left when everything is over: blocks in use, rows at the worker, requests, and whether all stood still."""

    device_blocks: int
    host_blocks: int
    rows: int
    requests: int
    has_stalled: bool
    violations: tuple[str, ...] = ()


Fact = Arrived | Planned | Got | Dropped | Cut | Ended | Complained | LostWorker | Left


@dataclass(slots=True)
class Transcript(RunObserver):
    """Writes everything down."""

    facts: list[Fact] = field(default_factory=list)
    _clock: Callable[[], float] = float

    @property
    def digest(self) -> str:
        """The same for equal runs, and for no others."""
        return hashlib.sha256(repr(self.facts).encode()).hexdigest()[:16]

    def on_start(self, core: Scheduler, clock: Callable[[], float]) -> None:
        self._clock = clock

    def on_request(self, request: Request, refusal: QuireError | None) -> None:
        self.facts.append(
            Arrived(
                self._clock(),
                request.request_id,
                len(request.prompt_token_ids),
                request.stop.max_tokens,
                request.num_samples,
                request.deadline is not None,
                None if refusal is None else refusal.reason,
            )
        )

    def on_plan(self, plan: StepPlan, origin: StepOrigin) -> None:
        shares = tuple((e.name, e.request_id, e.num_tokens) for e in plan.scheduled)
        if shares or plan.swap_in or plan.swap_out or plan.copy:
            swaps = len(plan.swap_in), len(plan.swap_out)
            self.facts.append(Planned(self._clock(), plan.step, plan.lane, shares, plan.num_batched_tokens, *swaps))
        self._end(plan.ended)

    def on_result(self, plan: StepPlan, result: WorkerResult, outcome: StepOutcome) -> None:
        now = self._clock()
        for run in outcome.runs:
            tokens = tuple(run.token_ids)
            self.facts.append(Got(now, run.name, run.request_id, run.offset, tokens, run.forked_from))
        self.facts += [Dropped(now, name) for name in outcome.dropped]
        self._end(outcome.ended)

    def on_ended(self, ended: list[EndedSequence], cause: EndCause) -> None:
        if cause == "stop_string":
            self.facts += [Cut(self._clock(), e.name, e.num_output_tokens) for e in ended]
        self._end(ended)

    def _end(self, ended: list[EndedSequence]) -> None:
        self.facts += [
            Ended(
                self._clock(),
                e.name,
                e.request_id,
                e.status.name,
                e.num_output_tokens,
                e.stop_token_id,
                e.error,
                e.request_done,
            )
            for e in ended
        ]

    def complained(self, what: str) -> None:
        self.facts.append(Complained(self._clock(), what))

    def on_worker_lost(self, worker: int | None) -> None:
        self.facts.append(LostWorker(self._clock()))
