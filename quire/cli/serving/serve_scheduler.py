"""`quire serve scheduler`."""

from typing import Annotated, Any

import typer

from quire.cli.groups import new_app
from quire.cli.options import access as a
from quire.cli.options import common as o
from quire.cli.options import model as m
from quire.cli.options import scheduling as sch
from quire.cli.options.gathering import gathers
from quire.cli.options.settings import options_of
from quire.cli.serving import service
from quire.scheduling import scheduler_settings
from quire.settings import option_name
from quire.sizes import parse_size
from scheduler_svc import app as scheduler
from scheduler_svc.settings import SchedulerSettings
from svc_common.net.names import DNS_SCHEME
from svc_common.net.tls_settings import PeerSettings
from svc_common.observability.log_format import LogFormat

app = new_app()

_limits = options_of(
    SchedulerSettings,
    panels={
        "Scheduling": ("force_ownership",),
        "Routers": ("kv_events",),
        "Limits": (
            *("max_waiting_requests", "max_waiting_tokens", "max_waiting_s", "max_live_requests"),
            *("max_retained_tokens", "max_stored_bytes", "max_worker_losses", "num_gpu_blocks", "num_cpu_blocks"),
        ),
        "Times": (
            *("no_worker_timeout_s", "frontend_grace_s", "step_timeout_s", "connect_timeout_s"),
            *("worker_lookup_s", "reconnect_backoff_s", "drain_s", "stored_s"),
        ),
        "Log": ("stats_interval_s",),
        "Recording": (
            "record_tokens",
            "record_segment_steps",
            "max_logged_steps",
            "max_logged_events",
            "integrity_check_every",
        ),
    },
)


@app.command()
@gathers(steps=sch.steps, limits=_limits, peers=a.peer_settings)
def serve_scheduler(
    *,
    worker: Annotated[
        list[str] | None,
        typer.Option(
            help="Address of a worker, HOST:PORT; repeatable. dns:///NAME:PORT: a worker at each address of that name, "
            "which is looked up again and again."
        ),
    ] = None,
    host: o.Host = "127.0.0.1",
    port: o.Port = o.DEFAULT_SCHEDULER_PORT,
    admin_port: o.AdminPort = o.DEFAULT_SCHEDULER_ADMIN_PORT,
    metrics_port: o.MetricsPort = o.DEFAULT_SCHEDULER_METRICS_PORT,
    policy: sch.Policy = "quire",
    policy_set: sch.PolicySet = None,
    steps: dict[str, Any],
    adapter: m.Adapters = None,
    record_memory: sch.RecordMemory = None,
    reflection: o.Reflection = True,
    log_format: o.LogForm = LogFormat.TEXT,
    stop_with_stdin: o.StopWithStdin = False,
    limits: dict[str, Any],
    peers: PeerSettings,
) -> None:
    """Start a scheduler: it owns every queue and every block table, and no tensor.

    It starts at once and queues requests while its worker loads; a worker that cannot be reached is tried again and named in the
    health of the service.

      [bold]quire serve scheduler --worker 127.0.0.1:50061[/bold]
      [bold]quire serve scheduler --worker 10.0.0.3:50061 --worker 10.0.0.4:50061[/bold]
      [bold]quire serve scheduler --worker dns:///workers.default.svc.cluster.local:50061[/bold]
      [bold]quire serve scheduler --policy vllm-v0 --set preemption_mode=swap --set delay_factor=0.5[/bold]
    """
    settings = scheduler_settings(
        option_name,
        workers=tuple(_worker(address) for address in worker or [o.DEFAULT_WORKER]),
        host=host,
        port=port,
        admin_port=admin_port,
        metrics_port=metrics_port,
        policy=policy,
        policy_set=tuple(policy_set or ()),
        adapters=tuple(adapter or ()),
        record_ring_bytes=None if record_memory is None else parse_size(record_memory, "--record-memory"),
        reflection=reflection,
        **steps,
        **limits,
        peers=peers,
    )

    def ready(address: str, admin: str, metrics: str) -> None:
        service.announce("scheduler", address, admin=admin, metrics=metrics)

    service.run(
        scheduler.serve(settings, on_ready=ready),
        stop_with_stdin=stop_with_stdin,
        name="scheduler",
        log_form=log_format,
    )


def _worker(address: str) -> str:
    """An address, or a name that stands for some."""
    o.host_and_port(address.removeprefix(DNS_SCHEME), "--worker")
    return address
