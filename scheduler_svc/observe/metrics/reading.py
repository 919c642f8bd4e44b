"""What others own and metrics tell, read whenever somebody asks: queues, reasons, blocks, workers. Nothing is counted here."""

import asyncio
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from block_manager.pool import PoolCounts
from scheduler_svc.core.reasons import WAITING_QUEUES
from scheduler_svc.loop.readiness import Readiness
from scheduler_svc.observe.explanations import Explanations
from scheduler_svc.observe.metrics import definitions as d
from scheduler_svc.observe.recording.recorder import AnyCore
from scheduler_svc.requests.book import RequestBook
from scheduler_svc.settings import SchedulerSettings
from scheduler_svc.workers.lane import WorkerLane
from svc_common.metrics import MetricSpec, Values

_REQUESTS_AT_A_TIME = 64
_NO_BLOCKS = PoolCounts(0, 0, 0)


@dataclass(frozen=True, slots=True)
class Watched:
    """Whom the metrics are about. `core()`: the one in force, None before a worker has said what it has."""

    settings: SchedulerSettings
    book: RequestBook
    core: Callable[[], AnyCore | None]
    explanations: Explanations
    readiness: Readiness
    lanes: Sequence[WorkerLane]


class Readings:
    """Reads them on the event loop, where their owners live."""

    def __init__(self, watched: Watched) -> None:
        self._watched = watched

    @property
    def queues(self) -> tuple[int, int, int]:
        """Groups that wait, run and are swapped out; requests that are not in the core yet wait too."""
        core = self._watched.core()
        waiting, running, swapped = (0, 0, 0) if core is None else core.queue_lengths
        return waiting + self._watched.book.inputs.num_pending, running, swapped

    @property
    def pools(self) -> tuple[PoolCounts, PoolCounts]:
        """Blocks of the devices and of the hosts."""
        core = self._watched.core()
        return (_NO_BLOCKS, _NO_BLOCKS) if core is None else core.pool_counts

    async def read(self) -> Mapping[MetricSpec, Values]:
        """All of it. Steps go on between some requests and the next; the rest is of one moment."""
        reasons = await self._reasons()
        watched = self._watched
        waiting, running, swapped = self.queues
        limits = watched.settings
        return {
            d.WAITING_BY_REASON: {(reason,): reasons[reason] for reason in d.WAIT_REASONS},
            d.REQUESTS: {("waiting",): waiting, ("running",): running, ("swapped",): swapped},
            d.WAITING_TOKENS: {(): watched.book.room.num_tokens},
            d.WAITING_LIMIT: {("requests",): limits.max_waiting_requests, ("tokens",): limits.max_waiting_tokens},
            d.SERVING: {(): watched.readiness.is_open},
            d.WORKER_UP: {(lane.address,): lane.is_here for lane in watched.lanes},
            d.BLOCKS: dict(self._blocks()),
        }

    async def _reasons(self) -> Counter[str]:
        """By some dozens of requests at a time, as a long queue would hold the next step up for milliseconds."""
        counts: Counter[str] = Counter()
        for number, live in enumerate(self._watched.book.live(), 1):
            if not live.is_over:
                queue, reason, _ = self._watched.explanations.reason_of(live)
                if queue in WAITING_QUEUES:
                    counts[reason.value] += 1
            if number % _REQUESTS_AT_A_TIME == 0:
                await asyncio.sleep(0)
        return counts

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
