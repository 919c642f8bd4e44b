"""The stream between scheduler and worker in virtual time, and the worker process at its end.

Step ids count within an epoch. A broken stream loses the messages on it; after a reconnect the scheduler
resends unanswered plans and the process resends the results that it still holds, so results may arrive late
and twice, but count once. A process that died restarts empty: a new epoch, in which the scheduler starts from
its own state.
"""

import random
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Protocol

from quire_tools.simulation.cost_model import CostModel, StepShape
from quire_tools.simulation.events import EventQueue
from quire_tools.simulation.faults import Faults
from quire_tools.simulation.virtual_worker import VirtualWorker
from scheduler_svc.core.entries import StepGrant
from scheduler_svc.core.plan import StepPlan, StepResult

_SPARE_RESULTS = 2


@dataclass(frozen=True, slots=True)
class SimulatedAnswer:
    """A result as the scheduler gets it, with the duration at the worker. `error`: the whole step failed.

    `continues`: the worker has begun the next granted step.
    """

    plan: StepPlan
    result: StepResult
    error: str | None
    continues: bool = False


class Scheduling(Protocol):
    """The scheduler's end of the stream."""

    def on_answer(self, answer: SimulatedAnswer) -> None:
        """A plan's result arrived; once for each plan, and in order on each lane."""

    def on_killed(self) -> None:
        """The worker's process died."""

    def on_new_epoch(self) -> None:
        """The worker holds nothing, and plans in flight have no results."""

    def on_resumed(self) -> None:
        """The stream is open again."""


class SimulatedStream(Protocol):
    """A simulation's stream to its worker. `num_repeated`: number of results received again."""

    num_repeated: int

    @property
    def is_open(self) -> bool:
        """True if plans can be sent."""

    @property
    def in_flight(self) -> list[StepPlan]:
        """Plans in flight, oldest first."""

    @property
    def num_rows(self) -> int:
        """Number of sequences that the worker holds."""

    def send(self, plan: StepPlan) -> None:
        """Send a plan; also one without work, which may remove rows."""

    def follow(self, plan: StepPlan) -> None:
        """Expect the result of a granted step, which the worker has begun."""

    def revoke(self) -> None:
        """Tell the worker to begin no further granted step."""


@dataclass(slots=True)
class _Process:
    """The worker process: plans accepted, results held (by step id), and when each lane is free.

    `num_granted`: granted steps that it has not begun; a step that draws one of `stop_token_ids` is the last.

    `workers`: by lane, if each has its own; else one at lane 0.
    """

    workers: dict[int, VirtualWorker] = field(default_factory=dict)
    last_accepted: int = 0
    num_granted: int = 0
    stop_token_ids: frozenset[int] = frozenset()
    held: OrderedDict[int, SimulatedAnswer] = field(default_factory=OrderedDict)
    lost: int = 0
    lanes: dict[int, float] = field(default_factory=dict)

    def take_grant(self, grant: StepGrant | None) -> None:
        """Take the grant of an accepted plan, which replaces the one before."""
        given = grant or StepGrant(0)
        self.num_granted, self.stop_token_ids = given.num_steps, frozenset(given.stop_token_ids)


