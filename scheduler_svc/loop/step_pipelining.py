"""Step pipelining (asynchronous scheduling, overlap): whether a plan is made and sent while an earlier one runs.

A turn, with overlap (`depth` plans in flight) and without:

    overlap                                     no overlap
      take ends, new requests                     take ends, new requests
      plan k+1 = core.schedule()                  plan k = core.schedule()
      announce(plan k+1), send                    announce(plan k), send
      again, while there is room                  wait for the result of k
      wait for the result of k                    settle(plan k, result k)
      settle(plan k, result k)

The policy states how many plans may be in flight (`depth` of the core); `overlaps` of the core keeper is whether
that is used (docs/decisions/0015-no-overlap-on-a-cpu.md). `core.plans_in_flight` has what each will return.
"""

from scheduler_svc.loop.core_keeper import CoreKeeper
from scheduler_svc.loop.lane_keeper import LaneKeeper
from scheduler_svc.workers.lane import WorkerLane

_SLOW_S = 0.5
"""A rank's step that takes longer no longer delays plans for the other ranks."""


class StepPipelining:
    """Reads the core in use and the lanes to connected workers."""

    def __init__(self, keeper: CoreKeeper, lanes: LaneKeeper) -> None:
        self._keeper = keeper
        self._lanes = lanes

    def has_work(self) -> bool:
        """True if a plan would do anything: sequences to run, or rows for the worker to drop."""
        assert self._keeper.core is not None
        return self._keeper.core.has_unfinished or any(lane.planner.num_rows for lane in self._lanes.lanes)

    def ready(self) -> list[int | None]:
        """Workers for which a plan may be made and sent before a result is read; None: for all ranks together.

        Ranks are planned for when all are done, so that steps which drifted apart run together again; a slow
        rank is not waited for.
        """
        core, here = self._keeper.core, self._lanes.here
        assert core is not None
        if core.has_worker_per_lane:
            busy = self.busy()
            return [None] if len(busy) < len(here) and all(lane.seconds >= _SLOW_S for lane in busy) else []
        depth = core.depth if self._keeper.overlaps else 1
        return [lane.number for lane in here if len(lane.in_flight) < depth and self._has_work_for(lane)]

    def _has_work_for(self, lane: WorkerLane) -> bool:
        assert self._keeper.core is not None
        return len(self._lanes.lanes) == 1 or self._keeper.core.has_work(lane.number) or lane.planner.num_rows > 0

    def reads_inputs(self) -> bool:
        """True if inputs matter before the next result: a worker has nothing in flight, or was granted steps."""
        core, here = self._keeper.core, self._lanes.here
        assert core is not None
        if core.has_worker_per_lane:
            return False
        return any(not lane.in_flight or core.has_grant(lane.number) for lane in here)

    def busy(self) -> list[WorkerLane]:
        """Lanes to connected workers with a plan in flight."""
        return [lane for lane in self._lanes.here if lane.in_flight]
