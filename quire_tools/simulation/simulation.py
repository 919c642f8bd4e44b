"""Discrete-event simulation of a scheduler core: arrivals, plans, results and faults in virtual time,
thousands of times faster than real time.

The loop is the service's (`loop.step_loop`) without its streams: inputs are taken between two plans, and a
plan is sent whenever a lane can take one (`Scheduler.depth` of them per lane), so that asynchronous policies
plan while a step runs. All randomness comes from one seed.
"""

import math
import random
from collections.abc import Callable, Iterable
from functools import partial
from typing import Protocol

from quire_tools.simulation.arrivals import Arrival
from quire_tools.simulation.cost_model import CostModel
from quire_tools.simulation.events import EventQueue
from quire_tools.simulation.faults import Faults
from quire_tools.simulation.history import SimulationHistory
from quire_tools.simulation.link import Link, SimulatedAnswer, SimulatedStream
from quire_tools.simulation.record import Recorder
from quire_tools.simulation.token_model import TokenModel
from quire_tools.simulation.virtual_worker import VirtualWorker
from scheduler_svc.core.plan import EndedSequence, StepOutcome, StepPlan
from scheduler_svc.core.request import Request
from scheduler_svc.core.scheduler import Scheduler
from svc_common.errors import QuireError

NewWorker = Callable[[dict[str, Request], Callable[[str], None]], VirtualWorker]
Connect = Callable[..., SimulatedStream]

BLOCKED_S = 0.01
_MAX_FRUITLESS = 30_000


class Observer(Protocol):
    """Observer of what clients and workers see, to check a run. Times are seconds of virtual time."""

    def arrived(self, now: float, request: Request, refusal: QuireError | None) -> None:
        """A request was accepted, or refused."""

    def planned(self, now: float, plan: StepPlan) -> None:
        """A plan was sent."""

    def answered(self, now: float, outcome: StepOutcome) -> None:
        """Tokens and ends were delivered to clients."""

    def ended(self, now: float, ended: list[EndedSequence]) -> None:
        """Sequences ended without a result: cancelled, by stop string or deadline, or while planning."""

    def cut(self, now: float, name: str, num_output_tokens: int) -> None:
        """A stop string was found: only that many of the sequence's output tokens count."""

    def complained(self, now: float, what: str) -> None:
        """The worker was asked for something inconsistent."""

    def lost_worker(self, now: float) -> None:
        """A new epoch began: the worker is empty."""


