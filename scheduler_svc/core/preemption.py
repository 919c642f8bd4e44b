"""Preemptions: who leaves when blocks run out."""

from scheduler_svc.core.request import Sequence


class NewestByRecompute:
    """The last that started; its KV is computed again later (R130, R131)."""

    mode = "recompute"

    def victim(self, running: list[Sequence]) -> Sequence:
        """The tail."""
        return running[-1]


class LeastImportantByRecompute:
    """The largest (priority, arrival time) among the running (R130)."""

    mode = "recompute"

    def victim(self, running: list[Sequence]) -> Sequence:
        """The first of those with the largest key."""
        return max(running, key=lambda s: (s.request.priority, s.request.arrival_time))
