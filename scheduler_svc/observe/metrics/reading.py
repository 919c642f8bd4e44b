"""Gauges read from their owners on request: queues, wait reasons, blocks, workers."""

import asyncio
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from block_manager.pool import PoolCounts
from scheduler_svc.core.reasons import WAITING_QUEUES
from scheduler_svc.observe.explanations import Explanations
from scheduler_svc.observe.metrics import definitions as d
from scheduler_svc.observe.queued_work import queued_work_s
from scheduler_svc.observe.recording.recorder import AnyCore
from scheduler_svc.readiness import Readiness
from scheduler_svc.requests.request_book import RequestBook
from scheduler_svc.requests.value_store import ValueStore
from scheduler_svc.settings import SchedulerSettings
from scheduler_svc.workers.roster import WorkerRoster
from svc_common.observability.metrics import MetricSpec, Values

_REQUESTS_AT_A_TIME = 64
_NO_BLOCKS = PoolCounts(0, 0, 0)


@dataclass(frozen=True, slots=True)
class Watched:
    """What the metrics read. `core()`: the core in use, None before a worker reported its size."""

    settings: SchedulerSettings
    book: RequestBook
    core: Callable[[], AnyCore | None]
    explanations: Explanations
    readiness: Readiness
    roster: WorkerRoster
    values: ValueStore


class Readings:
    """Reads gauges on the event loop, to which their owners belong."""

    def __init__(self, watched: Watched) -> None:
        self._watched = watched

    @property
    def queues(self) -> tuple[int, int, int]:
        """Numbers of groups waiting, running and swapped out; requests that are not in the core yet count as waiting."""
        core = self._watched.core()
        waiting, running, swapped = (0, 0, 0) if core is None else core.queue_lengths
        return waiting + self._watched.book.inputs.num_pending, running, swapped

    @property
    def pools(self) -> tuple[PoolCounts, PoolCounts]:
        """Block counts of device and host memory."""
        core = self._watched.core()
        return (_NO_BLOCKS, _NO_BLOCKS) if core is None else core.pool_counts

    async def read(self) -> Mapping[MetricSpec, Values]:
        """All gauges. Steps may run while wait reasons are counted; the other values are of one moment."""
        reasons = await self._reasons()
        watched = self._watched
        waiting, running, swapped = self.queues
        limits = watched.settings
        values = watched.values
        values.expire()
        work_s = queued_work_s(watched.core(), waiting, watched.book.room.num_tokens)
        return {
            d.WAITING_BY_REASON: {(reason,): reasons[reason] for reason in d.WAIT_REASONS},
            d.REQUESTS: {("waiting",): waiting, ("running",): running, ("swapped",): swapped},
            d.WAITING_TOKENS: {(): watched.book.room.num_tokens},
            d.WAITING_LIMIT: {("requests",): limits.max_waiting_requests, ("tokens",): limits.max_waiting_tokens},
            d.QUEUED_WORK: {} if work_s is None else {(): work_s},
            d.SERVING: {(): watched.readiness.is_open},
            d.WORKER_UP: {(lane.address,): lane.is_here for lane in watched.roster.wanted},
            d.WORKER_GROUPS: self._groups(),
            d.BLOCKS: dict(self._blocks()),
            d.STORED_RESPONSES: {(): len(values)},
            d.STORED_BYTES: {(): values.num_bytes},
            d.DROPPED_RESPONSES: {("expired",): values.num_expired, ("displaced",): values.num_displaced},
        }

    async def _reasons(self) -> Counter[str]:
        """Waiting requests by reason, counted 64 at a time, because a long queue would delay the next step by milliseconds."""
        counts: Counter[str] = Counter()
        for number, live in enumerate(self._watched.book.live(), 1):
            if not live.is_over:
                queue, reason, _ = self._watched.explanations.reason_of(live)
                if queue in WAITING_QUEUES:
                    counts[reason.value] += 1
            if number % _REQUESTS_AT_A_TIME == 0:
                await asyncio.sleep(0)
        return counts

    def _groups(self) -> Values:
        """Groups bound to each worker; empty before the core is built, and for ranks."""
        core = self._watched.core()
        if core is None or core.has_worker_per_lane:
            return {}
        return {
            (lane.address, queue): len(groups)
            for lane, worker in zip(self._watched.roster.lanes, core.workers, strict=False)
            if not lane.is_gone
            for queue, groups in (("running", worker.state.running), ("swapped", worker.state.swapped))
        }

    def _blocks(self) -> list[tuple[tuple[str, ...], float]]:
        return [
            ((tier, state), value)
            for tier, pool in zip(("gpu", "cpu"), self.pools, strict=True)
            for state, value in (
                ("used", pool.total - pool.free),
                ("cached", pool.cached),
                ("free", pool.free - pool.cached),
            )
        ]
