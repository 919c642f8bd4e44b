"""Observers of steps: what each is called with, in which order, and that their errors do no harm."""

import logging

import pytest

from scheduler_svc.core.plan import StepOutcome, StepPlan, StepResult
from scheduler_svc.observe.step_notifier import StepNotifier
from scheduler_svc.observe.step_observer import StepObserver
from scheduler_svc.observe.step_record import StepOrigin, StepRecord
from scheduler_svc.worker_values import WorkerResult
from tests.scheduler.observe.test_step_log import entry, result


class Noted(StepObserver):
    """Notes its calls in a list that it shares with others."""

    def __init__(self, name: str, calls: list[str]) -> None:
        self._name = name
        self._calls = calls

    def on_plan(self, plan: StepPlan, origin: StepOrigin) -> None:
        self._calls.append(f"{self._name} plan {plan.step}")

    def on_announced(self, record: StepRecord) -> None:
        self._calls.append(f"{self._name} announced {record.step}")

    def on_result(self, plan: StepPlan, result: WorkerResult, outcome: StepOutcome) -> None:
        self._calls.append(f"{self._name} result {plan.step}")

    def on_end(self, record: StepRecord) -> None:
        self._calls.append(f"{self._name} end {record.step} {record.failure}".strip())


class Broken(StepObserver):
    """Fails at each plan."""

    def on_plan(self, plan: StepPlan, origin: StepOrigin) -> None:
        raise ValueError("broken")


def plan(step: int) -> StepPlan:
    return StepPlan(step, 0, [entry("a/0", blocks=[])])


def test_calls_of_a_step_and_their_order(caplog: pytest.LogCaptureFixture) -> None:
    """One after the other, each call for all observers; an empty plan is no step; a broken observer is logged."""
    calls: list[str] = []
    steps = StepNotifier([Broken(), Noted("a", calls), Noted("b", calls)])
    for each in (StepPlan(1, 0, left=["z/0"]), plan(2)):
        steps.planned(each, StepOrigin())
        steps.announced(each)
    steps.returned(plan(2), result(2, {"a/0": [1]}), StepOutcome())
    expected = ["plan 1", "plan 2", "announced 2", "result 2", "end 2"]
    assert calls == [f"{name} {call}" for call in expected for name in ("a", "b")]
    assert [r.getMessage() for r in caplog.records if r.levelno == logging.ERROR] == [
        "Broken.on_plan failed; the step goes on"
    ] * 2


def test_steps_end_in_their_order() -> None:
    """The workers of two ranks answer in any order; a step whose worker was lost ends as well."""
    calls: list[str] = []
    steps = StepNotifier([Noted("a", calls)])
    for step in (1, 2, 3):
        steps.planned(plan(step), StepOrigin())
    steps.returned(plan(2), WorkerResult(2, StepResult(2), {}, 1, 1), StepOutcome())
    assert not [call for call in calls if "end" in call]
    steps.lost_worker(["a/0"], [1])
    assert [call for call in calls if "end" in call] == ["a end 1 WORKER_LOST", "a end 2"]
