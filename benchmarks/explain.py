"""Measures the cost of explaining: CPU time of a step with reasons recorded, against the same steps without.

    python -m benchmarks.explain            # a table
    python -m benchmarks.explain --json     # one JSON object, nothing else

Two cores run the same workload, step by step in turn: thousands of requests wait, a full batch runs, and in
each step some requests end, start and arrive. One core records and keeps reasons, the other has a journal
that discards them. Goal: under 5 % of a step.
"""

import gc
import json
import statistics
import time
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from benchmarks import command_line, report
from scheduler_svc.core.composition import presets
from scheduler_svc.core.limits import CoreLimits
from scheduler_svc.core.plan import StepResult
from scheduler_svc.core.reasons import CoreEvent, Numbers, Reason
from scheduler_svc.core.request import Group, QueueKind, Request, SequenceStatus
from scheduler_svc.core.request_rules import StopRules
from scheduler_svc.core.wait_journal import WaitJournal
from scheduler_svc.observe.timelines import Timelines

GOAL = 0.05
_BLOCK = 16
_PROMPT = 64
_OUTPUT = 128
_PER_TURN = 8
WARM_STEPS = 5_632
"""Until the event log is full, so that eviction from it is timed too."""


class SilentJournal(WaitJournal):
    """Discards everything."""

    def arrived(self, group: Group) -> None:
        """No-op."""

    def skip(self, group: Group, reason: Reason, **numbers: int | float | str) -> None:
        """No-op."""

    def stop(self, group: Group, reason: Reason, **numbers: int | float | str) -> None:
        """No-op."""

    def stop_all(self, place: QueueKind, reason: Reason, **numbers: int | float | str) -> None:
        """No-op."""

    def runs(self, group: Group, computed_tokens: int) -> None:
        """No-op."""

    def leaves(self, group: Group, place: QueueKind, reason: Reason, **numbers: int | float | str) -> None:
        """No-op."""

    def ended(self, group: Group, status: SequenceStatus) -> None:
        """No-op."""

    def take(self) -> tuple[list[CoreEvent], dict[str, Numbers]]:
        """No events and no numbers."""
        return [], {}


class Life:
    """A core kept at `running` running and `waiting` waiting sequences."""

    def __init__(self, policy: str, running: int, waiting: int, *, explained: bool) -> None:
        limits = CoreLimits(
            block_size=_BLOCK,
            num_gpu_blocks=1 + (running + 1) * ((_PROMPT + _OUTPUT) // _BLOCK + 1),
            max_model_len=4096,
            max_num_seqs=running,
            max_num_batched_tokens=8192,
        )
        self._core = presets.build(policy, limits)
        if not explained:
            self._core.state.shared.journal = SilentJournal()
        self._timelines = Timelines(self._core.state.requests.__contains__) if explained else None
        self._num_wanted = running + waiting
        self._num_added = 0
        self._pending: list[StepResult] = []
        self.step_ns: list[int] = []

    def step(self) -> None:
        """Add requests (not timed), then schedule, observe and update."""
        while len(self._core.state.requests) < self._num_wanted:
            self._add()
        started = time.process_time_ns()
        [plan] = self._core.schedule(float(self._core.step))
        if self._timelines is not None:
            self._timelines.observe(plan.events)
        spent = time.process_time_ns() - started
        self._pending.append(StepResult(plan.step, {e.name: [7] for e in plan.scheduled if e.samples}))
        if len(self._pending) == self._core.depth:
            started = time.process_time_ns()
            self._core.update(self._pending.pop(0))
            spent += time.process_time_ns() - started
        self.step_ns.append(spent)

    def _add(self) -> None:
        self._num_added += 1
        first = self._num_added * 1_000
        stop = StopRules(1 + self._num_added % _OUTPUT, ignore_eos=True)
        prompt = list(range(first, first + _PROMPT))
        self._core.add(Request(f"r{self._num_added}", prompt, stop, float(self._core.step)))


def measure(policy: str, running: int, waiting: int, steps: int) -> dict[str, float | int | str]:
    """Microseconds per step of both cores, and the cost of explaining as a share of the step without."""
    lives = {explained: Life(policy, running, waiting, explained=explained) for explained in (True, False)}
    for life in lives.values():
        for _ in range(WARM_STEPS):
            life.step()
        life.step_ns.clear()
    gc.collect()
    for turn in range(steps // _PER_TURN):
        for explained in (True, False) if turn % 2 else (False, True):
            for _ in range(_PER_TURN):
                lives[explained].step()
    with_us, without_us = (statistics.fmean(lives[explained].step_ns) / 1e3 for explained in (True, False))
    return {
        "policy": policy,
        "running": running,
        "waiting": waiting,
        "steps": len(lives[True].step_ns),
        "step_us": round(with_us, 1),
        "silent_step_us": round(without_us, 1),
        "share": round(with_us / without_us - 1, 4),
        "goal": GOAL,
    }


app = typer.Typer(rich_markup_mode="rich", add_completion=False)


@app.command()
def main(
    policies: Annotated[str, typer.Option(help="Policies, comma-separated.")] = "vllm-v1,quire",
    waiting: Annotated[str, typer.Option(help="Number of waiting requests, N or N,N,...")] = "10000",
    running: Annotated[int, typer.Option(min=1, help="Sequences running.")] = 256,
    steps: Annotated[int, typer.Option(min=16, help="Timed steps of each core.")] = 1_024,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object and nothing else.")] = False,
    save: Annotated[bool, typer.Option(help="Write benchmarks/results/explain.json.")] = False,
) -> None:
    """Measure the cost of recording every reason, against the same steps without."""
    sizes = command_line.numbers(waiting, 1, 1_000_000, "1000,10000")
    names = [name.strip() for name in policies.split(",")]
    rows = []
    with command_line.progress("explain", len(names) * len(sizes)) as tick:
        for name in names:
            for size in sizes:
                rows.append(measure(name, running, size, steps))
                tick()
    content = {"benchmark": "explain", "runs": rows}
    if save:
        report.save("explain", content)
    if as_json:
        typer.echo(json.dumps(content))
        return
    table = Table(title="explaining, CPU time per step")
    for column in ("policy", "running", "waiting", "step us", "silent us", "share", "goal"):
        table.add_column(column, justify="left" if column == "policy" else "right")
    for row in rows:
        table.add_row(
            str(row["policy"]),
            str(row["running"]),
            str(row["waiting"]),
            str(row["step_us"]),
            str(row["silent_step_us"]),
            f"{float(row['share']):.1%}",
            f"{GOAL:.0%}",
        )
    Console().print(table)


if __name__ == "__main__":
    app()
