"""Many simulated workers in one process, each with a log of its steps (benchmarks.overlap.worker).

    python -m benchmarks.group_load.workers FOLDER --count 64 --step-s 0.1

Worker i writes to FOLDER/i.log. Prints each worker's address as `quire serve` does, and ends when standard input closes.
"""

import asyncio
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated

import typer

from benchmarks.overlap.worker import timed
from quire.cli.serving import service
from quire_tools.simulated_worker.engine import SimulatedEngine
from quire_tools.simulated_worker.settings import SimulatedWorkerSettings
from worker_svc.app import Watchers, serve_engine


def main(
    folder: Annotated[Path, typer.Argument(help="Folder of the logs.")],
    count: Annotated[int, typer.Option(min=1, help="Number of workers.")] = 1,
    step_s: Annotated[float, typer.Option(min=0, help="Seconds of a step, whatever it contains.")] = 0.1,
) -> None:
    """Serves the workers at any free ports."""
    with ExitStack() as files:
        logs = [files.enter_context((folder / f"{i}.log").open("ab", buffering=0)) for i in range(count)]

        async def serve_all() -> None:
            settings = SimulatedWorkerSettings.of(
                port=0, num_gpu_blocks=40_000, step_base_s=step_s, prefill_token_s=0.0, decode_row_s=0.0, context_token_s=0.0
            )  # fmt: skip
            async with asyncio.TaskGroup() as serving:
                for log in logs:
                    serving.create_task(
                        serve_engine(
                            settings,
                            lambda log=log: timed(SimulatedEngine(settings), log),
                            on_ready=lambda address: service.announce("worker", address),
                            watchers=Watchers(
                                on_budget=lambda readable: None, on_progress=lambda stage, fraction: None
                            ),
                        )
                    )

        service.run(serve_all(), stop_with_stdin=True)


if __name__ == "__main__":
    typer.run(main)
