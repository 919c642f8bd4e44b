"""Measures the memory of a scheduler's history buffers: steps, decisions and the recording.

    python -m benchmarks.looking_back --save          # about three minutes
    python -m benchmarks.looking_back --steps 2000    # a short run

This module holds the runs and their table. Each run is a process of its own, so that its memory is that of
its buffers alone.
"""

import gc
import json
import subprocess
import sys
from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np
import psutil
import typer
from rich.console import Console
from rich.table import Table

from benchmarks import report
from protos.worker.v1 import worker_pb2
from scheduler_svc.core.composition import presets
from scheduler_svc.core.limits import CoreLimits
from scheduler_svc.core.plan import StepPlan, StepResult
from scheduler_svc.core.request import Request
from scheduler_svc.core.request_rules import StopRules
from scheduler_svc.observe.recording.record_buffer import RecordBuffer
from scheduler_svc.observe.step_log import StepLog
from scheduler_svc.observe.step_notifier import StepNotifier
from scheduler_svc.observe.step_record import StepOrigin
from scheduler_svc.observe.timelines import Timelines
from scheduler_svc.settings import SchedulerSettings
from scheduler_svc.worker_values import WorkerResult

BUFFERS = ("steps", "decisions", "recording")
_PROMPT, _OUTPUT = 128, 64
_STEP_S = 0.01
_VOCAB = 32_000
_MIB = 2**20

_HELP_END = """
One core of the preset `quire` in virtual time, without services: --running concurrent requests of 128 prompt and 64 output tokens,
each replaced by another when it ends. Runs: no buffer; each buffer alone; all of them. A buffer's memory is the resident memory of
its run minus that of the run without buffers. Limits are the scheduler's defaults.

Goal: at most 65 MiB for all together.
"""


@dataclass(slots=True)
class _Kept:
    """The buffers of one run; those not requested are as small as possible."""

    steps: StepNotifier
    timelines: Timelines | None
    record_buffer: RecordBuffer

    @classmethod
    def of(cls, buffers: list[str]) -> "_Kept":
        """Create the buffers with the scheduler's defaults."""
        settings = SchedulerSettings(workers=("127.0.0.1:1",))
        num_events, ring_bytes = settings.max_logged_events, settings.record_ring_bytes
        record_buffer = RecordBuffer(
            settings.record_segment_steps, ring_bytes if "recording" in buffers else 0, verbatim=False
        )
        logs = [StepLog(settings.max_logged_steps)] if "steps" in buffers else []
        return cls(
            steps=StepNotifier(logs, freezer=record_buffer.freezer),
            timelines=Timelines(lambda request_id: False, num_logged=num_events, num_heads=num_events)
            if "decisions" in buffers
            else None,
            record_buffer=record_buffer,
        )


class _Run:
    """One core with its buffers."""

    def __init__(self, kept: _Kept, running: int) -> None:
        limits = CoreLimits(
            block_size=16, num_gpu_blocks=64 * running, max_model_len=4_096, max_num_seqs=running, prefix_caching=True
        )
        self._kept = kept
        self._now = 0.0
        self._core = kept.record_buffer.record(presets.build("quire", limits), lambda: self._now)
        self._running = running
        self._num_added = self._num_live = 0
        self._rng = np.random.default_rng(1)

    def step(self) -> None:
        """Add requests, plan a step and apply its result."""
        while self._num_live < self._running + 4:
            self._add()
        self._now += _STEP_S
        for plan in self._core.schedule(self._now):
            if self._kept.timelines is not None:
                self._kept.timelines.observe(plan.events)
            self._kept.steps.planned(plan, StepOrigin(int(1e9 * self._now), 100_000, epoch=1))
            if not plan.is_empty:
                self._answer(plan)

    def _add(self) -> None:
        self._num_added += 1
        self._num_live += 1
        prompt = self._rng.integers(0, _VOCAB, _PROMPT).tolist()
        stop = StopRules(_OUTPUT - 8 + self._num_added % 16, ignore_eos=True)
        self._core.add(Request(f"01a2065d-7172-76e9-ac73-{self._num_added:012d}", prompt, stop, self._now))

    def _answer(self, plan: StepPlan) -> None:
        tokens = {e.name: [int(self._rng.integers(0, _VOCAB))] for e in plan.scheduled if e.samples}
        result = StepResult(plan.step, tokens, duration_s=_STEP_S)
        outcome = self._core.update(result, self._now)
        self._num_live -= sum(ended.request_done for ended in outcome.ended)
        timings = worker_pb2.StepTimings(started_ns=10**18, queued_ns=10_000, prepare_ns=10_000, model_ns=9 * 10**6)
        computed = plan.num_batched_tokens
        returned = WorkerResult(plan.step, result, {}, computed, int(1e9 * _STEP_S), timings)
        self._kept.steps.returned(plan, returned, outcome)


def keep(buffers: list[str], steps: int, running: int) -> int:
    """Resident bytes of this process after `steps` steps with these buffers."""
    run = _Run(_Kept.of(buffers), running)
    for _ in range(steps):
        run.step()
    gc.collect()
    return int(psutil.Process().memory_info().rss)


def measure(steps: int, running: int) -> dict[str, Any]:
    """Run each case in its own process: MiB of each buffer, and of all."""
    runs = {"none": [], **{name: [name] for name in BUFFERS}, "all": list(BUFFERS)}
    rss = {name: _in_process(buffers, steps, running) for name, buffers in runs.items()}
    taken = {name: round((size - rss["none"]) / _MIB, 1) for name, size in rss.items() if name != "none"}
    return {"steps": steps, "running": running, "rss_mib": round(rss["none"] / _MIB, 1), "taken_mib": taken}


def _in_process(buffers: list[str], steps: int, running: int) -> int:
    call = f"from benchmarks import looking_back as b; print(b.keep({buffers!r}, {steps}, {running}))"
    done = subprocess.run([sys.executable, "-c", call], capture_output=True, text=True, check=True)
    return int(done.stdout)


def main(
    steps: Annotated[int, typer.Option(min=1, help="Steps of each run.")] = 40_000,
    running: Annotated[int, typer.Option(min=1, help="Concurrent sequences.")] = 32,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    save: Annotated[bool, typer.Option("--save", help="Write benchmarks/results/looking-back.json.")] = False,
) -> None:
    """Measures the memory of a scheduler's history buffers."""
    result = {"benchmark": "looking_back", **measure(steps, running)}
    if save:
        report.save("looking-back", result)
    if as_json:
        print(json.dumps(result, indent=2))
        return
    table = Table("buffer", "MiB above a run without")
    for name, taken in result["taken_mib"].items():
        table.add_row(name, f"{taken:,.1f}")
    Console().print(table)


if __name__ == "__main__":
    app = typer.Typer(add_completion=False, rich_markup_mode=None)
    app.command(epilog=_HELP_END)(main)
    app()