class Link:
    """Owner of the stream, the epoch and the process. `new_worker` makes a worker: one for all lanes, or
    one for each (`worker_per_lane`), which fail together."""

    def __init__(
        self,
        events: EventQueue,
        scheduling: Scheduling,
        new_worker: Callable[[], VirtualWorker],
        cost: CostModel,
        faults: Faults,
        rng: random.Random,
        *,
        depth: int,
        block_size: int,
        worker_per_lane: bool,
    ) -> None:
        self.num_repeated = 0
        self._events = events
        self._scheduling = scheduling
        self._new_worker = new_worker
        self._cost = cost
        self._faults = faults
        self._rng = rng
        self._block_size = block_size
        self._ring_depth = depth + _SPARE_RESULTS
        self._worker_per_lane = worker_per_lane
        self._process = _Process()
        self._stream = 1
        self._is_open = True
        self._is_up = True
        self._unanswered: OrderedDict[int, StepPlan] = OrderedDict()
        self._last_id = self._last_planned = 0
        self._last_down = self._last_up = events.now
        for time_s in faults.kills:
            events.at(time_s, self._kill)
        for time_s in faults.breaks:
            events.at(time_s, self._break)

    @property
    def is_open(self) -> bool:
        """True if plans can be sent."""
        return self._is_open

    @property
    def in_flight(self) -> list[StepPlan]:
        """Plans in flight, oldest first."""
        return list(self._unanswered.values())

    @property
    def num_rows(self) -> int:
        """Number of sequences that the workers hold."""
        return sum(worker.num_rows for worker in self._process.workers.values())

    def send(self, plan: StepPlan) -> None:
        """Send a plan; also one without work, which may remove rows."""
        self._last_id += 1
        self._last_planned = plan.step
        self._unanswered[self._last_id] = plan
        self._transmit(self._last_id, plan)

    def follow(self, plan: StepPlan) -> None:
        """Expect the result of a granted step. It is computed now, as if from when the step before it ended."""
        self._last_id += 1
        self._last_planned = plan.step
        self._unanswered[self._last_id] = plan
        self._queue(self._process, self._last_id, plan, self._process.lanes[plan.lane])

    def revoke(self) -> None:
        """Tell the worker to begin no further granted step."""
        self._last_down = max(self._last_down, self._events.now + self._cost.wire_s + self._jitter())
        self._events.at(self._last_down, partial(self._revoked, self._process))

    # --- to the worker ------------------------------------------------------------------------------------------------

    def _revoked(self, process: _Process) -> None:
        process.num_granted = 0

    def _transmit(self, step_id: int, plan: StepPlan) -> None:
        self._last_down = max(self._last_down, self._events.now + self._cost.schedule_s + self._jitter())
        self._events.at(self._last_down, partial(self._arrived, self._stream, step_id, plan))

    def _arrived(self, stream: int, step_id: int, plan: StepPlan) -> None:
        process = self._process
        if stream != self._stream or not self._is_open:
            return
        if step_id in process.held:
            self._upload(step_id, process.held[step_id])
        elif step_id == process.last_accepted + 1:
            process.last_accepted = step_id
            process.take_grant(plan.grant)
            self._queue(process, step_id, plan, max(self._events.now, process.lanes.get(plan.lane, 0.0)))

    def _queue(self, process: _Process, step_id: int, plan: StepPlan, start: float) -> None:
        """Run the plan from `start` on, when its lane is free."""
        shape = StepShape.of(plan, self._block_size)
        duration_s = 0.0 if plan.is_empty else self._duration_s(shape, start)
        process.lanes[plan.lane] = start + duration_s
        self._events.at(start, partial(self._run, process, step_id, plan, duration_s, start + duration_s))

    def _duration_s(self, shape: StepShape, start: float) -> float:
        noise = self._rng.lognormvariate(0.0, self._cost.noise) if self._cost.noise else 1.0
        return self._cost.step_s(shape) * noise * self._faults.slowness(start)

    def _run(self, process: _Process, step_id: int, plan: StepPlan, duration_s: float, end_s: float) -> None:
        if process is not self._process:
            return
        fails = bool(plan.num_scheduled) and self._happens(self._faults.step_failure)
        result = self._worker_of(plan).run(plan, fails=fails)
        if not fails and self._happens(self._faults.row_failure):
            result = self._fail_a_row(plan, result)
        result = replace(result, duration_s=duration_s)
        answer = SimulatedAnswer(plan, result, "the step failed" if fails else None)
        self._events.at(end_s, partial(self._done, process, step_id, answer))

    def _fail_a_row(self, plan: StepPlan, result: StepResult) -> StepResult:
        if not plan.scheduled:
            return result
        name = self._rng.choice(plan.scheduled).name
        tokens = dict(result.tokens)
        if result.column is not None and plan.fast is not None:
            tokens |= {n: [int(t)] for n, t in zip(plan.fast.names(), result.column, strict=True)}
        for part in (tokens, result.children, result.candidates):
            part.pop(name, None)
        return replace(result, tokens=tokens, column=None, failed={name: "not finite"})

    def _done(self, process: _Process, step_id: int, answer: SimulatedAnswer) -> None:
        if process is not self._process:
            return
        if process.num_granted and _goes_on(answer, process.stop_token_ids):
            answer = replace(answer, continues=True)
            process.num_granted -= 1
            process.last_accepted += 1
        process.held[step_id] = answer
        while len(process.held) > self._ring_depth:
            process.lost = max(process.lost, process.held.popitem(last=False)[0])
        self._upload(step_id, answer)
        if self._happens(self._faults.duplicate):
            self._upload(step_id, answer)

    # --- to the scheduler ---------------------------------------------------------------------------------------------

    def _upload(self, step_id: int, answer: SimulatedAnswer) -> None:
        if self._is_open:
            self._last_up = max(self._last_up, self._events.now + self._cost.wire_s + self._jitter())
            self._events.at(self._last_up, partial(self._received, self._stream, step_id, answer))

    def _received(self, stream: int, step_id: int, answer: SimulatedAnswer) -> None:
        if stream != self._stream or not self._is_open:
            return
        if self._unanswered.pop(step_id, None) is None:
            self.num_repeated += 1
            return
        self._scheduling.on_answer(answer)
        self._worker_of(answer.plan).told(answer.plan.step, self._last_planned)

    def _worker_of(self, plan: StepPlan) -> VirtualWorker:
        lane = plan.lane if self._worker_per_lane else 0
        if lane not in self._process.workers:
            self._process.workers[lane] = self._new_worker()
        return self._process.workers[lane]

    # --- faults -------------------------------------------------------------------------------------------------------

    def _break(self) -> None:
        if self._is_open:
            self._is_open = False
            self._process.num_granted = 0
            self._events.at(self._events.now + self._faults.reconnect_s, partial(self._reconnect, self._stream))

    def _kill(self) -> None:
        self._is_open = self._is_up = False
        self._process = _Process()
        self._stream += 1
        self._scheduling.on_killed()
        self._events.at(self._events.now + self._faults.restart_s, partial(self._restart, self._stream))

    def _restart(self, stream: int) -> None:
        if stream == self._stream:
            self._is_up = True
            self._begin_epoch()

    def _reconnect(self, stream: int) -> None:
        """Resume the epoch, unless an unread result was lost or another scheduler owned the worker meanwhile."""
        if stream != self._stream or not self._is_up:
            return
        process = self._process
        if any(step_id <= process.lost for step_id in self._unanswered) or self._happens(self._faults.takeover):
            self._process = _Process()
            self._begin_epoch()
            return
        self._open()
        for step_id, answer in process.held.items():
            if step_id in self._unanswered:
                self._upload(step_id, answer)
        for step_id, plan in self._unanswered.items():
            self._transmit(step_id, plan)
        self._scheduling.on_resumed()

    def _begin_epoch(self) -> None:
        self._unanswered.clear()
        self._last_id = 0
        self._open()
        self._scheduling.on_new_epoch()

    def _open(self) -> None:
        self._stream += 1
        self._is_open = True
        self._last_down = self._last_up = self._events.now

    def _jitter(self) -> float:
        return self._rng.uniform(0.0, self._faults.jitter_s) if self._faults.jitter_s else 0.0

    def _happens(self, chance: float) -> bool:
        return chance > 0 and self._rng.random() < chance


def _goes_on(answer: SimulatedAnswer, stop_token_ids: frozenset[int]) -> bool:
    """True if every row continues as before, so that the worker begins the next granted step."""
    result = answer.result
    if answer.error is not None or result.failed or result.mask_s:
        return False
    drawn = {token for tokens in result.tokens.values() for token in tokens}
    return stop_token_ids.isdisjoint(drawn if result.column is None else drawn | set(result.column.tolist()))
