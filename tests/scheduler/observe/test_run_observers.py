"""Observers of a replay: they get the steps as a service's do, at the recorded times, and their errors end it."""

from collections.abc import Callable

import pytest

from scheduler_svc.core.plan import StepPlan
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.observe.recording.replay import Replayer, replay
from scheduler_svc.observe.run_observer import NO_RESULT, RunObserver
from scheduler_svc.observe.step_notifier import StepNotifier
from scheduler_svc.observe.step_observer import StepObserver
from scheduler_svc.observe.step_record import StepOrigin, StepRecord, Tables
from tests.scheduler.observe.test_step_log import entry
from tests.support.core.recorded_lives import recorded


class Seen(RunObserver):
    """Follows the block tables by records alone, and keeps which steps began and ended."""

    def __init__(self) -> None:
        self.begun: list[int] = []
        self.ended: list[StepRecord] = []
        self._tables: Tables = {}

    def on_start(self, core: Scheduler, clock: Callable[[], float]) -> None:
        self._core, self._clock, self._is_whole = core, clock, True

    def on_worker_lost(self, worker: int | None) -> None:
        self._is_whole = True

    def on_announced(self, record: StepRecord) -> None:
        self.begun.append(record.step)
        record.change_tables(self._tables)
        if self._core.spec.sliding_window is None:
            whole = self._core.block_tables()
            names = whole.keys() | self._tables.keys() if self._is_whole else record.plan.shape.names
            assert all(self._tables.get(name) == whole.get(name) for name in names), record.step
        self._is_whole = False
        assert record.origin.planned_ns == round(self._clock() * 1e9)

    def on_end(self, record: StepRecord) -> None:
        self.ended.append(record)


@pytest.mark.parametrize("policy", ["quire", "vllm-v0", "vllm-v1", "chitu-dp"])
@pytest.mark.parametrize("seed", [1, *(pytest.param(seed, marks=pytest.mark.long) for seed in (3, 4))])
def test_records_of_a_replay(policy: str, seed: int) -> None:
    """The tables of scheduled sequences follow from the records, also over lost workers; each step ends once, in step order."""
    replayer = Replayer(seen := Seen())
    replayer.run(recorded(policy, seed).segments())
    assert replayer.report.identical
    replayer.close()
    assert [record.step for record in seen.ended] == seen.begun
    assert len(seen.begun) >= 5
    assert all(record.closed_ns >= record.origin.planned_ns for record in seen.ended)


def test_steps_without_a_result_in_the_recording() -> None:
    """They end when it does, and say why."""
    replayer = Replayer(seen := Seen())
    replayer.run(recorded("quire", 1).segments(), until_step=21)
    replayer.close()
    assert seen.ended[-1].step == 20
    assert seen.ended[-1].error in ("", NO_RESULT)
    assert len(seen.ended) == len(seen.begun)


class Broken(RunObserver):
    """Fails at the first plan."""

    def on_plan(self, plan: StepPlan, origin: StepOrigin) -> None:
        raise ValueError("broken")


def test_errors_of_an_observer_end_the_replay() -> None:
    """Unlike in a service, where requests must go on."""
    with pytest.raises(ValueError, match="broken"):
        replay(recorded("quire", 1).segments(), Broken())


class Results(StepObserver):
    """Wants plans, not records."""

    def on_plan(self, plan: StepPlan, origin: StepOrigin) -> None:
        """Not looked at."""


def test_no_record_is_made_where_none_is_wanted() -> None:
    """Freezing a plan expands fast-decode rows, which a simulation with many rows must not pay for."""
    frozen: list[StepPlan] = []

    class Noted:
        def of(self, plan: StepPlan) -> object:
            frozen.append(plan)
            raise AssertionError

    StepNotifier([Results()], freezer=Noted()).planned(StepPlan(1, 0, [entry("a/0", blocks=[])]), StepOrigin())  # type: ignore[arg-type]
    assert not frozen
