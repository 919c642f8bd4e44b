"""A replay in progress, folded into steps of the lab: the one source of the lab and of `quire top` for recordings."""

from gateway_svc.lab.source import Step
from quire_tools.lab import moments
from quire_tools.reasons_now import ReasonsNow
from quire_tools.replay.quiet_watcher import QuietWatcher
from scheduler_svc.core.plan import StepOutcome, StepPlan
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.observe.recording.events import Failed, Returned
from scheduler_svc.observe.recording.replay import Replayer


class RunningReplay(QuietWatcher):
    """Watcher of its `replayer`. `core`: the one that runs, None before the first segment; `reasons`: of its requests.

    Subclasses override `opened` and `done`. Steps in flight when a core is restored get no further calls.
    """

    def __init__(self, reasons: ReasonsNow | None = None) -> None:
        self.core: Scheduler | None = None
        self.reasons = reasons or ReasonsNow()
        self.replayer = Replayer(self)
        self.in_flight: dict[int, Step] = {}

    def opened(self, step: Step) -> Step:
        """The step to keep until its result: without tables and snapshot unless they are added here, right after its plan."""
        return step

    def done(self, step: Step) -> None:
        """The step's result or failure arrived, or its worker was lost."""

    # --- what happens ------------------------------------------------------------------------------------------------

    def began(self, core: Scheduler) -> None:
        """See `Watcher`."""
        self.core = core
        self.in_flight.clear()

    def planned(self, plan: StepPlan, at: float) -> None:
        """See `Watcher`."""
        self.reasons.observe(plan)
        if not plan.is_empty and self.core is not None:
            self.in_flight[plan.step] = self.opened(moments.planned(plan, at, self.core.policy))

    def returned(self, event: Returned | Failed, outcome: StepOutcome) -> None:
        """See `Watcher`."""
        number = event.step if isinstance(event, Failed) else event.result.step
        if (step := self.in_flight.pop(number, None)) is None:
            return
        if isinstance(event, Failed):
            self.done(moments.failed(step, event.at, event.why))
        else:
            result = event.result
            self.done(moments.returned(step, event.at, outcome, result.duration_s, result.queued_s))

    def lost_worker(self, lane: int | None) -> None:
        """See `Watcher`."""
        for step in [step for step in self.in_flight.values() if lane is None or step.lane == lane]:
            del self.in_flight[step.step]
            self.done(moments.failed(step, self.replayer.now, "the worker was lost"))
