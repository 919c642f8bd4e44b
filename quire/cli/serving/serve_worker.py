"""`quire serve worker`."""

from typing import Any

from quire import extras
from quire.cli.groups import new_app
from quire.cli.options import access as a
from quire.cli.options import common as o
from quire.cli.options import model as m
from quire.cli.options.gathering import gathers
from quire.cli.options.settings import options_of
from quire.cli.serving import worker_service
from quire.hub import checkpoint_folder
from svc_common.net.tls_settings import PeerSettings
from svc_common.observability.log_format import LogFormat
from worker_svc import app as worker
from worker_svc.settings import WorkerSettings

app = new_app()

_limits = options_of(WorkerSettings, panels={"Times": ("owner_lease_s",), "Traces": ("step_span_interval",)})


@app.command()
@gathers(loading=m.loading, adapter_limits=m.adapter_limits, memory=m.memory, limits=_limits, peers=a.peer_settings)
def serve_worker(
    *,
    model: m.Model = None,
    revision: m.Revision = "",
    loading: dict[str, Any],
    adapter_limits: dict[str, Any],
    memory: dict[str, Any],
    host: o.Host = "127.0.0.1",
    port: o.Port = o.DEFAULT_WORKER_PORT,
    metrics_port: o.MetricsPort = o.DEFAULT_WORKER_METRICS_PORT,
    log_format: o.LogForm = LogFormat.TEXT,
    stop_with_stdin: o.StopWithStdin = False,
    limits: dict[str, Any],
    peers: PeerSettings,
) -> None:
    """Start a worker: it loads a checkpoint, owns the KV cache and executes the scheduler's steps.

    [bold]quire serve worker --model models/tiny[/bold]
    [bold]quire serve worker --model ~/Qwen3-0.6B --dtype bfloat16 --kv-cache-memory 2GiB[/bold]
    """
    extras.require("quire serve worker", "worker")
    found = checkpoint_folder(model, revision)
    settings = WorkerSettings.of(
        model=found.path,
        host=host,
        port=port,
        metrics_port=metrics_port,
        peers=peers,
        **{"served_model_name": found.name} | loading | adapter_limits | memory | limits,
    )
    worker_service.run(worker.serve, settings, stop_with_stdin=stop_with_stdin, log_form=log_format)
