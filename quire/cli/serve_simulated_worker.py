"""`quire serve simulated-worker`."""

from typing import Annotated

import typer

from quire.cli import options as o
from quire.cli import service
from quire.cli.groups import new_app
from worker_svc import app as worker
from worker_svc.settings import SimulatedWorkerSettings

app = new_app()


@app.command()
def serve_simulated_worker(
    served_model_name: o.ServedModelName = "simulated",
    max_model_len: o.MaxModelLen = None,
    block_size: o.BlockSize = None,
    num_gpu_blocks: Annotated[int | None, typer.Option(help="KV blocks. Default: 4096.", show_default=False)] = None,
    num_cpu_blocks: Annotated[int | None, typer.Option(help="Host blocks. Default: 1024.", show_default=False)] = None,
    time_scale: Annotated[
        float | None,
        typer.Option(help="Factor on all durations; 0 = as fast as possible. Default: 1.", show_default=False),
    ] = None,
    load_s: Annotated[
        float | None, typer.Option(help="Seconds that loading takes. Default: 0.", show_default=False)
    ] = None,
    eos_probability: Annotated[
        float | None, typer.Option(help="Chance that a token ends its sequence. Default: 0.", show_default=False)
    ] = None,
    max_adapters: o.MaxAdapters = None,
    host: o.Host = "127.0.0.1",
    port: o.Port = o.DEFAULT_WORKER_PORT,
    stop_with_stdin: o.StopWithStdin = False,
) -> None:
    """Start a worker with a cost model instead of a model, for load tests of the other services.

    [bold]quire serve simulated-worker --time-scale 0[/bold]
    """
    values = {
        "served_model_name": served_model_name,
        "max_model_len": max_model_len,
        "block_size": block_size,
        "num_gpu_blocks": num_gpu_blocks,
        "num_cpu_blocks": num_cpu_blocks,
        "time_scale": time_scale,
        "load_s": load_s,
        "eos_probability": eos_probability,
        "max_adapters": max_adapters,
    }
    given = {name: value for name, value in values.items() if value is not None}
    settings = SimulatedWorkerSettings.of(host=host, port=port, **given)
    service.run(
        worker.serve_simulated(settings, on_ready=lambda address: service.announce("worker", address)),
        stop_with_stdin=stop_with_stdin,
    )
