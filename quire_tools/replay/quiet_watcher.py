"""The base of replay watchers that need only some of the events."""

from scheduler_svc.core.plan import EndedSequence, StepOutcome, StepPlan
from scheduler_svc.core.request import Request
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.observe.recording.events import AbortEvent, Failed, Returned, StoppedAt


class QuietWatcher:
    """A `Watcher` (scheduler_svc.observe.recording.replay) that ignores every event; subclasses override what they need."""

    def began(self, core: Scheduler) -> None:
        """See `Watcher`."""

    def arrived(self, request: Request, at: float) -> None:
        """See `Watcher`."""

    def planned(self, plan: StepPlan, at: float) -> None:
        """See `Watcher`."""

    def returned(self, event: Returned | Failed, outcome: StepOutcome) -> None:
        """See `Watcher`."""

    def ended(self, event: AbortEvent | StoppedAt, ended: list[EndedSequence]) -> None:
        """See `Watcher`."""

    def lost_worker(self, lane: int | None) -> None:
        """See `Watcher`."""
