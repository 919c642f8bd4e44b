"""The benchmark of worker groups: several workers under one scheduler serve N times the load as well as one serves its own.

A sample here, the whole in `make test-long`; sizes are printed.
"""

import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from benchmarks.worker_groups import runs
from benchmarks.worker_groups.__main__ import LATENCIES, NUM_WORKERS, PLACEMENTS, POLICIES, hits, latencies

ROOT = Path(__file__).parents[2]
Record = Callable[[str, object], None]
_SLACK = 1.10
_HITS, _IMBALANCE = 0.025, 0.15


def compared(policy: str, num_workers: int, num_requests: int, names: Sequence[str] = LATENCIES) -> str:
    """Latencies within a tenth of those of separate schedulers; what was done."""
    load = runs.load_of("chat", num_workers, num_requests)
    apart, together = runs.apart(policy, load).figures, runs.one_scheduler(policy, load).figures
    assert together.num_done == together.num_requests == len(load.jobs)
    for name in names:
        assert getattr(together, name) <= _SLACK * getattr(apart, name), name
    return (
        f"{num_workers} workers under {policy}, virtual time: {len(load.jobs)} chats, as fast as on separate schedulers"
    )


def test_two_workers_serve_twice_the_load(record_property: Record) -> None:
    """N groups at N times the arrivals, in a run too small for the 99th percentile of first tokens."""
    record_property("size", compared("vllm-v1", 2, 100, [name for name in LATENCIES if name != "ttft_p99_s"]))


@pytest.mark.long
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("num_workers", NUM_WORKERS)
@pytest.mark.parametrize("policy", POLICIES)
def test_many_workers_serve_many_times_the_load(policy: str, num_workers: int, record_property: Record) -> None:
    """TTFT and TPOT, p50 and p99, of `quire`, `vllm-v1` and `vllm-v0` with 2, 4 and 8 workers."""
    record_property("size", compared(policy, num_workers, 400))


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_prompts_are_found_nearly_as_often_as_in_one_big_cache(record_property: Record) -> None:
    """Chats and agents on four workers: more than placement without prefixes and than a router that guesses."""
    rows = {(row["workload"], row["way"]): row for row in hits(800, 1)}
    for kind in ("chat", "agents"):
        ours, pool = rows[kind, "prefix_affinity"], rows[kind, "one big pool"]
        assert ours["hit_rate"] >= pool["hit_rate"] - _HITS and ours["imbalance"] <= _IMBALANCE
        others = ("least_work", "round_robin", "router that guesses")
        assert ours["hit_rate"] > max(rows[kind, way]["hit_rate"] for way in others)
    record_property("size", f"cached prompt tokens by placement: {len(rows)} runs of four workers")


@pytest.mark.long
def test_figures_have_all_rows() -> None:
    """Each policy with each number of workers, each workload with each way of placing; a picture of them."""
    assert len(latencies(20, 1, ("vllm-v1",))) == len(NUM_WORKERS)
    found = hits(20, 1, ("chat",))
    assert [row["way"] for row in found] == ["one big pool", *PLACEMENTS, "router that guesses"]
    assert all(row["num_done"] == row["num_requests"] for row in found)


@pytest.mark.long
@pytest.mark.timeout(300)
def test_the_command(tmp_path: Path) -> None:
    """`python -m benchmarks.worker_groups --json --plot FILE`."""
    command = [
        sys.executable,
        "-m",
        "benchmarks.worker_groups",
        "--json",
        "--requests",
        "20",
        "--plot",
        str(tmp_path / "p.png"),
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=250, check=True)
    found = json.loads(done.stdout)
    assert len(found["latencies"]) == len(POLICIES) * len(NUM_WORKERS) and len(found["hits"]) == 10
    assert (tmp_path / "p.png").stat().st_size > 10_000
