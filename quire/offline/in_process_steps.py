"""The steps of an engine in this process, in the format of `quire steps --json`."""

from typing import Any

from quire.operators.admin import step_json
from scheduler_svc.observe.step_log import StepLog, StepReader
from svc_common.errors import FailedPrecondition

MAX_STEPS = 10_000


class KeptSteps:
    """The last MAX_STEPS steps; none unless `is_on`. `observers`: those that keep them."""

    def __init__(self, *, is_on: bool) -> None:
        self.observers = [StepLog(MAX_STEPS)] if is_on else []

    def as_json(self, *, tables: bool) -> list[dict[str, Any]]:
        """The steps kept, oldest first. Raises FailedPrecondition if steps are not kept."""
        if not self.observers:
            raise FailedPrecondition("the steps are not kept: start it as LLM(log_steps=True)", reason="STEPS_NOT_KEPT")
        [log] = self.observers
        return [step_json(report, tables=tables) for report in StepReader(log, 0, tables=tables).new()]
