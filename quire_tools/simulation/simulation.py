"""Discrete-event simulation of a scheduler core: arrivals, plans, results and faults in virtual time,
thousands of times faster than real time.

The loop is the service's (`loop.step_loop`) without its streams: inputs are taken between two plans, and a
plan is sent whenever a lane can take one (`Scheduler.depth` of them per lane), so that asynchronous policies
plan while a step runs. All randomness comes from one seed.
"""

import math
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial

from quire_tools.simulation.arrivals import Arrival
from quire_tools.simulation.cost_model import CostModel
from quire_tools.simulation.events import EventQueue
from quire_tools.simulation.faults import Faults
from quire_tools.simulation.history import SimulationHistory
from quire_tools.simulation.history_observer import HistoryObserver
from quire_tools.simulation.link import Link, SimulatedAnswer, SimulatedStream
from quire_tools.simulation.token_model import TokenModel
from quire_tools.simulation.virtual_worker import VirtualWorker
from quire_tools.simulation.worker_end import WorkerEnd
from scheduler_svc.core.plan import StepOutcome, StepPlan
from scheduler_svc.core.request import Request
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.observe.run_observer import EndCause, RunNotifier, RunObserver
from svc_common.errors import QuireError

NewWorker = Callable[[dict[str, Request]], VirtualWorker]
Connect = Callable[..., SimulatedStream]

BLOCKED_S = 0.01
_HAND_OVER_S = 0.5
"""Time after which the sequences of a killed worker continue on others, as in `loop.lane_keeper`."""
_MAX_FRUITLESS = 30_000


