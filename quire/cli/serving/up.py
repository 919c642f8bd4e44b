"""`quire up`: the three services on this machine, until Ctrl-C or SIGTERM; services that die are restarted."""

import math
import signal
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Annotated, Any

import typer

from gateway_svc.settings import GatewaySettings
from quire import extras
from quire.cli.groups import new_app
from quire.cli.options import access as a
from quire.cli.options import common as o
from quire.cli.options import model as m
from quire.cli.options import scheduling as sch
from quire.cli.options.chats import parsers
from quire.cli.options.gathering import gathers
from quire.cli.options.settings import arguments_for, as_arguments, options_of
from quire.cli.options.vllm import Aliases, VllmCommand, alias_arguments
from quire.cli.serving.load_progress import LoadProgress
from quire.hub import checkpoint_folder
from quire.local_stack.processes import ServiceProcess
from quire.local_stack.stack import LocalStack
from quire.local_stack.stack_options import StackOptions
from quire.settings import option_name, settings_of
from quire.sizes import parse_size
from scheduler_svc.adapter_names import adapter_paths
from scheduler_svc.settings import SchedulerSettings
from svc_common.errors import ConfigError
from svc_common.observability.log_format import LogFormat
from worker_svc.settings import option_of

CHECK_S = 0.1

app = new_app()

_SIMULATED = {
    **{name: name for name in ("served_model_name", "max_model_len", "block_size", "max_adapters")},
    "num_gpu_blocks_override": "num_gpu_blocks",
}
"""Settings of a worker that a simulated one has too, with their names there."""

# A name that both services have sets both.
_limits = options_of(
    SchedulerSettings,
    GatewaySettings,
    panels={
        "Limits": (
            *("max_waiting_requests", "max_waiting_tokens", "max_waiting_s", "max_live_requests", "max_live_bytes"),
            *("max_buffered_tokens", "max_retained_tokens", "max_stored_bytes", "max_connections_per_peer"),
        ),
        "Times": (
            *("max_request_s", "frontend_grace_s", "no_worker_timeout_s", "step_timeout_s", "scheduler_away_s"),
            *("warm_up_s", "drain_s", "stored_s", "http_header_s", "http_body_s"),
        ),
        "Log": ("stats_interval_s",),
        "Recording": ("record_tokens",),
        "Routers": ("kv_events",),
    },
)


