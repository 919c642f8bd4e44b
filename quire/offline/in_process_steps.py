"""Records the steps of an engine in this process, in the format of `quire steps --json`. Not here: running them."""

from typing import Any, Protocol

from quire.operators.admin import step_json
from scheduler_svc.core.plan import StepOutcome, StepPlan
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.observe.step_log import StepLog, StepReader
from scheduler_svc.workers.result import WorkerResult
from svc_common.clock import monotonic_ns
from svc_common.errors import FailedPrecondition

MAX_STEPS = 10_000


class StepWitness(Protocol):
    """Observes each step when it is planned and when its result is known."""

    def planned(self, plan: StepPlan, core: Scheduler, began_ns: int) -> None:
        """Note a plan about to run; planning began at `began_ns` (monotonic)."""

    def ran(self, result: WorkerResult, outcome: StepOutcome) -> None:
        """Note that the core has processed the step's result."""

    def steps(self, *, tables: bool) -> list[dict[str, Any]]:
        """The steps kept, oldest first."""


class NoWitness:
    """Records nothing, at no cost."""

    def planned(self, plan: StepPlan, core: Scheduler, began_ns: int) -> None:
        """See StepWitness."""

    def ran(self, result: WorkerResult, outcome: StepOutcome) -> None:
        """See StepWitness."""

    def steps(self, *, tables: bool) -> list[dict[str, Any]]:
        """Raise FailedPrecondition: steps are not kept."""
        raise FailedPrecondition("the steps are not kept: start it as LLM(log_steps=True)", reason="STEPS_NOT_KEPT")


class LoggedSteps:
    """Keeps a log of the last MAX_STEPS steps."""

    def __init__(self, policy: str) -> None:
        self._log = StepLog(MAX_STEPS, policy)

    def planned(self, plan: StepPlan, core: Scheduler, began_ns: int) -> None:
        """See StepWitness."""
        moves = plan.swap_in or plan.swap_out or plan.copy
        tables = core.block_tables() if moves else None
        self._log.begin(plan, 0, tables, planned_ns=began_ns, schedule_ns=monotonic_ns() - began_ns)

    def ran(self, result: WorkerResult, outcome: StepOutcome) -> None:
        """See StepWitness."""
        self._log.complete(result, {run.name: run.token_ids for run in outcome.runs})

    def steps(self, *, tables: bool) -> list[dict[str, Any]]:
        """See StepWitness."""
        return [step_json(report, tables=tables) for report in StepReader(self._log, 0, tables=tables).new()]
