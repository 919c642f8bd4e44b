"""Lane choices with several lanes: Chitu's scheduler groups, its cache slots, and data-parallel ranks.

A lane has one plan in flight, except a rank: each of its tasks waits for its own result.
"""

from collections import deque
from typing import Any

from scheduler_svc.core.parts.lane_choice import OneWorker
from scheduler_svc.core.request import Group


class SchedulerGroups(OneWorker):
    """One plan in flight per scheduler group; the group that has been free longest takes the next plan.

    Groups with arrived results become free before the next plan is made, smaller ids first. A plan may occupy
    its group even if it is empty; the group is freed in the same way.
    """

    def __init__(self, num_lanes: int) -> None:
        self.depth = self.num_lanes = num_lanes
        self._free = deque(range(num_lanes))
        self._used: dict[int, int | None] = {}

    def free_lanes(self) -> list[int]:
        """The next group in turn; none while all are in flight."""
        for lane in self._back():
            del self._used[lane]
            self._free.append(lane)
        return [self._free[0]] if self._free else []

    def on_planned(self, lane: int, step: int) -> None:
        """Mark the group as in flight with that step."""
        self._free.remove(lane)
        self._used[lane] = step

    def on_result(self, step: int) -> None:
        """Mark the group of that step as done; unknown steps are ignored."""
        for lane, in_flight in self._used.items():
            if in_flight == step:
                self._used[lane] = None

    def reset(self) -> None:
        """Mark all groups as done."""
        self._used = dict.fromkeys(self._used)

    def view(self) -> dict[str, Any]:
        """`free_lanes`: queue, front first; `used_lanes`: step by group, None = done; `lanes_back`: groups that
        are done.
        """
        return {
            "free_lanes": list(self._free),
            "used_lanes": {lane: self._used[lane] for lane in sorted(self._used)},
            "lanes_back": self._back(),
        }

    def _back(self) -> list[int]:
        return sorted(lane for lane, step in self._used.items() if step is None)


class SkewSlots(SchedulerGroups):
    """Scheduler groups that are cache slots: a task stays in its slot until it ends. `sizes`: maximum tasks of each."""

    keeps_groups = True

    def __init__(self, sizes: list[int]) -> None:
        super().__init__(len(sizes))
        self.sizes = sizes
        self._slots: list[list[Group]] = [[] for _ in sizes]

    def residents(self, lane: int) -> list[Group]:
        """Unfinished tasks in order of place; the last task replaces one that ended."""
        slot = self._slots[lane]
        for group in [group for group in slot if group.is_finished]:
            place = slot.index(group)
            slot[place] = slot[-1]
            slot.pop()
        return list(slot)

    def vacate(self) -> None:
        """Empty all slots."""
        self._slots = [[] for _ in self.sizes]

    def settle(self, group: Group, lane: int) -> None:
        """Assign a task to a slot, behind the others."""
        group.lane = lane
        self._slots[lane].append(group)

    def view(self) -> dict[str, Any]:
        """The view of `SchedulerGroups` plus `slots`: request ids by slot."""
        slots = [[group.request.request_id for group in self.residents(lane)] for lane in range(len(self.sizes))]
        return {**super().view(), "slots": slots}


class Ranks:
    """Data-parallel ranks: each call of `schedule` plans one step per rank, including empty ones.

    A sequence is in at most one plan, so a rank has at most as many plans in flight as tasks. `cursor`: the
    rank next in the round-robin. `out`: ranks without a worker, which are assigned no tasks.
    """

    has_worker_per_lane = keeps_groups = True
    out: tuple[int, ...] = ()

    def __init__(self, num_ranks: int, tasks_per_rank: int) -> None:
        self.num_ranks = self.num_lanes = num_ranks
        self.tasks_per_rank = self.depth = tasks_per_rank
        self.cursor = 0

    def free_lanes(self) -> list[int]:
        """All ranks."""
        return list(range(self.num_ranks))

    def on_planned(self, lane: int, step: int) -> None:
        """No-op: tasks in flight wait for their own results."""

    def on_result(self, step: int) -> None:
        """No-op."""

    def reset(self) -> None:
        """Mark all ranks as having workers; plans are not tracked."""
        self.out = ()

    def vacate(self) -> None:
        """No-op: ranks are lost one by one."""

    def lose(self, lane: int) -> None:
        """The rank has no sequences and accepts none."""
        self.out = (*self.out, lane)

    def take_back(self, lane: int) -> None:
        """The rank may be assigned tasks again."""
        self.out = tuple(rank for rank in self.out if rank != lane)

    def assign(self, group: Group, has_room: list[bool]) -> int | None:
        """Assign a task permanently to the next rank with room. None, with the cursor unchanged, if there is none."""
        for _ in has_room:
            rank, self.cursor = self.cursor, (self.cursor + 1) % self.num_ranks
            if has_room[rank]:
                self.settle(group, rank)
                return rank
        return None

    def settle(self, group: Group, rank: int) -> None:
        """Assign a task permanently to that rank; the cursor is unchanged."""
        group.lane = rank

    def view(self) -> dict[str, Any]:
        """The round-robin position, as `cursor`."""
        return {"cursor": self.cursor}