class Simulation:
    """One run. `core` may have requests already (restored from a snapshot taken at `start_s`).

    `in_flight`: plans in flight at that time. `worker_per_lane`: lanes are data-parallel ranks.
    `max_in_flight`: most plans in flight at a worker, None = as many as the core allows. `faults_of`: of single worker
    groups, by number; `faults`: of the others. `observers`: called with virtual
    time. `new_worker(requests)`: makes the worker of an epoch; default: one that draws tokens and keeps no
    blocks. `connect`: makes another stream than `Link`, with the same parameters. `until_s`: end of the run,
    unless all requests end earlier.
    """

    def __init__(
        self,
        core: Scheduler,
        arrivals: Iterable[Arrival],
        tokens: TokenModel,
        cost: CostModel,
        *,
        seed: int = 0,
        faults: Faults | None = None,
        faults_of: Mapping[int, Faults] | None = None,
        start_s: float = 0.0,
        until_s: float = math.inf,
        in_flight: Iterable[StepPlan] = (),
        worker_per_lane: bool = False,
        max_in_flight: int | None = None,
        observers: Sequence[RunObserver] = (),
        new_worker: NewWorker | None = None,
        connect: Connect | None = None,
    ) -> None:
        self._core = core
        self._events = EventQueue(start_s)
        self._faults = faults or Faults()
        self._until_s = until_s
        self._skew_s = 0.0
        self._busy_until = start_s
        self._num_fruitless = 0
        self._cost = cost
        self._max_in_flight = max_in_flight
        self._requests: dict[str, Request] = dict(core.state.requests)
        self._stop_strings: dict[str, int] = {}
        self._observer = HistoryObserver()
        self._steps = RunNotifier([self._observer, *observers], lambda: self._events.now)
        self._steps.start(core)
        make = partial(new_worker or partial(VirtualWorker, tokens), self._requests)
        self._ends = [WorkerEnd(number, self) for number in range(len(core.workers))]
        for end in self._ends:
            end.link = (connect or Link)(
                self._events,
                end,
                make,
                cost,
                (faults_of or {}).get(end.number, self._faults),
                random.Random(f"{seed}/{end.number}" if end.number else seed),
                depth=core.depth,
                block_size=core.limits.block_size,
                worker_per_lane=worker_per_lane,
            )
        for plan in in_flight:
            self._end_of(plan).link.send(plan)
        for arrival in arrivals:
            self._events.at(arrival.at_s, partial(self._arrive, arrival))
        for at_s, by_s in self._faults.jumps:
            self._events.at(at_s, partial(self._jump, by_s))

    def run(self) -> SimulationHistory:
        """Run until all requests have ended, or up to `until_s`."""
        history = self._observer.history
        self._wake()
        while not history.has_stalled and self._events.next_s <= self._until_s and self._events.next_moment():
            self._num_fruitless += 1
            history.has_stalled = self._num_fruitless > _MAX_FRUITLESS
            self._wake()
        history.end_s = self._events.now
        history.num_repeated_results = sum(end.link.num_repeated for end in self._ends)
        return history

    @property
    def in_flight(self) -> list[StepPlan]:
        """Plans in flight, oldest first."""
        return sorted((plan for end in self._ends for plan in end.link.in_flight), key=lambda plan: plan.step)

    @property
    def num_rows(self) -> int:
        """Number of sequences that the workers hold."""
        return sum(end.link.num_rows for end in self._ends)

    @property
    def _clock(self) -> float:
        """The scheduler's clock."""
        return self._events.now + self._skew_s

    # --- planning -----------------------------------------------------------------------------------------------------

    def _wake(self) -> None:
        """Plan and send as much as is possible now: a plan for one worker, and the next when the scheduler is free again."""
        core = self._core
        for end in self._ends:
            if self._events.now < self._busy_until or not (core.has_unfinished or core.has_endings_to_tell):
                return
            if not end.is_dry and end.link.is_open:
                self._wake_for(end)

    def _wake_for(self, end: WorkerEnd) -> None:
        core, in_flight = self._core, end.link.in_flight
        if core.has_grant(end.number) and in_flight:
            self._watch_grant(end)
            return
        if self._max_in_flight is not None and len(in_flight) >= self._max_in_flight:
            return
        plans = core.schedule(self._clock, end.number)
        if not plans:
            return
        end.is_dry = all(plan.is_empty for plan in plans)
        for plan in plans:
            self._steps.scheduled(core, plan)
        for plan in plans:
            if not plan.is_empty or plan.left:
                end.link.send(plan)
        if not end.is_dry:
            busy_s = self._cost.plan_s if len(self._ends) > 1 and self._cost.plan_s else self._cost.schedule_s
            self._busy_until = self._events.now + busy_s
            self._events.at(self._busy_until, _nothing)
        elif core.has_unfinished and not any(each.link.in_flight for each in self._ends):
            self._retry()

    def _watch_grant(self, end: WorkerEnd) -> None:
        """Revoke the rest of a grant if something else is to be planned."""
        if self._core.wants_step_back(end.number):
            self._core.revoke(end.number)
            end.link.revoke()

    def _retry(self) -> None:
        """Plan again soon: nothing runs and nothing could be planned, and only the passing of time may change that."""
        self._events.at(self._events.now + BLOCKED_S, self._something_happened)

    def _something_happened(self) -> None:
        for end in self._ends:
            end.is_dry = False

    def _end_of(self, plan: StepPlan) -> WorkerEnd:
        return self._ends[self._core.worker_of(plan.lane) if len(self._ends) > 1 else 0]

    # --- the workers --------------------------------------------------------------------------------------------------

    def on_answer(self, worker: int, answer: SimulatedAnswer) -> None:
        """Apply a result; see `WorkerEvents`."""
        self._something_happened()
        self._num_fruitless = 0
        if not answer.plan.is_empty:
            self._apply(answer)
        if answer.continues:
            repeat = self._core.repeat(self._clock, worker)
            self._steps.scheduled(self._core, repeat)
            self._ends[worker].link.follow(repeat)

    def _apply(self, answer: SimulatedAnswer) -> None:
        plan = answer.plan
        if answer.error is not None:
            outcome = self._core.fail_step(plan.step, answer.error)
        else:
            outcome = self._core.update(answer.result, self._clock)
        if self._stop_strings:
            self._look_for_stop_strings(outcome)
        self._steps.answered(plan, answer.result, answer.error, outcome)

    def on_killed(self, worker: int) -> None:
        """Where there are others, let them continue its sequences soon; see `WorkerEvents`."""
        if len(self._ends) > 1:
            self._events.at(self._events.now + _HAND_OVER_S, partial(self._hand_over, self._ends[worker]))

    def _hand_over(self, end: WorkerEnd) -> None:
        if not (end.link.is_open or end.is_handed_over):
            end.is_handed_over = True
            self._lose(end.number)

    def _lose(self, worker: int | None) -> None:
        self._something_happened()
        self._core.reset_sequences_of_lost_worker(worker)
        self._steps.lost(worker)

    def on_new_epoch(self, worker: int) -> None:
        """Requeue its sequences; see `WorkerEvents`."""
        end = self._ends[worker]
        if len(self._ends) == 1:
            self._lose(None)
            return
        if not end.is_handed_over:
            self._lose(worker)
        end.is_handed_over = False
        self._core.take_worker_back(worker)
        self._something_happened()

    def on_resumed(self, worker: int) -> None:
        """See `WorkerEvents`."""
        self._something_happened()

    # --- clients ------------------------------------------------------------------------------------------------------

    def _arrive(self, arrival: Arrival) -> None:
        self._num_fruitless = 0
        request = arrival.request
        request.arrival_time = self._clock
        if arrival.deadline_s is not None:
            request.deadline = self._clock + arrival.deadline_s - arrival.at_s
        refusal = None
        try:
            self._core.add(request)
        except QuireError as error:
            refusal = error
        self._steps.requested(request, refusal)
        if refusal is None:
            self._requests[request.request_id] = request
            self._watch(arrival)
            self._something_happened()

    def _watch(self, arrival: Arrival) -> None:
        request_id = arrival.request.request_id
        if arrival.stop_string_at is not None:
            self._stop_strings[f"{request_id}/0"] = arrival.stop_string_at
        causes: tuple[tuple[float | None, EndCause], ...] = (
            (arrival.leaves_at_s, "abort"),
            (arrival.deadline_s, "deadline"),
        )
        for time_s, cause in causes:
            if time_s is not None:
                self._events.at(time_s, partial(self._leave, request_id, cause))

    def _leave(self, request_id: str, cause: EndCause) -> None:
        self._steps.ended(self._core.abort([request_id]), cause)
        self._something_happened()

    def _look_for_stop_strings(self, outcome: StepOutcome) -> None:
        """Deliver a gateway's stop after the wire delay; more tokens may arrive meanwhile."""
        for run in outcome.runs:
            stop_at = self._stop_strings.get(run.name)
            if stop_at is not None and run.offset + len(run.token_ids) >= stop_at:
                del self._stop_strings[run.name]
                self._events.at(self._events.now + self._cost.wire_s, partial(self._stop_at, run.name, stop_at))

    def _stop_at(self, name: str, num_output_tokens: int) -> None:
        self._steps.ended(self._core.stop_at(name, num_output_tokens), "stop_string")
        self._something_happened()

    # --- the rest -----------------------------------------------------------------------------------------------------

    def _jump(self, by_s: float) -> None:
        self._skew_s += by_s
        self._something_happened()


def _nothing() -> None:
    """No-op event: marks the moment when the scheduler is free again."""
