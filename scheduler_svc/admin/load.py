"""GetLoad and ListWorkers: the load and the workers. Read only."""

from collections.abc import Callable, Iterable, Sequence

from protos.inference.v1 import admin_pb2
from scheduler_svc.admin.messages import pool_message
from scheduler_svc.observe.metrics import definitions as d
from scheduler_svc.observe.queued_work import queued_work_s, states_at_work
from scheduler_svc.observe.recording.recorder import AnyCore
from scheduler_svc.observe.step_log import StepLog
from scheduler_svc.readiness import Readiness
from scheduler_svc.requests.request_book import RequestBook
from scheduler_svc.settings import SchedulerSettings
from scheduler_svc.workers.lane import WorkerLane
from svc_common.clock import monotonic_ns
from svc_common.observability.metrics import MetricSpec, Sums

_RATE_WINDOW_S = 10.0


class LoadReport:
    """Load for balancers and autoscalers. `core()`: the core in use, None before a worker reported its size.

    `sums()`: values of the scheduler's counters.
    """

    def __init__(
        self,
        settings: SchedulerSettings,
        book: RequestBook,
        core: Callable[[], AnyCore | None],
        log: StepLog,
        readiness: Readiness,
        sums: Callable[[], Sums],
    ) -> None:
        self._settings = settings
        self._book = book
        self._core = core
        self._log = log
        self._readiness = readiness
        self._sums = sums

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
            adapters=self._adapters(),
            totals=_totals(self._sums()),
        )
        core = self._core()
        num_waiting = self._book.inputs.num_pending + (0 if core is None else core.queue_lengths[0])
        if (work_s := queued_work_s(core, num_waiting, room.num_tokens)) is not None:
            load.queued_work_s = work_s
        load.queues.waiting = num_waiting
        if core is not None:
            _, load.queues.running, load.queues.swapped = core.queue_lengths
            gpu, cpu = core.pool_counts
            load.gpu.CopyFrom(pool_message(gpu))
            load.cpu.CopyFrom(pool_message(cpu))
            load.max_running = sum(state.limits.max_num_seqs for state in states_at_work(core))
        return load

    def _tenants(self) -> list[admin_pb2.TenantLoad]:
        found: dict[str, admin_pb2.TenantLoad] = {}
        for live in self._book.live():
            name = live.submission.tenant
            tenant = found.setdefault(name, admin_pb2.TenantLoad(tenant=name))
            tenant.num_waiting += live.is_waiting
            tenant.num_running += not live.is_waiting
        return [found[name] for name in sorted(found)]

    def _adapters(self) -> Iterable[admin_pb2.AdapterLoad]:
        found: dict[str, admin_pb2.AdapterLoad] = {}
        for live in self._book.live():
            if name := live.submission.adapter:
                adapter = found.setdefault(name, admin_pb2.AdapterLoad(adapter=name))
                adapter.num_waiting += live.is_waiting
                adapter.num_running += not live.is_waiting
        return (found[name] for name in sorted(found))


def _totals(sums: Sums) -> admin_pb2.LoadTotals:
    return admin_pb2.LoadTotals(
        prefill_tokens=_total(sums, d.STEP_TOKENS, "prefill"),
        output_tokens=_total(sums, d.OUTPUT_TOKENS),
        queried_tokens=_total(sums, d.QUERIED_TOKENS),
        hit_tokens=_total(sums, d.HIT_TOKENS),
        preemptions=_total(sums, d.PREEMPTIONS),
    )


def _total(sums: Sums, spec: MetricSpec, label: str = "") -> int:
    """Sum over all series of a counter, or the series with that label."""
    series = sums.get(spec.name, {})
    return int(sum(value for labels, value in series.items() if not label or labels == (label,)))


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
