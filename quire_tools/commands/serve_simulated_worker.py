"""`quire serve simulated-worker`."""

from typing import Any

from quire.cli.groups import new_app
from quire.cli.options import access as a
from quire.cli.options import common as o
from quire.cli.options.gathering import gathers
from quire.cli.options.settings import options_of
from quire.cli.serving import worker_service
from quire_tools.simulated_worker.app import serve_simulated
from quire_tools.simulated_worker.settings import SimulatedWorkerSettings
from svc_common.net.tls_settings import PeerSettings
from svc_common.observability.log_format import LogFormat

app = new_app()

_cost_model = options_of(
    SimulatedWorkerSettings,
    panels={
        "Cost model": (
            *("time_scale", "load_s", "step_base_s", "prefill_token_s", "decode_row_s", "context_token_s"),
            *("eos_probability", "vocab_size"),
        ),
        "Memory": ("num_gpu_blocks", "num_cpu_blocks"),
        "Times": ("owner_lease_s",),
        "Traces": ("step_span_interval",),
    },
)


_model = options_of(
    SimulatedWorkerSettings,
    panels={"Model": ("served_model_name", "max_model_len", "max_adapters"), "Memory": ("block_size",)},
)


@app.command()
@gathers(model=_model, cost_model=_cost_model, peers=a.peer_settings)
def serve_simulated_worker(
    *,
    model: dict[str, Any],
    host: o.Host = "127.0.0.1",
    port: o.Port = o.DEFAULT_WORKER_PORT,
    metrics_port: o.MetricsPort = o.DEFAULT_WORKER_METRICS_PORT,
    log_format: o.LogForm = LogFormat.TEXT,
    stop_with_stdin: o.StopWithStdin = False,
    cost_model: dict[str, Any],
    peers: PeerSettings,
) -> None:
    """Start a worker with a cost model instead of a model, for load tests of the other services.

    [bold]quire serve simulated-worker --time-scale 0[/bold]
    """
    settings = SimulatedWorkerSettings.of(
        host=host, port=port, metrics_port=metrics_port, peers=peers, **model, **cost_model
    )
    worker_service.run(serve_simulated, settings, stop_with_stdin=stop_with_stdin, log_form=log_format)
