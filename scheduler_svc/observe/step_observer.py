"""The interface of everything that observes steps.

A new observer is a class of its own and one line in `scheduler_svc/app.py`; `quire.LLM` has the step log alone.
Observers of a replay or a simulation are `RunObserver`s.
"""

from scheduler_svc.core.plan import StepOutcome, StepPlan
from scheduler_svc.observe.step_record import StepOrigin, StepRecord
from scheduler_svc.worker_values import WorkerResult


class StepObserver:
    """Subclass it and override what is of interest; methods that are not overridden are never called.

    Called by `StepNotifier` on the event loop, in the order of the observers. `record` is the same object in
    all calls of one step; records are made only if an observer overrides a method that gets one. An observer
    changes neither requests nor core (`CostFeedback` alone sends the core its cost estimates), and an error
    that it raises is logged and does not affect the step. It must not expand fast-decode rows
    (`plan.scheduled`, `outcome.runs`).
    """

    def on_plan(self, plan: StepPlan, origin: StepOrigin) -> None:
        """A plan was made, possibly without work. It is not sent, and its requests are not updated yet."""

    def on_announced(self, record: StepRecord) -> None:
        """The requests of a plan with work are updated; it is sent next."""

    def on_result(self, plan: StepPlan, result: WorkerResult, outcome: StepOutcome) -> None:
        """The core has processed the result, or the failure, of a plan with work; its requests have no tokens yet."""

    def on_end(self, record: StepRecord) -> None:
        """The step has a result, or its worker was lost. Called once for each step with work, in step order.

        Its requests have no tokens yet.
        """
