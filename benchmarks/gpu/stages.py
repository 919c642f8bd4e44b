"""The stages of a run, most important first, and `python -m benchmarks.gpu.stages`: one of them, in a process of its own.

A stage measures the ceilings first and last. Its results are in a file, written again behind each figure, so that a stage that
is ended early loses nothing.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from benchmarks.gpu.device import Place, place

if TYPE_CHECKING:
    from benchmarks.gpu.clock import Bench
    from benchmarks.gpu.models import Shape


@dataclass(frozen=True, slots=True)
class Stage:
    """`least_s`: seconds without which it is not started; `most_s`: after which it is ended.

    `model`: the checkpoint that it uses.
    """

    name: str
    what: str
    least_s: float
    most_s: float
    model: str = ""


STAGES = (
    Stage("stack", "gateway, scheduler and worker serve the 0.6 B model", 40, 100, "0.6B"),
    Stage("kernels", "each kernel and attention library alone, moves and swaps of blocks", 30, 90),
    Stage("steps-8B", "the worker's steps with the 8 B model", 50, 100, "8B"),
    Stage("offline-0.6B", "`LLM` with the 0.6 B model", 30, 60, "0.6B"),
    Stage("tests", "make test-cuda", 30, 120),
    Stage(
        "steps-0.6B",
        "the worker's steps with the 0.6 B model, its modules, an FP8 cache, attention libraries",
        30,
        70,
        "0.6B",
    ),
    Stage("transformers", "transformers' continuous batching with the 0.6 B model", 30, 60, "0.6B"),
    Stage("steps-8B-fp8", "the worker's steps with FP8 weights, then an FP8 cache too", 40, 70, "8B-fp8"),
    Stage("offline-8B", "`LLM` with the 8 B model", 45, 80, "8B"),
)
"""`tests` is run by benchmarks.gpu.session, the others here."""


def run(stage: Stage, folder: Path, deadline_s: float, out: Path, *, rehearse: bool) -> None:
    """Measure. `folder`: for checkpoints, which later stages use too; `deadline_s`: of time.monotonic()."""
    where = place(rehearse=rehearse)
    # Triton and transformers are imported once the device is there.
    from benchmarks.gpu import results  # noqa: PLC0415
    from benchmarks.gpu.clock import Bench  # noqa: PLC0415

    bench = Bench(where.torch_device, deadline_s, rehearse, on_figure=lambda bench: results.write(bench, out))
    bench.measure_ceilings()
    # A step's floor is in seconds: its work is that many seconds, done at a rate of one per second at best.
    bench.ceilings["floor"] = [1.0]
    try:
        _work(stage, bench, where, folder)
    finally:
        if time.monotonic() < deadline_s:
            bench.measure_ceilings()
        results.write(bench, out)


def _work(stage: Stage, bench: "Bench", where: Place, folder: Path) -> None:
    from benchmarks.gpu import kernels, models, serving, worker_steps  # noqa: PLC0415

    if stage.name == "kernels":
        kernels.Kernels(bench, where.devices.cuda(0), kernels.installed_libraries(bench.skipped)).run()
        return
    shape = models.shapes(tiny=bench.tiny)[stage.model]
    path = models.checkpoint(shape, folder, bench.device)
    works: dict[str, Callable[[], None]] = {
        "stack": lambda: serving.stack(bench, shape, path, where.environ),
        "steps-8B": lambda: worker_steps.large(bench, where.devices, shape, path),
        "steps-8B-fp8": lambda: worker_steps.large_fp8(bench, where.devices, shape, path),
        "steps-0.6B": lambda: worker_steps.small(
            bench, where.devices, shape, path, [made.name for made in kernels.installed_libraries(bench.skipped)]
        ),
        "offline-0.6B": lambda: serving.offline(bench, shape, path, ("nano", "even")),
        "offline-8B": lambda: serving.offline(bench, shape, path, ("nano",)),
        "transformers": lambda: _transformers(bench, shape, path),
    }
    works[stage.name]()


def _transformers(bench: "Bench", shape: "Shape", path: Path) -> None:
    from benchmarks.gpu import peers, serving  # noqa: PLC0415

    even = serving.loads(shape, tiny=bench.tiny)["even"]
    label, work = f"{shape.name} {even.name}", even.floor_s(bench, shape)
    peers.transformers_batching(bench, path, even.prompts, even.outputs[0], work, label)


def main(
    name: Annotated[str, typer.Argument()],
    folder: Annotated[Path, typer.Option()],
    seconds: Annotated[float, typer.Option()],
    out: Annotated[Path, typer.Option()],
    rehearse: Annotated[bool, typer.Option("--rehearse")] = False,
) -> None:
    """Run one stage."""
    [stage] = [stage for stage in STAGES if stage.name == name]
    run(stage, folder, time.monotonic() + seconds, out, rehearse=rehearse)


if __name__ == "__main__":
    typer.run(main)