class Simulation:
    """One run. `core` may have requests already (restored from a snapshot taken at `start_s`).

    `in_flight`: plans in flight at that time. `worker_per_lane`: lanes are data-parallel ranks.
    `max_in_flight`: most plans in flight, None = as many as the core allows. `new_worker(requests,
    complain)`: makes the worker of an epoch; default: one that draws tokens and keeps no blocks. `connect`:
    makes another stream than `Link`, with the same parameters. `until_s`: end of the run, unless all requests
    end earlier.
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
        start_s: float = 0.0,
        until_s: float = math.inf,
        in_flight: Iterable[StepPlan] = (),
        worker_per_lane: bool = False,
        max_in_flight: int | None = None,
        observer: Observer | None = None,
        new_worker: NewWorker | None = None,
        connect: Connect | None = None,
    ) -> None:
        self._core = core
        self._events = EventQueue(start_s)
        self._faults = faults or Faults()
        self._observer = observer
        self._until_s = until_s
        self._skew_s = 0.0
        self._busy_until = start_s
        self._is_dry = False
        self._num_fruitless = 0
        self._cost = cost
        self._max_in_flight = max_in_flight
        self._requests: dict[str, Request] = dict(core.state.requests)
        self._recorder = Recorder(self._requests.values(), start_s, core.state.limits.block_size)
        make = new_worker or (lambda requests, complain: VirtualWorker(tokens, requests))
        self._link: SimulatedStream = (connect or Link)(
            self._events,
            self,
            partial(make, self._requests, self._complain),
            cost,
            self._faults,
            random.Random(seed),
            depth=core.depth,
            block_size=core.state.limits.block_size,
            worker_per_lane=worker_per_lane,
        )
        for plan in in_flight:
            self._link.send(plan)
        for arrival in arrivals:
            self._events.at(arrival.at_s, partial(self._arrive, arrival))
        for at_s, by_s in self._faults.jumps:
            self._events.at(at_s, partial(self._jump, by_s))

    def run(self) -> SimulationHistory:
        """Run until all requests have ended, or up to `until_s`."""
        history = self._recorder.history
        self._wake()
        while not history.has_stalled and self._events.next_s <= self._until_s and self._events.next_moment():
            self._num_fruitless += 1
            history.has_stalled = self._num_fruitless > _MAX_FRUITLESS
            self._wake()
        history.end_s = self._events.now
        history.num_repeated_results = self._link.num_repeated
        return history

    @property
    def in_flight(self) -> list[StepPlan]:
        """Plans in flight, oldest first."""
        return self._link.in_flight

    @property
    def num_rows(self) -> int:
        """Number of sequences that the workers hold."""
        return self._link.num_rows

    @property
    def _clock(self) -> float:
        """The scheduler's clock."""
        return self._events.now + self._skew_s

    # --- planning -----------------------------------------------------------------------------------------------------

    def _wake(self) -> None:
        """Plan and send as much as is possible now."""
        core, now = self._core, self._events.now
        if self._is_dry or not self._link.is_open or now < self._busy_until:
            return
        if not (core.has_unfinished or core.has_endings_to_tell):
            return
        if self._max_in_flight is not None and len(self._link.in_flight) >= self._max_in_flight:
            return
        plans = core.schedule(self._clock)
        if not plans:
            return
        self._is_dry = all(plan.is_empty for plan in plans)
        for plan in plans:
            self._announce(plan)
        sent = [plan for plan in plans if not plan.is_empty or plan.left]
        for plan in sent:
            self._link.send(plan)
        if not self._is_dry:
            self._busy_until = now + self._cost.schedule_s
            self._events.at(self._busy_until, _nothing)
        elif not self._link.in_flight and core.has_unfinished:
            self._retry()

    def _retry(self) -> None:
        """Plan again soon: nothing runs and nothing could be planned, and only the passing of time may change that."""
        self._events.at(self._events.now + BLOCKED_S, self._something_happened)

    def _something_happened(self) -> None:
        self._is_dry = False

    def _announce(self, plan: StepPlan) -> None:
        now = self._events.now
        self._recorder.planned(now, plan)
        if self._observer is not None:
            self._observer.planned(now, plan)
        self._end(plan.ended)

    # --- the link's scheduling end ------------------------------------------------------------------------------------

    def on_answer(self, answer: SimulatedAnswer) -> None:
        """Apply a result; see `link.Scheduling`."""
        self._is_dry = False
        self._num_fruitless = 0
        plan = answer.plan
        if plan.is_empty:
            return
        if answer.error is not None:
            outcome = self._core.fail_step(plan.step, answer.error)
        else:
            outcome = self._core.update(answer.result, self._clock)
        self._recorder.answered(self._events.now, answer, outcome)
        if self._observer is not None:
            self._observer.answered(self._events.now, outcome)

    def on_new_epoch(self) -> None:
        """Requeue all sequences; see `link.Scheduling`."""
        self._is_dry = False
        self._core.reset_sequences_of_lost_worker()
        if self._observer is not None:
            self._observer.lost_worker(self._events.now)

    def on_resumed(self) -> None:
        """See `link.Scheduling`."""
        self._is_dry = False

    # --- clients ------------------------------------------------------------------------------------------------------

    def _arrive(self, arrival: Arrival) -> None:
        self._num_fruitless = 0
        request, now = arrival.request, self._events.now
        request.arrival_time = self._clock
        if arrival.deadline_s is not None:
            request.deadline = self._clock + arrival.deadline_s - arrival.at_s
        refusal = None
        try:
            self._core.add(request)
        except QuireError as error:
            refusal = error
        self._recorder.arrived(now, request, is_refused=refusal is not None)
        if self._observer is not None:
            self._observer.arrived(now, request, refusal)
        if refusal is None:
            self._requests[request.request_id] = request
            self._watch(arrival)
            self._is_dry = False

    def _watch(self, arrival: Arrival) -> None:
        request_id = arrival.request.request_id
        if arrival.stop_string_at is not None:
            self._recorder.watch_for(f"{request_id}/0", arrival.stop_string_at, self._stop_string)
        for time_s, why in ((arrival.leaves_at_s, "abort"), (arrival.deadline_s, "deadline")):
            if time_s is not None:
                self._events.at(time_s, partial(self._leave, request_id, why))

    def _leave(self, request_id: str, why: str) -> None:
        self._end(self._core.abort([request_id]), why)
        self._is_dry = False

    def _stop_string(self, name: str, num_output_tokens: int) -> None:
        """Deliver a gateway's stop after the wire delay; more tokens may arrive meanwhile."""
        self._events.at(self._events.now + self._cost.wire_s, partial(self._stop_at, name, num_output_tokens))

    def _stop_at(self, name: str, num_output_tokens: int) -> None:
        ended = self._core.stop_at(name, num_output_tokens)
        if ended and self._observer is not None:
            self._observer.cut(self._events.now, name, num_output_tokens)
        self._end(ended)
        self._is_dry = False

    def _end(self, ended: list[EndedSequence], why: str | None = None) -> None:
        if ended:
            self._recorder.ended(self._events.now, ended, why)
            if self._observer is not None:
                self._observer.ended(self._events.now, ended)

    # --- the rest -----------------------------------------------------------------------------------------------------

    def _jump(self, by_s: float) -> None:
        self._skew_s += by_s
        self._is_dry = False

    def _complain(self, what: str) -> None:
        if self._observer is not None:
            self._observer.complained(self._events.now, what)


def _nothing() -> None:
    """No-op event: marks the moment when the scheduler is free again."""
