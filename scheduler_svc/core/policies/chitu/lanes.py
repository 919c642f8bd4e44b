"""Placements with several lanes: Chitu's scheduler groups, its cache slots with residents, and data-parallel ranks.

A lane is taken by one plan at a time, but for ranks, whose tasks wait for their results one by one.
"""

from collections import deque
from typing import Any

from scheduler_svc.core.parts.placement import OneWorker
from scheduler_svc.core.request import Group


class SchedulerGroups(OneWorker):
    """As many plans under way as there are groups; the one that is free for longest takes the next plan (R176-R179).

    Groups whose results came are given back before the next plan, smaller ids first. A plan may take its group though it came out
    empty; it is given back likewise.
    """

    def __init__(self, num_lanes: int) -> None:
        self.depth = num_lanes
        self._free = deque(range(num_lanes))
        self._used: dict[int, int | None] = {}

    def free_lanes(self) -> list[int]:
        """The one whose turn it is; none while all are under way."""
        for lane in self._back():
            del self._used[lane]
            self._free.append(lane)
        return [self._free[0]] if self._free else []

    def on_planned(self, lane: int, step: int) -> None:
        """The lane is under way with that step."""
        self._free.remove(lane)
        self._used[lane] = step

    def on_result(self, step: int) -> None:
        """It is done; unknown steps are ignored."""
        for lane, under_way in self._used.items():
            if under_way == step:
                self._used[lane] = None

    def reset(self) -> None:
        """All are done."""
        self._used = dict.fromkeys(self._used)

    def view(self) -> dict[str, Any]:
        """`free_lanes`: queue, front first; `used_lanes`: step by lane, None = done; `lanes_back`: those that are done."""
        return {
            "free_lanes": list(self._free),
            "used_lanes": {lane: self._used[lane] for lane in sorted(self._used)},
            "lanes_back": self._back(),
        }

    def _back(self) -> list[int]:
        return sorted(lane for lane, step in self._used.items() if step is None)


class SkewSlots(SchedulerGroups):
    """Scheduler groups that are cache slots: a task stays in its slot for life (R183, R186). `sizes`: tasks in each."""

    def __init__(self, sizes: list[int]) -> None:
        super().__init__(len(sizes))
        self.sizes = sizes
        self._slots: list[list[Group]] = [[] for _ in sizes]

    def residents(self, lane: int) -> list[Group]:
        """Live tasks in their places: who ended was replaced by the last one then."""
        slot = self._slots[lane]
        for group in [group for group in slot if group.is_finished]:
            place = slot.index(group)
            slot[place] = slot[-1]
            slot.pop()
        return list(slot)

    def settle(self, group: Group, lane: int) -> None:
        """A task moves in, behind the others."""
        group.lane = lane
        self._slots[lane].append(group)

    def view(self) -> dict[str, Any]:
        """Also `slots`: request ids."""
        slots = [[group.request.request_id for group in self.residents(lane)] for lane in range(len(self.sizes))]
        return {**super().view(), "slots": slots}


class Ranks:
    """Data-parallel ranks: each call plans one step for every rank, empty ones too (R188, R190, R194).

    A sequence is in one plan at most, so no rank has more plans under way than tasks. `cursor`: the rank that is asked first.
    `out`: ranks without a worker, which become nobody's owner.
    """

    has_worker_per_lane = True
    out: tuple[int, ...] = ()

    def __init__(self, num_ranks: int, tasks_per_rank: int) -> None:
        self.num_ranks = num_ranks
        self.tasks_per_rank = self.depth = tasks_per_rank
        self.cursor = 0

    def free_lanes(self) -> list[int]:
        """All."""
        return list(range(self.num_ranks))

    def on_planned(self, lane: int, step: int) -> None:
        """Nothing: tasks under way wait themselves."""

    def on_result(self, step: int) -> None:
        """Nothing."""

    def reset(self) -> None:
        """Nothing is remembered of plans; all have workers."""
        self.out = ()

    def lose(self, lane: int) -> None:
        """It owns nobody and gets nobody."""
        self.out = (*self.out, lane)

    def take_back(self, lane: int) -> None:
        """It may own tasks again."""
        self.out = tuple(rank for rank in self.out if rank != lane)

    def assign(self, group: Group, has_room: list[bool]) -> int | None:
        """The task's owner for life: the next rank with room. None, and the cursor where it was, when there is none."""
        for _ in has_room:
            rank, self.cursor = self.cursor, (self.cursor + 1) % self.num_ranks
            if has_room[rank]:
                self.settle(group, rank)
                return rank
        return None

    def settle(self, group: Group, rank: int) -> None:
        """That rank is the task's owner for life; the cursor stays."""
        group.lane = rank

    def view(self) -> dict[str, Any]:
        """`cursor`."""
        return {"cursor": self.cursor}
