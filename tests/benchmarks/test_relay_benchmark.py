"""The benchmark of what a gateway relays: its arithmetic, and a small run through real processes."""

from types import SimpleNamespace
from typing import Any, cast

import psutil
import pytest

from benchmarks.relay import __main__ as relay
from benchmarks.relay.ends import Feed, Progress


def test_what_is_read_counts_between_the_two_looks() -> None:
    """CPU time, tokens and events from before the first look are not counted."""
    progress, cpu = Progress(), iter([1.0, 1.5])
    process = SimpleNamespace(cpu_times=lambda: SimpleNamespace(user=next(cpu), system=0.25))
    readings = relay.Readings(cast(psutil.Process, process), progress)
    progress.add(100, 1_000)
    readings.take()
    for _ in range(10):
        progress.add(4, 20)
    readings.take()
    assert readings.figures() == {
        "cpu_s": 0.5,
        "tokens": 40,
        "events": 10,
        "tokens_per_core_s": 80,
        "us_per_event": 50_000.0,
        "tokens_per_event": 4.0,
        "event_bytes": 20,
    }


def test_the_median_is_a_run_that_was() -> None:
    """By what an event costs."""
    runs: list[dict[str, Any]] = [{"us_per_event": us, "cpu_s": us / 10} for us in (70.0, 50.0, 60.0)]
    assert relay._median(runs) == {"us_per_event": 60.0, "cpu_s": 6.0}


@pytest.mark.long
def test_a_small_relay() -> None:
    """Every token comes, one in an event or several; the bare server writes as many messages of that size."""
    found = relay.measure([Feed("single", 8, 200), Feed("coalesced", 8, 20, run=5, ahead=2)], 2)
    runs = found["runs"]
    assert runs["single"]["tokens"] == runs["single"]["events"] == runs["bare"]["events"] == 8 * 180
    assert runs["single"]["event_bytes"] == runs["bare"]["event_bytes"]
    assert runs["coalesced"]["tokens_per_event"] >= 5
    assert runs["single"]["cpu_s"] > 0
