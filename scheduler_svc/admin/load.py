"""GetLoad and ListWorkers: the load and the workers. Read only."""

from collections.abc import Callable, Sequence

from protos.inference.v1 import admin_pb2
from scheduler_svc.admin.messages import pool_message
from scheduler_svc.observe.recording.recorder import AnyCore
from scheduler_svc.observe.step_log import StepLog
from scheduler_svc.readiness import Readiness
from scheduler_svc.requests.request_book import RequestBook
from scheduler_svc.settings import SchedulerSettings
from scheduler_svc.workers.lane import WorkerLane
from svc_common.clock import monotonic_ns

_RATE_WINDOW_S = 10.0


class LoadReport:
    """Load for balancers and autoscalers. `core()`: the core in use, None before a worker reported its size."""

    def __init__(
        self,
        settings: SchedulerSettings,
        book: RequestBook,
        core: Callable[[], AnyCore | None],
        log: StepLog,
        readiness: Readiness,
    ) -> None:
        self._settings = settings
        self._book = book
        self._core = core
        self._log = log
        self._readiness = readiness

    def message(self) -> admin_pb2.GetLoadResponse:
        """The current load."""
        now_ns, room = monotonic_ns(), self._book.room
        load = admin_pb2.GetLoadResponse(
            num_waiting=room.num_requests,
            num_waiting_tokens=room.num_tokens,
            max_waiting=self._settings.max_waiting_requests,
            max_waiting_tokens=self._settings.max_waiting_tokens,
            output_tokens_per_s=self._log.output_tokens_per_s(now_ns, _RATE_WINDOW_S),
            starts_per_s=room.starts_per_s(now_ns),
            draining=self._readiness.draining,
            serving=self._readiness.is_open,
            tenants=self._tenants(),
        )
        core = self._core()
        if core is not None:
            waiting, running, swapped = core.queue_lengths
            load.queues.CopyFrom(admin_pb2.Queues(waiting=waiting, running=running, swapped=swapped))
            gpu, cpu = core.pool_counts
            load.gpu.CopyFrom(pool_message(gpu))
            load.cpu.CopyFrom(pool_message(cpu))
        return load

    def _tenants(self) -> list[admin_pb2.TenantLoad]:
        found: dict[str, admin_pb2.TenantLoad] = {}
        for live in self._book.live():
            name = live.submission.tenant
            tenant = found.setdefault(name, admin_pb2.TenantLoad(tenant=name))
            tenant.num_waiting += live.is_waiting
            tenant.num_running += not live.is_waiting
        return [found[name] for name in sorted(found)]


def workers_message(lanes: Sequence[WorkerLane], core: AnyCore | None) -> admin_pb2.ListWorkersResponse:
    """All workers, by lane. Queues and free blocks are reported of worker groups, not of single ranks."""
    workers = [_worker(lane) for lane in lanes]
    if core is not None and not core.has_worker_per_lane:
        for worker in workers:
            if worker.lane >= len(core.states):
                continue
            state = core.states[worker.lane]
            worker.num_running, worker.num_swapped = len(state.running), len(state.swapped)
            worker.num_free_gpu_blocks = state.cache.num_free_gpu if worker.ready else 0
    return admin_pb2.ListWorkersResponse(workers=workers)


def _worker(lane: WorkerLane) -> admin_pb2.Worker:
    """A worker. While it is away its last known values are reported, except for the epoch, which is over."""
    worker = admin_pb2.Worker(
        address=lane.address,
        lane=lane.number,
        ready=lane.is_here,
        reason=lane.reason,
        warming=lane.is_warming,
        draining=lane.is_draining,
    )
    if (owned := lane.owned) is not None:
        worker.boot_id = owned.worker_boot_id
        worker.epoch = owned.epoch if lane.is_here else 0
        worker.model = owned.limits.model
        worker.num_gpu_blocks = owned.cache.num_gpu_blocks
        worker.num_cpu_blocks = owned.cache.num_cpu_blocks
    return worker
