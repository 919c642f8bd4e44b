"""The stream between scheduler and worker made of the real parts: `RowPlanner` writes the messages, `Ownership` judges them, the
simulated engine's rows and cache execute them. Only gRPC, threads and time are left out; bytes travel in virtual time.

A rival scheduler may have the worker while our stream is broken: then our epoch is over, as the lease says.
"""

import random
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial

from protos.worker.v1 import worker_pb2
from quire_tools.simulated_worker.cache import SimulatedCache
from quire_tools.simulated_worker.engine import SimulatedEngine
from quire_tools.simulated_worker.settings import SimulatedWorkerSettings
from quire_tools.simulation.cost_model import CostModel, StepShape
from quire_tools.simulation.events import EventQueue
from quire_tools.simulation.faults import Faults
from quire_tools.simulation.link import Scheduling, SimulatedAnswer
from scheduler_svc.core.plan import StepPlan
from scheduler_svc.worker_values import RowSampling
from scheduler_svc.workers.row_planner import RowPlanner
from svc_common.errors import Aborted, FailedPrecondition, Internal, QuireError
from svc_common.net import rpc
from worker_svc.rows.table import RowTable, StepBatch
from worker_svc.sampling.step_results import StepResults
from worker_svc.shell.grants import DecodeGrants
from worker_svc.shell.ownership import Hello, Ownership, StepVerdict

Results = Ownership[bytes]
OURS, RIVAL = "scheduler", "rival"
NEW_EPOCH = frozenset({"UNAVAILABLE", "INVALID_ARGUMENT"})
LEASE_S = 2.0


class FragileEngine(SimulatedEngine):
    """The simulated engine, whose next step fails when it is told to; the rows are left as a failing step leaves them."""

    fails_next = False

    def _run(self, rows: RowTable, cache: SimulatedCache, batch: StepBatch, results: StepResults) -> None:
        if self.fails_next:
            rows.void(batch)
            raise Internal("the step failed")
        super()._run(rows, cache, batch, results)

    @property
    def num_rows(self) -> int:
        """Rows it holds."""
        return int(self._rows.occupied.sum()) if self._rows is not None else 0


@dataclass(slots=True)
class _Process:
    """A worker's process. `free_at`: when the engine is."""

    boot_id: str
    ownership: Results
    engine: FragileEngine
    grants: DecodeGrants = field(default_factory=DecodeGrants)
    free_at: float = 0.0


