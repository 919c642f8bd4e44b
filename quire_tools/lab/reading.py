"""Read the steps of a recording from any step on.

Replays from the segment before that step, and keeps the replay for further reads.
"""

from collections.abc import Iterator
from dataclasses import replace

from gateway_svc.lab.source import Step
from gateway_svc.lab.tables import TableChanges, Tables
from quire_tools.lab import moments
from quire_tools.lab.course import ReplayStart
from quire_tools.lab.running import RunningReplay
from scheduler_svc.core.plan import StepPlan
from scheduler_svc.observe.recording.events import Event
from scheduler_svc.observe.recording.file_format import Recording

_MOST_KEPT = 400
_NEAR = 100


class SteppedReplay(RunningReplay):
    """A replay from the segment of `start` to just before `since`. Owns the steps that it saw from there on."""

    def __init__(self, recording: Recording, start: ReplayStart, since: int) -> None:
        super().__init__(start.reasons.copy())
        self._steps: dict[int, tuple[Step, Tables]] = {}
        self._since = self._next = since
        self._rest: Iterator[Event] = self.replayer.run(recording.segments(start.segment), until_step=since)

    def can_go_on(self, since: int) -> bool:
        """True if step `since` is among those kept, or just ahead."""
        return self._since <= since <= self._next + _NEAR

    def read(self, since: int, limit: int) -> list[Step]:
        """Up to `limit` steps from `since` on, oldest first; the first has complete tables."""
        while self._num_done(since) < limit and (event := next(self._rest, None)) is not None:
            self.replayer.go_on(iter((event,)))
        wanted = sorted(step for step in self._steps if step >= since)[:limit]
        changes = TableChanges()
        found = [replace(step, tables=changes.to(tables)) for step, tables in map(self._steps.__getitem__, wanted)]
        self._next = max(self._next, wanted[-1] + 1) if wanted else self._next
        self._drop_old()
        return found

    def _num_done(self, since: int) -> int:
        first_open = min(self.in_flight, default=None)
        return sum(step >= since and (first_open is None or step < first_open) for step in self._steps)

    def _drop_old(self) -> None:
        for step in sorted(self._steps)[:-_MOST_KEPT]:
            del self._steps[step]
            self._since = step + 1

    # --- what happens ------------------------------------------------------------------------------------------------

    def planned(self, plan: StepPlan, at: float) -> None:
        """See `Watcher`; of steps before `since` only the reasons are kept."""
        if plan.step < self._since:
            self.reasons.observe(plan)
        else:
            super().planned(plan, at)

    def opened(self, step: Step) -> Step:
        """Keep the step with its snapshot and tables."""
        assert self.core is not None
        step = replace(step, snapshot=moments.snapshot(step.step, self.core, self.reasons))
        self._steps[step.step] = step, self.core.block_tables()
        return step

    def done(self, step: Step) -> None:
        """Put the completed step in the place of the open one."""
        if step.step in self._steps:
            self._steps[step.step] = step, self._steps[step.step][1]