@app.command(cls=VllmCommand)
@gathers(
    loading=m.loading,
    adapter_limits=m.adapter_limits,
    memory=m.memory,
    ranks=m.ranks,
    steps=sch.steps,
    chats=parsers,
    limits=_limits,
)
def up(
    *,
    model: m.Model = None,
    revision: m.Revision = "",
    loading: dict[str, Any],
    model_alias: Aliases = None,
    adapter: m.Adapters = None,
    adapter_limits: dict[str, Any],
    simulated: Annotated[
        bool, typer.Option("--simulated", help="A cost model instead of a model.", rich_help_panel="Model")
    ] = False,
    workers: Annotated[
        int,
        typer.Option(
            help="Workers to start, each with the model and memory of its own.",
            min=1,
            rich_help_panel="Scheduling",
        ),
    ] = 1,
    memory: dict[str, Any],
    ranks: dict[str, Any],
    policy: sch.Policy = "quire",
    policy_set: sch.PolicySet = None,
    steps: dict[str, Any],
    record_memory: sch.RecordMemory = None,
    host: o.Host = "127.0.0.1",
    grpc_port: o.GrpcPort = o.DEFAULT_GRPC_PORT,
    http_port: o.HttpPort = o.DEFAULT_HTTP_PORT,
    admin_port: o.AdminPort = o.DEFAULT_ADMIN_PORT,
    admin_http_port: o.AdminHttpPort = o.DEFAULT_ADMIN_HTTP_PORT,
    allowed_origins: o.AllowedOrigins = None,
    chats: dict[str, Any],
    tls: a.StackTls = None,
    tenants: a.Tenants = None,
    insecure: a.Insecure = False,
    reflection: o.Reflection = True,
    log_format: o.LogForm = LogFormat.TEXT,
    limits: dict[str, Any],
) -> None:
    """Start gateway, scheduler and worker on this machine, and stop them with Ctrl-C.

    Standard output has the address of each, and a line when they can serve:

      service worker pid=4711 address=127.0.0.1:40001 metrics=127.0.0.1:40003
      service scheduler pid=4712 address=127.0.0.1:40002 metrics=127.0.0.1:40004
      service gateway pid=4713 address=127.0.0.1:50051
      ready grpc=127.0.0.1:50051 http=http://127.0.0.1:8000 admin=127.0.0.1:50052 lab=http://127.0.0.1:8001

    A service that dies is restarted at the same address, with another `service`
    line, after a pause that grows with each death. Requests wait for it.
    One that dies 8 times in a row, each within a minute, ends all services.

    Examples:

      [bold]quire up[/bold]                                            the built-in model
      [bold]quire up --model ~/Qwen3-0.6B --max-model-len 8192[/bold]  a local checkpoint
      [bold]quire up --model Qwen/Qwen3-0.6B[/bold]                    a model of the hub
      [bold]quire up --model ~/Llama-3.2-1B --max-model-len auto[/bold]  the context that fits the memory
      [bold]quire up --served-model-name gpt-4o gpt-4o-mini[/bold]     two names; the first is in answers
      [bold]quire up --policy vllm-v0 --set delay_factor=0.5[/bold]    another scheduler
      [bold]quire up --adapter sql=~/adapters/sql[/bold]               with a LoRA adapter
      [bold]quire up --workers 3[/bold]                                three workers under one scheduler
      [bold]quire up --tensor-parallel 2[/bold]                        a worker of two processes
      [bold]quire up --pipeline-parallel 2[/bold]                      of two, each with half of the layers
      [bold]quire up --tls certs --tenants tenants.toml[/bold]          encrypted, with API keys
      [bold]quire up --grpc-port 0 --http-port 0 --admin-port 0 --admin-http-port 0[/bold]  any free ports
    """
    extras.require("quire up", *extras.services(simulated=simulated))
    found = None if simulated else checkpoint_folder(model, revision)
    sizes = {name: ranks.pop(name, 1) for name in ("tensor_parallel", "pipeline_parallel")}
    worker = loading | adapter_limits | memory | ranks
    for name, size in sizes.items():
        if simulated and size > 1:
            raise ConfigError(
                f"--simulated excludes {option_of(name)} {size}: a simulated worker has one rank",
                reason="INVALID_SETTING",
            )
    if found is not None:
        worker.setdefault("served_model_name", found.name)
    shared = [] if reflection else ["--no-reflection"]
    options = StackOptions(
        model=found.path if found else None,
        simulated=simulated,
        workers=workers,
        **sizes,
        host=host,
        grpc_port=grpc_port,
        http_port=http_port,
        admin_port=admin_port,
        admin_http_port=admin_http_port,
        tls=tls,
        tenants=tenants,
        insecure=insecure,
        log_format=log_format,
        adapters={name: str(Path(path).expanduser().absolute()) for name, path in adapter_paths(adapter or ()).items()},
        worker_args=_simulated_arguments(worker) if simulated else as_arguments(worker, option_of),
        policy=policy,
        policy_set=policy_set or (),
        scheduler_args=[
            *_recording_arguments(record_memory),
            *shared,
            *arguments_for(SchedulerSettings, steps | limits),
        ],
        gateway_args=[
            *_origin_arguments(allowed_origins or ()),
            *alias_arguments(model_alias),
            *shared,
            *arguments_for(GatewaySettings, chats | limits),
        ],
    )
    _run(options)


def _origin_arguments(origins: Sequence[str]) -> list[str]:
    """Raises ConfigError for a malformed origin, before anything starts."""
    settings_of(GatewaySettings, option_name, allowed_origins=tuple(origins))
    return [part for origin in origins for part in ("--allowed-origins", origin)]


def _recording_arguments(memory: str | None) -> list[str]:
    """Raises ConfigError for a malformed size, before anything starts."""
    if memory is None:
        return []
    parse_size(memory, "--record-memory")
    return ["--record-memory", memory]


def _simulated_arguments(worker: Mapping[str, Any]) -> list[str]:
    """The options that a simulated worker has too."""
    return as_arguments({_SIMULATED[name]: value for name, value in worker.items() if name in _SIMULATED})


class _Stopped(BaseException):
    """SIGTERM or SIGINT arrived while the services were starting."""


@contextmanager
def _signals_set(stop: threading.Event) -> Iterator[None]:
    """SIGTERM and SIGINT set `stop` and interrupt the main thread; further ones are ignored, so that stopping completes."""

    def on_signal(number: int, frame: FrameType | None) -> None:
        if not stop.is_set():
            stop.set()
            raise _Stopped

    before = {number: signal.signal(number, on_signal) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _run(options: StackOptions) -> None:
    stop = threading.Event()
    with _signals_set(stop), LoadProgress(options.log_format) as progress:
        try:
            stack = LocalStack(
                options,
                start_timeout_s=math.inf,
                on_line=progress.line,
                on_service=_announce,
                on_progress=progress.show,
                on_restart=progress.restart,
            )
            with stack:
                progress.finish()
                doors = f"grpc={stack.grpc_address} http={stack.http_url} admin={stack.admin_address}"
                _say(f"ready {doors} lab={stack.admin_url}")
                while True:
                    time.sleep(CHECK_S)
                    stack.revive()
        except _Stopped:
            progress.finish()


def _announce(service: ServiceProcess) -> None:
    metrics = f" metrics={service.metrics}" if service.metrics else ""
    _say(f"service {service.name} pid={service.pid} address={service.address}{metrics}")


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()