class WireLink:
    """A `Stream` of the real parts. `num_rows`: the most that the planner gives out; `sampling`: of each request."""

    def __init__(
        self,
        settings: SimulatedWorkerSettings,
        num_rows: int,
        sampling: Callable[[str], RowSampling],
        complain: Callable[[str], None],
        events: EventQueue,
        scheduling: Scheduling,
        new_worker: object,
        cost: CostModel,
        faults: Faults,
        rng: random.Random,
        *,
        depth: int,
        block_size: int,
        worker_per_lane: bool,
    ) -> None:
        self.num_repeated = 0
        self._settings, self._num_rows_most, self._sampling, self._complain = settings, num_rows, sampling, complain
        self._events, self._scheduling, self._cost, self._faults, self._rng = events, scheduling, cost, faults, rng
        self._ring_depth, self._block_size = depth + 2, block_size
        self._num_boots = 0
        self._process = self._boot()
        self._known_boot = self._process.boot_id
        self._sent: OrderedDict[int, tuple[StepPlan, bytes]] = OrderedDict()
        self._spent: dict[int, float] = {}
        self._is_open, self._is_up, self._asks_for_new = True, True, False
        self._last_read = 0
        grant = self._process.ownership.hello(Hello(OURS), events.now)
        self._stream, self.epoch = grant.stream, grant.epoch
        self._process.engine.reset()
        self._planner = RowPlanner(num_rows, epoch=grant.epoch)
        self._last_down = self._last_up = events.now
        self._connection = 1
        for time_s in faults.kills:
            events.at(time_s, self._kill)
        for time_s in faults.breaks:
            events.at(time_s, self._break)

    def _boot(self) -> _Process:
        engine = FragileEngine(self._settings, sleep=lambda _: None)
        engine.allocate(self._settings.num_gpu_blocks, self._settings.num_cpu_blocks)
        self._num_boots += 1
        boot_id = f"worker-{self._num_boots}"
        return _Process(boot_id, Ownership(boot_id, lease_s=LEASE_S, ring_depth=self._ring_depth), engine)

    @property
    def is_open(self) -> bool:
        """Plans can be sent."""
        return self._is_open

    @property
    def in_flight(self) -> list[StepPlan]:
        """Plans sent whose results did not come yet, oldest first."""
        return [plan for plan, _ in self._sent.values()]

    @property
    def num_rows(self) -> int:
        """Rows at the worker, or rows the planner believes to be there."""
        return max(self._process.engine.num_rows, self._planner.num_rows)

    # --- to the worker ------------------------------------------------------------------------------------------------

    def send(self, plan: StepPlan) -> None:
        """Encodes a plan and sends it."""
        data = self._planner.encode(plan, self._sampling).SerializeToString()
        self._sent[self._planner.last_step_id] = (plan, data)
        self._transmit(data)

    def follow(self, plan: StepPlan) -> None:
        """Expects the result of a granted step."""
        data = self._planner.follow(plan).SerializeToString()
        self._sent[self._planner.last_step_id] = (plan, data)

    def revoke(self) -> None:
        """Tells the worker to begin no further granted step."""
        self._transmit(worker_pb2.SchedulerOutputs(revocation=worker_pb2.GrantRevocation()).SerializeToString())

    def _transmit(self, data: bytes) -> None:
        self._last_down = max(self._last_down, self._events.now + self._cost.schedule_s + self._jitter())
        self._events.at(self._last_down, partial(self._arrived, self._connection, data))

    def _arrived(self, connection: int, data: bytes) -> None:
        if connection != self._connection or not self._is_open:
            return
        message, process = worker_pb2.SchedulerOutputs.FromString(data), self._process
        if message.HasField("revocation"):
            process.grants.revoke()
            return
        try:
            verdict = process.ownership.accept(self._stream, message.epoch, message.step_id)
        except QuireError as error:
            self._complain(f"a step of ours was refused: {error}")
            return
        if verdict is StepVerdict.RUN:
            if message.step_id <= process.grants.last_begun:
                self._complain(f"step {message.step_id} was sent, and begun by a grant")
            process.grants.receive(message)
            self._queue(process, message, self._sent[message.step_id][0])
        elif verdict is StepVerdict.ANSWERED:
            self._upload(process.ownership.result(message.step_id))

    def _queue(self, process: _Process, message: worker_pb2.SchedulerOutputs, plan: StepPlan) -> None:
        """Runs it when the engine is free. `plan`: its own, or the one that granted it."""
        start = max(self._events.now, process.free_at)
        shape = StepShape.of(plan, self._block_size)
        duration_s = 0.0 if plan.is_empty else self._cost.step_s(shape) * self._faults.slowness(start)
        process.free_at = start + duration_s
        self._spent[message.step_id] = duration_s
        self._events.at(start, partial(self._run, process, message, plan, start + duration_s))

    def _run(self, process: _Process, message: worker_pb2.SchedulerOutputs, plan: StepPlan, end_s: float) -> None:
        if message.epoch != process.ownership.epoch or process is not self._process:
            return
        process.engine.fails_next = self._happens(self._faults.step_failure)
        try:
            result = process.engine.execute(message)
        except QuireError as error:
            if not process.engine.fails_next:
                self._complain(f"step {message.scheduler_step}: {error}")
            result = worker_pb2.WorkerOutputs(error=rpc.to_error_status(error))
        result.step_id, result.epoch = message.step_id, message.epoch
        self._events.at(end_s, partial(self._done, process, message, plan, result))

    def _done(
        self,
        process: _Process,
        message: worker_pb2.SchedulerOutputs,
        plan: StepPlan,
        result: worker_pb2.WorkerOutputs,
    ) -> None:
        if process is not self._process or message.epoch != process.ownership.epoch:
            return
        following = process.grants.next_step(message, result)
        result.continues = following is not None
        data = result.SerializeToString()
        if not process.ownership.record(result.epoch, result.step_id, data):
            return
        if following is not None:
            process.ownership.accept_granted()
            self._queue(process, following, plan)
        self._upload(data)
        if self._happens(self._faults.duplicate):
            self._upload(data)

    # --- to the scheduler ---------------------------------------------------------------------------------------------

    def _upload(self, data: bytes) -> None:
        if self._is_open:
            self._last_up = max(self._last_up, self._events.now + self._cost.wire_s + self._jitter())
            self._events.at(self._last_up, partial(self._received, self._connection, data))

    def _received(self, connection: int, data: bytes) -> None:
        if connection != self._connection or not self._is_open:
            return
        message = worker_pb2.WorkerOutputs.FromString(data)
        decoded = self._planner.decode(message)
        if decoded is None:
            self.num_repeated += 1
            return
        self._last_read = message.step_id
        plan, _ = self._sent.pop(message.step_id)
        error = decoded.error
        if error is not None and error.status in NEW_EPOCH:
            self._asks_for_new = True
            self._break()
            return
        result = replace(decoded.result, duration_s=self._spent.pop(message.step_id))
        self._scheduling.on_answer(
            SimulatedAnswer(plan, result, None if error is None else error.message, decoded.continues)
        )

    # --- faults -------------------------------------------------------------------------------------------------------

    def _break(self) -> None:
        if not self._is_open:
            return
        self._is_open = False
        self._process.grants.revoke()
        self._connection += 1
        now = self._events.now
        self._process.ownership.leave(self._stream, now)
        self._events.at(now + self._faults.reconnect_s, partial(self._reconnect, self._connection))
        if self._happens(self._faults.takeover):
            self._events.at(now + self._faults.reconnect_s / 2, self._rival_comes)

    def _rival_comes(self) -> None:
        """Another scheduler takes the worker by force, and leaves it again in order."""
        if self._is_up and not self._is_open:
            grant = self._process.ownership.hello(Hello(RIVAL, force=True), self._events.now)
            self._process.engine.reset()
            self._process.grants = DecodeGrants()
            self._process.ownership.leave(grant.stream, self._events.now, goodbye=self._rng.random() < 0.5)

    def _kill(self) -> None:
        if not self._is_up:
            return
        self._is_open = self._is_up = False
        self._connection += 1
        self._process = self._boot()
        self._events.at(self._events.now + self._faults.restart_s, partial(self._restart, self._connection))

    def _restart(self, connection: int) -> None:
        self._is_up = True
        self._reconnect(connection)

    def _reconnect(self, connection: int) -> None:
        """Says hello until the worker is ours again."""
        if connection != self._connection or not self._is_up:
            return
        ownership = self._process.ownership
        try:
            grant = ownership.hello(self._hello(), self._events.now)
        except (Aborted, FailedPrecondition) as refusal:
            self._asks_for_new = True
            retry_s = (refusal.retry_after_s or 0.0) + 1e-6
            self._events.at(self._events.now + retry_s, partial(self._reconnect, connection))
            return
        self._is_open, self._stream, self._known_boot = True, grant.stream, self._process.boot_id
        self._last_down = self._last_up = self._events.now
        if grant.resumed:
            self._resume(deque(grant.results))
        else:
            self._begin_epoch(grant.epoch)

    def _hello(self) -> Hello:
        """A new process is asked for a new epoch, as its name says that it is new."""
        if self._asks_for_new or self._known_boot != self._process.boot_id:
            return Hello(OURS)
        return Hello(OURS, self.epoch, self._known_boot, self._last_read)

    def _resume(self, results: deque[bytes]) -> None:
        for data in results:
            self._upload(data)
        for _, data in self._sent.values():
            self._transmit(data)
        self._scheduling.on_resumed()

    def _begin_epoch(self, epoch: int) -> None:
        self._process.engine.reset()
        self._process.grants = DecodeGrants()
        self._sent.clear()
        self._spent.clear()
        self.epoch, self._last_read, self._asks_for_new = epoch, 0, False
        self._planner = RowPlanner(self._num_rows_most, epoch=epoch)
        self._scheduling.on_new_epoch()

    def _jitter(self) -> float:
        return self._rng.uniform(0.0, self._faults.jitter_s) if self._faults.jitter_s else 0.0

    def _happens(self, chance: float) -> bool:
        return chance > 0 and self._rng.random() < chance
