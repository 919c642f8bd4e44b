"""The core of a what-if, which applies changes at their steps."""

from collections.abc import Sequence
from typing import Any

from scheduler_svc.core.parts.costs import Costs
from scheduler_svc.core.plan import StepPlan
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.observe.recording import changes
from scheduler_svc.observe.recording.changes import Change
from svc_common.errors import ConfigError


class ChangingCore:
    """A core with changes applied just before their steps are planned.

    `costs`: estimates as the service would measure them; the core gets them after the first plan, which
    equals the recorded one.
    """

    def __init__(self, core: Scheduler, later: Sequence[Change], costs: Costs) -> None:
        self._core = core
        self._costs: Costs | None = costs
        self._later = list(later)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._core, name)

    def schedule(self, now: float, worker: int | None = None) -> list[StepPlan]:
        """As `Scheduler.schedule`."""
        while self._later and (self._later[0].step or 0) <= self._core.step + 1:
            change = self._later.pop(0)
            try:
                changes.apply(self._core, change.values)
            except ConfigError as error:
                why = f"at step {change.step}: {error.message}"
                raise ConfigError(why, reason=error.reason, metadata=error.metadata) from None
        plans = self._core.schedule(now, worker)
        if self._costs is not None:
            self._core.observe_costs(_unknown_of(self._costs, self._core.state.costs.now))
            self._costs = None
        return plans


def _unknown_of(costs: Costs, known: Costs) -> Costs:
    """Only the costs that `known` lacks."""
    return Costs(
        step_s=0.0 if known.step_s else costs.step_s,
        compute_token_s=0.0 if known.compute_token_s else costs.compute_token_s,
        swap_block_s=0.0 if known.swap_block_s else costs.swap_block_s,
    )
