"""The benchmarks of gaps between steps and of growth: their arithmetic, and small runs of both."""

import asyncio
import os
from pathlib import Path

import numpy as np
import pytest

from benchmarks.growth import fit
from benchmarks.growth.fit import Samples
from benchmarks.growth.load import KINDS, Load
from benchmarks.overlap import plot
from benchmarks.overlap.stack import TimedStack, steady
from quire.local_stack.stack import LocalStack

MS = 1_000_000


def test_gaps_are_between_steps_of_full_batches() -> None:
    """Steps of 4 ms and gaps of 1 ms; steps with prompts, of fewer sequences, and those at both ends do not count."""
    full = [(10 * MS + i * 5 * MS, 14 * MS + i * 5 * MS, 3) for i in range(30)]
    others = [(0, MS, 48), (MS, 9 * MS, 2), (900 * MS, 990 * MS, 2), (991 * MS, 999 * MS, 3)]
    run = steady(np.array([*others[:2], *full, *others[2:]]), 3)
    assert len(run.steps) == 24 and run.steps[0, 0] == 25 * MS
    assert (run.step_ms, run.gap_us, run.share, run.steps_per_s) == (4.0, 1000.0, 0.25, 200.0)
    with pytest.raises(RuntimeError, match="more steps"):
        steady(np.array(others), 3)


def test_a_run_with_overlap(tmp_path: Path) -> None:
    """Three processes, the worker's own clock: every step is as long as asked, and there is a picture."""
    with TimedStack(["--step-s", "0.004"], tmp_path / "log", overlap=True) as stack:
        run = stack.run(4, 60)
    assert 30 < len(run.steps) < 60
    assert 4 <= run.step_ms < 100 and 0 <= run.gap_us < 100_000 and 0 <= run.share < 25
    plot.draw({"4ms": {"overlap": run, "no overlap": run}}, tmp_path / "few.png")
    assert (tmp_path / "few.png").stat().st_size > 1_000


def test_a_line_rises_or_not() -> None:
    """Growth is more than the least that counts, and more than chance."""
    requests, draw = list(range(0, 10_000, 200)), np.random.default_rng(1)
    noise = draw.normal(0, 50, len(requests))
    leak = fit.line(requests, 80_000 + 0.5 * np.array(requests) + noise, least=100)
    assert leak["grows"] and leak["per_1000"] == pytest.approx(500, abs=3 * leak["error"])
    assert not fit.line(requests, 80_000 + noise, least=100)["grows"]
    assert not fit.line(requests, 80_000 + 0.05 * np.array(requests), least=100)["grows"], "too little to count"
    assert not fit.line([0, 200, 400], [0, 900, 300], least=100)["grows"], "may be chance"


def test_all_kinds_are_sent_and_all_processes_read(stack: LocalStack) -> None:
    """Each kind ends as it should; of each process memory, descriptors and threads are read."""
    kinds = tuple(kind for kind in KINDS if kind != "adapter")
    samples = Samples({**stack.pids, "this": os.getpid()})
    load = Load(stack.grpc_address, kinds, samples.take)
    asyncio.run(load.send(3 * len(kinds), 4))
    wrong = {"cancelled": "CANCELLED CANCELLED", "refused": "NOT_FOUND MODEL_NOT_FOUND"}
    assert load.ends == {f"{kind}: {wrong.get(kind, 'ended')}": 3 for kind in kinds}
    assert samples.requests == list(range(1, 3 * len(kinds) + 1))
    lines = samples.lines()
    assert set(lines) == {"gateway", "scheduler", "worker", "this"}
    assert all(found["last"] > 0 for of_process in lines.values() for found in of_process.values())
