"""Whole runs of the core in virtual time with workers, network and clock that misbehave, judged from outside."""

import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from scheduler_svc.core.composition import presets
from tests.simulation.__main__ import main
from tests.simulation.runs import run
from tests.simulation.scenarios import Scenario, scenario, scenario_of_groups, scenario_of_several

ROOT = Path(__file__).parents[2]
Record = Callable[[str, object], None]


def judged(first: int, count: int, make: Callable[[int], Scenario] = scenario) -> Counter[str]:
    """What happened in so many scenarios; AssertionError, with the number of the first bad one."""
    total = Counter[str]()
    for seed in range(first, first + count):
        try:
            verdict = run(make(seed))
        except Exception as error:
            error.add_note(f"python -m tests.simulation --seed {seed}")
            raise
        assert not verdict.violations, f"python -m tests.simulation --seed {seed}: {verdict.violations[:3]}"
        total.update(verdict.counts)
    return total


def sizes(counts: Counter[str], start: float) -> str:
    """For the report."""
    what = ", ".join(f"{counts[name]} {name.replace('_', ' ')}" for name in ("scenarios", "requests", "steps"))
    return f"simulation: {what}, {time.process_time() - start:.0f} s"


def varied(num: int) -> str:
    """Judge the first `num` scenarios, which have enough of each kind; their size."""
    start = time.process_time()
    counts = judged(0, num)
    assert counts["steps"] > 10 * num
    for kind in ("preemptions", "workers_lost", "repeated_results"):
        assert counts[kind] > num / 4, kind
    for end in ("stop", "length", "abort", "failed", "ignored", "deadline", "refused"):
        assert counts[f"end: {end}"] > num / 20, end
    return sizes(counts, start)


def test_eighty_scenarios(record_property: Record) -> None:
    """R3, R28, R97, R98, R198, R200: whatever fails, each request ends once, with each token once, and nothing is left."""
    record_property("size", varied(80))


@pytest.mark.long
def test_six_hundred_scenarios(record_property: Record) -> None:
    """R3, R28, R97, R98, R198, R200: the same, with those of the quick test and more."""
    record_property("size", varied(600))


@pytest.mark.parametrize("num", [60, pytest.param(3_000, marks=pytest.mark.long)])
@pytest.mark.timeout(900)
def test_scenarios_of_several_workers(num: int, record_property: Record) -> None:
    """R2, R3, R200: one to four worker groups, which die, hang and come back one by one; judged from outside alike."""
    start = time.process_time()
    record_property("size", f"several workers, {sizes(judged(0, num, scenario_of_several), start)}")


@pytest.mark.parametrize("num", [80, pytest.param(3_000, marks=pytest.mark.long)])
@pytest.mark.timeout(900)
def test_scenarios_of_cache_groups(num: int, record_property: Record) -> None:
    """R3, R105, R200: models with several cache groups: whatever a token attends to is in the blocks of each group."""
    start = time.process_time()
    counts = judged(0, num, scenario_of_groups)
    assert min(counts["preemptions"], counts["workers_lost"], counts["repeated_results"]) > num / 4
    record_property("size", f"cache groups, {sizes(counts, start)}")


@pytest.mark.long
@pytest.mark.timeout(600)
def test_ten_thousand_scenarios(record_property: Record) -> None:
    """R3, R28, R97, R98, R198, R200: the same, with other numbers."""
    start = time.process_time()
    record_property("size", sizes(judged(100_000, 10_000), start))


def test_every_policy_has_its_share() -> None:
    """Policies are drawn from all that there are: a new preset is simulated without being named here."""
    drawn = Counter(scenario(seed).policy for seed in range(200))
    assert set(drawn) == set(presets.policy_names())


@pytest.mark.parametrize("num", [8, pytest.param(300, marks=pytest.mark.long)])
def test_the_same_seed_gives_the_same_run(
    num: int, capsys: pytest.CaptureFixture[str], record_property: Record
) -> None:
    """R201: whatever the process hashes with, scenario N is the same run to the last fact, in this process and another."""
    main(scenarios=num)
    here = capsys.readouterr().out
    command = [sys.executable, "-m", "tests.simulation", "--scenarios", str(num)]
    environ = {**os.environ, "PYTHONHASHSEED": "2" if os.environ.get("PYTHONHASHSEED") == "1" else "1"}
    done = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True, timeout=120, check=True)
    digests = [text.partition("digest ")[2][:16] for text in (here, done.stdout)]
    assert len(digests[0]) == 16
    assert digests[0] == digests[1]
    record_property("size", f"simulation, in two processes: {num} scenarios")
