"""The core of a what-if: applies changes at their steps and records each request's history."""

from collections.abc import Iterable, Sequence
from typing import Any

from scheduler_svc.core.parts.costs import Costs
from scheduler_svc.core.plan import EndedSequence, StepOutcome, StepPlan, StepResult
from scheduler_svc.core.request import Request
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.observe.recording import changes
from scheduler_svc.observe.recording.changes import Change
from scheduler_svc.observe.recording.history import ReplayHistory
from svc_common.errors import ConfigError


class WatchedCore:
    """A core with changes applied just before their steps are planned, and with its steps added to `history`.

    `costs`: estimates as the service would measure them; the core gets them after the first plan, which
    equals the recorded one.
    """

    def __init__(self, core: Scheduler, later: Sequence[Change], history: ReplayHistory, costs: Costs) -> None:
        self._core = core
        self._costs: Costs | None = costs
        self._later = list(later)
        self._history = history
        history.begin(core)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._core, name)

    def add(self, request: Request) -> None:
        """As `Scheduler.add`."""
        self._core.add(request)
        self._history.arrived(request)

    def abort(self, request_ids: Iterable[str]) -> list[EndedSequence]:
        """As `Scheduler.abort`."""
        return self._ended(self._core.abort(request_ids))

    def stop_at(self, name: str, num_output_tokens: int) -> list[EndedSequence]:
        """As `Scheduler.stop_at`."""
        return self._ended(self._core.stop_at(name, num_output_tokens))

    def _ended(self, ended: list[EndedSequence]) -> list[EndedSequence]:
        self._history.ended(ended, self._core.step)
        return ended

    def schedule(self, now: float) -> list[StepPlan]:
        """As `Scheduler.schedule`."""
        while self._later and (self._later[0].step or 0) <= self._core.step + 1:
            change = self._later.pop(0)
            try:
                changes.apply(self._core, change.values)
            except ConfigError as error:
                why = f"at step {change.step}: {error.message}"
                raise ConfigError(why, reason=error.reason, metadata=error.metadata) from None
        plans = self._core.schedule(now)
        for plan in plans:
            self._history.planned(plan)
        if self._costs is not None:
            self._core.observe_costs(_unknown_of(self._costs, self._core.state.costs.now))
            self._costs = None
        return plans

    def update(self, result: StepResult, now: float | None = None) -> StepOutcome:
        """As `Scheduler.update`."""
        outcome = self._core.update(result, now)
        self._history.got(outcome, result.step)
        return outcome


def _unknown_of(costs: Costs, known: Costs) -> Costs:
    """Only the costs that `known` lacks."""
    return Costs(
        step_s=0.0 if known.step_s else costs.step_s,
        compute_token_s=0.0 if known.compute_token_s else costs.compute_token_s,
        swap_block_s=0.0 if known.swap_block_s else costs.swap_block_s,
    )
