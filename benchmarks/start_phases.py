"""Where the time and memory of a start go: a worker's phases in a process of its own, and imports of each service.

    python -m benchmarks.startup --phases --model models/tiny
    python -m benchmarks.start_phases models/tiny          # the worker's phases alone, as JSON

Alone, a worker shares its cores with no other service, so its processor time is comparable between runs.
"""

import json
import os
import re
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

import worker_svc.openmp  # noqa: F401  (as in a worker, before torch)
from quire.local_stack.processes import child_environment

IMPORTED: Mapping[str, Sequence[str]] = {
    "up": ("quire.cli.serving.up",),
    "gateway": ("quire.cli.serving.serve_gateway", "gateway_svc.app"),
    "scheduler": ("quire.cli.serving.serve_scheduler",),
    "worker": ("quire.cli.serving.serve_worker", "worker_svc.executor.model_engine"),
}
"""Modules that each process of `quire up` imports."""
_TOKENS, _SEQUENCES = 2_048, 256
_SHOWN = 6
_IMPORT = re.compile(r"import time:\s+(?P<own>\d+) \|\s+\d+ \|\s+(?P<name>\S+)")


@dataclass(frozen=True, slots=True)
class Phase:
    """`wall_s`, `cpu_s`: seconds, of all threads; `rss_mb`: resident memory at its end; `peak_mb`: the process's peak so far."""

    name: str
    wall_s: float
    cpu_s: float
    rss_mb: float
    peak_mb: float


class Phases:
    """Records the phases of this process, the first from the interpreter's start."""

    def __init__(self, first: str) -> None:
        self.done: list[Phase] = []
        self._name, self._wall, self._cpu = first, time.perf_counter(), 0.0

    def enter(self, name: str) -> None:
        """End the current phase and begin `name`; no-op in a phase of that name."""
        if name == self._name:
            return
        wall, cpu = time.perf_counter(), time.process_time()
        memory = _memory_mb(os.getpid())
        rss, peak = memory["VmRSS"], memory["VmHWM"]
        self.done.append(Phase(self._name, round(wall - self._wall, 3), round(cpu - self._cpu, 3), rss, peak))
        self._name, self._wall, self._cpu = name, wall, cpu


def of_worker(model: str) -> list[Phase]:
    """The phases of a worker with `model`, measured in a new process."""
    command = [sys.executable, "-m", "benchmarks.start_phases", model]
    done = subprocess.run(command, env=child_environment(os.environ), stdout=subprocess.PIPE, text=True, check=True)
    return [Phase(**one) for one in json.loads(done.stdout)]


def imports(process: str) -> Counter[str]:
    """Seconds that a process of `quire up` takes to import, by top-level package."""
    code = "; ".join(f"import {module}" for module in IMPORTED[process])
    command = [sys.executable, "-X", "importtime", "-c", code]
    done = subprocess.run(command, env=child_environment(os.environ), capture_output=True, text=True, check=True)
    total: Counter[str] = Counter()
    for found in map(_IMPORT.match, done.stderr.splitlines()):
        if found is not None:
            total[found["name"].partition(".")[0]] += int(found["own"]) / 1e6
    return total


def show(model: str, console: Console) -> None:
    """Print the phases of a worker, then what each process imports."""
    table = Table("worker, alone", "wall, s", "processor, s", "resident, MB", "peak, MB")
    for phase in of_worker(model):
        table.add_row(phase.name, *(f"{value:,.2f}" for value in (phase.wall_s, phase.cpu_s)), *_whole(phase))
    console.print(table)
    table = Table("imports", "s", "packages that take most")
    for process in IMPORTED:
        found = imports(process)
        most = ", ".join(f"{name} {seconds:.2f}" for name, seconds in found.most_common(_SHOWN))
        table.add_row(process, f"{sum(found.values()):.2f}", most)
    console.print(table)


def _whole(phase: Phase) -> tuple[str, str]:
    return f"{phase.rss_mb:,.0f}", f"{phase.peak_mb:,.0f}"


def peak_mb(pid: int) -> float:
    """Peak resident memory of a process, MB."""
    return _memory_mb(pid)["VmHWM"]


def _memory_mb(pid: int) -> dict[str, float]:
    lines = Path(f"/proc/{pid}/status").read_text(encoding="utf-8").splitlines()
    words = [line.split() for line in lines if line.startswith("Vm")]
    return {name.rstrip(":"): round(int(kib) * 1024 / 1e6, 1) for name, kib, *_ in words}


def main(model: Annotated[str, typer.Argument(help="Checkpoint folder.")]) -> None:
    """Loads a checkpoint as a worker does and prints the phases as JSON."""
    phases = Phases("interpreter, this script")
    # Here, because the imports are what is measured.
    phases.enter("import torch")
    import torch  # noqa: F401, PLC0415

    phases.enter("import transformers")
    import transformers.modeling_utils  # noqa: F401, PLC0415

    phases.enter("import the worker")
    from worker_svc.executor.model_engine import ModelEngine  # noqa: PLC0415
    from worker_svc.settings import WorkerSettings  # noqa: PLC0415

    phases.enter("device")
    engine = ModelEngine(WorkerSettings.of(model=Path(model)))
    engine.load(lambda stage, _fraction: phases.enter(stage))
    phases.enter("profile")
    found = engine.profile(_TOKENS, _SEQUENCES)
    phases.enter("allocate")
    engine.allocate(found.num_gpu_blocks, found.num_cpu_blocks)
    phases.enter("end")
    print(json.dumps([asdict(phase) for phase in phases.done]))


if __name__ == "__main__":
    typer.run(main)
