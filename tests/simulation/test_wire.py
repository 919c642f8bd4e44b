"""The same scenarios through the real parts between core and model: row planner, messages, leases, rows and cache of the worker."""

import time
from collections import Counter
from collections.abc import Callable

import pytest

from quire_tools.simulated_worker.engine import SimulatedEngine
from quire_tools.simulation import simulation
from scheduler_svc.workers.row_planner import RowPlanner
from tests.simulation.test_scenarios import sizes
from tests.simulation.wire_runs import run_wire
from worker_svc.shell.ownership import Ownership

Record = Callable[[str, object], None]


def judged(first: int, count: int) -> Counter[str]:
    """What happened in so many scenarios; AssertionError, with the number of the first bad one."""
    total = Counter[str]()
    for seed in range(first, first + count):
        verdict = run_wire(seed)
        assert not verdict.violations, f"python -m tests.simulation --wire --seed {seed}: {verdict.violations[:3]}"
        total.update(verdict.counts)
    return total


def varied(num: int) -> str:
    """Judge the first `num` scenarios, which have enough of each kind; their size."""
    start = time.process_time()
    counts = judged(0, num)
    for kind in ("preemptions", "workers_lost", "repeated_results"):
        assert counts[kind] > num / 4, kind
    return sizes(counts, start)


def test_scenarios_over_the_wire(record_property: Record) -> None:
    """R3, R97, R198, R200: dead workers, broken streams, rivals and repeated results: each token once, each row in its place."""
    record_property("size", varied(9))


@pytest.mark.long
def test_two_hundred_scenarios_over_the_wire(record_property: Record) -> None:
    """R3, R97, R198, R200: the same, with those of the quick test and more."""
    record_property("size", varied(200))


@pytest.mark.long
@pytest.mark.timeout(600)
def test_many_scenarios_over_the_wire(record_property: Record) -> None:
    """R3, R97, R198, R200: the same, with other numbers."""
    start = time.process_time()
    record_property("size", sizes(judged(10_000, 3_000), start))


@pytest.mark.parametrize("num", [1, pytest.param(20, marks=pytest.mark.long)])
def test_a_scenario_over_the_wire_replays(num: int, record_property: Record) -> None:
    """R201: the same number gives the same run to the last fact."""
    assert [run_wire(seed).digest for seed in range(num)] == [run_wire(seed).digest for seed in range(num)]
    record_property("size", f"simulation over the wire, twice each: {num} scenarios")


def keep_rows_of_the_last_owner(patch: pytest.MonkeyPatch) -> None:
    """A worker that forgets nothing when its owner changes."""
    patch.setattr(SimulatedEngine, "reset", lambda self: None)


def repeat_nothing(patch: pytest.MonkeyPatch) -> None:
    """A worker that does not send again what was lost with the stream."""
    patch.setattr(Ownership, "_after", lambda self, step_id: ())
    patch.setattr(Ownership, "result", lambda self, step_id: b"")


def forget_ended_rows(patch: pytest.MonkeyPatch) -> None:
    """A planner that does not tell the worker whose rows are free."""
    encode = RowPlanner.encode

    def careless(self: RowPlanner, *args: object) -> object:
        message = encode(self, *args)  # type: ignore[arg-type]
        message.ClearField("removed_rows")
        return message

    patch.setattr(RowPlanner, "encode", careless)


@pytest.mark.parametrize(
    ("sabotage", "first"), [(keep_rows_of_the_last_owner, 35), (repeat_nothing, 28), (forget_ended_rows, 0)]
)
def test_broken_links_are_found_out(
    sabotage: Callable[[pytest.MonkeyPatch], None], first: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """R200: with a defect built into lease, worker or planner, scenarios fail that are right without it.

    `first`: a scenario that fails, as far as known; broken ones can take long, so that they are given up early.
    """
    sabotage(monkeypatch)
    monkeypatch.setattr(simulation, "_MAX_FRUITLESS", 1_000)
    assert any(run_wire(seed).violations for seed in range(first, first + 60))
