"""Read the steps of a recording from any step on.

Replays from the segment before that step, and keeps the replay for further reads.
"""

from collections.abc import Iterator
from dataclasses import replace

from gateway_svc.lab.source import Step
from gateway_svc.lab.tables import TableChanges, Tables
from quire_tools.lab import moments
from quire_tools.lab.course import ReplayStart
from quire_tools.replay.quiet_watcher import QuietWatcher
from scheduler_svc.core.plan import StepOutcome, StepPlan
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.observe.recording.events import Event, Failed, Returned
from scheduler_svc.observe.recording.file_format import Recording
from scheduler_svc.observe.recording.replay import Replayer

_MOST_KEPT = 400
_NEAR = 100


class RunningReplay(QuietWatcher):
    """A running replay from the segment of `start` to just before `since`. A `Watcher`; owns the steps that it saw."""

    def __init__(self, recording: Recording, start: ReplayStart, since: int) -> None:
        self._reasons = start.reasons.copy()
        self._core: Scheduler | None = None
        self._steps: dict[int, tuple[Step, Tables]] = {}
        self._open: set[int] = set()
        self._since = self._next = since
        self._replayer = Replayer(self)
        self._rest: Iterator[Event] = self._replayer.run(recording.segments(start.segment), until_step=since)

    def can_go_on(self, since: int) -> bool:
        """True if step `since` is among those kept, or just ahead."""
        return self._since <= since <= self._next + _NEAR

    def read(self, since: int, limit: int) -> list[Step]:
        """Up to `limit` steps from `since` on, oldest first; the first has complete tables."""
        while self._num_done(since) < limit and (event := next(self._rest, None)) is not None:
            self._replayer.go_on(iter((event,)))
        wanted = sorted(step for step in self._steps if step >= since)[:limit]
        changes = TableChanges()
        found = [replace(step, tables=changes.to(tables)) for step, tables in map(self._steps.__getitem__, wanted)]
        self._next = max(self._next, wanted[-1] + 1) if wanted else self._next
        self._drop_old()
        return found

    def _num_done(self, since: int) -> int:
        first_open = min(self._open, default=None)
        return sum(step >= since and (first_open is None or step < first_open) for step in self._steps)

    def _drop_old(self) -> None:
        for step in sorted(self._steps)[:-_MOST_KEPT]:
            del self._steps[step]
            self._since = step + 1

    # --- what happens ------------------------------------------------------------------------------------------------

    def began(self, core: Scheduler) -> None:
        """See `Watcher`."""
        self._core = core
        self._open.clear()

    def planned(self, plan: StepPlan, at: float) -> None:
        """See `Watcher`."""
        self._reasons.observe(plan)
        if plan.is_empty or plan.step < self._since or self._core is None:
            return
        step = moments.planned(plan, at, self._core, self._reasons)
        self._steps[plan.step] = step, self._core.block_tables()
        self._open.add(plan.step)

    def returned(self, event: Returned | Failed, outcome: StepOutcome) -> None:
        """See `Watcher`."""
        if isinstance(event, Failed):
            self._close(event.step, lambda step: moments.failed(step, event.at, event.why))
            return
        result = event.result
        self._close(
            result.step,
            lambda step: moments.returned(step, event.at, outcome, result.duration_s, result.queued_s),
        )

    def _close(self, number: int, done: "moments.Change") -> None:
        self._open.discard(number)
        if number in self._steps:
            step, tables = self._steps[number]
            self._steps[number] = done(step), tables

    def lost_worker(self, lane: int | None) -> None:
        """See `Watcher`."""
        for number in [n for n in self._open if lane is None or self._steps[n][0].lane == lane]:
            self._close(number, lambda step: moments.failed(step, self._replayer.now, "the worker was lost"))
