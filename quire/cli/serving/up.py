"""`quire up`: the three services on this machine, until Ctrl-C or SIGTERM; what dies is started again."""

import math
import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Annotated, Any

import typer

from gateway_svc.chat.tool_calls.formats import AUTO
from gateway_svc.settings import GatewaySettings
from quire import extras
from quire.cli.groups import new_app
from quire.cli.options import access as a
from quire.cli.options import common as o
from quire.cli.options import model as m
from quire.cli.options import scheduling as sch
from quire.cli.options.gathering import gathers
from quire.cli.options.settings import arguments_for, options_of, switches_for
from quire.cli.options.worker import WorkerOptions
from quire.cli.serving.load_progress import LoadProgress
from quire.hub import checkpoint_folder
from quire.local_stack.processes import ServiceProcess
from quire.local_stack.stack import LocalStack
from quire.local_stack.stack_options import StackOptions
from quire.settings import option_name, settings_of
from quire.sizes import parse_size
from scheduler_svc.settings import SchedulerSettings, adapter_paths
from svc_common.log_format import LogFormat

CHECK_S = 0.1

app = new_app()

# A name that both services have sets both.
_limits = options_of(
    SchedulerSettings,
    GatewaySettings,
    panels={
        "Limits": (
            *("max_waiting_requests", "max_waiting_tokens", "max_waiting_s", "max_live_requests", "max_live_bytes"),
            *("max_buffered_tokens", "max_retained_tokens", "max_connections_per_peer"),
        ),
        "Times": (
            *("max_request_s", "frontend_grace_s", "no_worker_timeout_s", "step_timeout_s", "scheduler_away_s"),
            *("warm_up_s", "drain_s", "http_header_s", "http_body_s"),
        ),
        "Log": ("stats_interval_s",),
    },
)


@app.command()
@gathers(limits=_limits)
def up(
    model: m.Model = None,
    revision: m.Revision = "",
    served_model_name: m.ServedModelName = "",
    dtype: m.Dtype = "auto",
    quantization: m.Quantization = "none",
    max_model_len: m.MaxModelLen = None,
    backend: m.Backend = "auto",
    device: m.Device = "auto",
    num_threads: m.NumThreads = None,
    fuse: m.Fuse = None,
    invariant: m.Invariant = None,
    adapter: m.Adapters = None,
    max_adapters: m.MaxAdapters = None,
    max_adapter_rank: m.MaxAdapterRank = None,
    mask_budget_ms: m.MaskBudgetMs = None,
    simulated: Annotated[
        bool, typer.Option("--simulated", help="A cost model instead of a model.", rich_help_panel="Model")
    ] = False,
    workers: Annotated[
        int,
        typer.Option(
            help="Workers to start, each with the model; for a policy with a rank for each: chitu-dp.",
            min=1,
            rich_help_panel="Scheduling",
        ),
    ] = 1,
    block_size: m.BlockSize = None,
    kv_cache_dtype: m.KvCacheDtype = "auto",
    kv_cache_memory: m.KvCacheMemory = None,
    gpu_memory_utilization: m.GpuMemoryUtilization = None,
    swap_space: m.SwapSpace = None,
    num_gpu_blocks_override: m.NumGpuBlocksOverride = None,
    policy: sch.Policy = "quire",
    policy_set: sch.PolicySet = None,
    max_num_seqs: sch.MaxNumSeqs = None,
    max_num_batched_tokens: sch.MaxNumBatchedTokens = None,
    enable_prefix_caching: sch.EnablePrefixCaching = None,
    overlap: sch.Overlap = None,
    record_memory: sch.RecordMemory = None,
    record_tokens: sch.RecordTokens = False,
    host: o.Host = "127.0.0.1",
    grpc_port: o.GrpcPort = o.DEFAULT_GRPC_PORT,
    http_port: o.HttpPort = o.DEFAULT_HTTP_PORT,
    admin_port: o.AdminPort = o.DEFAULT_ADMIN_PORT,
    admin_http_port: o.AdminHttpPort = o.DEFAULT_ADMIN_HTTP_PORT,
    allowed_origins: o.AllowedOrigins = None,
    tool_parser: o.ToolParser = AUTO,
    reasoning_parser: o.ReasoningParser = AUTO,
    tls: a.StackTls = None,
    tenants: a.Tenants = None,
    insecure: a.Insecure = False,
    reflection: o.Reflection = True,
    log_format: o.LogForm = LogFormat.TEXT,
    *,
    limits: dict[str, Any],
) -> None:
    """Start gateway, scheduler and worker on this machine, and stop them with Ctrl-C.

    Standard output says where each listens, and when they can serve:

      service worker pid=4711 address=127.0.0.1:40001 metrics=127.0.0.1:40003
      service scheduler pid=4712 address=127.0.0.1:40002 metrics=127.0.0.1:40004
      service gateway pid=4713 address=127.0.0.1:50051
      ready grpc=127.0.0.1:50051 http=http://127.0.0.1:8000 admin=127.0.0.1:50052 lab=http://127.0.0.1:8001

    A service that dies is started again at the same address, after a pause that
    grows from death to death, with another `service` line. Requests wait for it.
    One that dies 8 times in a row, each within a minute, ends all services.

    Examples:

      [bold]quire up[/bold]                                            the built-in model
      [bold]quire up --model ~/Qwen3-0.6B --max-model-len 8192[/bold]  a checkpoint of yours
      [bold]quire up --model Qwen/Qwen3-0.6B[/bold]                    one of the hub
      [bold]quire up --policy vllm-v0 --set delay_factor=0.5[/bold]    another scheduler
      [bold]quire up --adapter sql=~/adapters/sql[/bold]               a LoRA adapter of it
      [bold]quire up --policy chitu-dp --workers 2[/bold]              two workers
      [bold]quire up --tls certs --tenants tenants.toml[/bold]          encrypted, with API keys
      [bold]quire up --grpc-port 0 --http-port 0 --admin-port 0 --admin-http-port 0[/bold]  whatever ports are free
    """
    extras.require("quire up", *extras.services(simulated=simulated))
    found = None if simulated else checkpoint_folder(model, revision)
    worker = WorkerOptions(
        served_model_name=served_model_name or (found.name if found else ""),
        dtype=dtype,
        quantization=quantization,
        max_model_len=max_model_len,
        block_size=block_size,
        gpu_memory_utilization=gpu_memory_utilization,
        swap_space=swap_space,
        num_gpu_blocks_override=num_gpu_blocks_override,
        kv_cache_dtype=kv_cache_dtype,
        kv_cache_memory=kv_cache_memory,
        backend=backend,
        device=device,
        num_threads=num_threads,
        fuse=fuse,
        invariant=invariant,
        max_adapters=max_adapters,
        max_adapter_rank=max_adapter_rank,
        mask_budget_ms=mask_budget_ms,
    )
    options = StackOptions(
        model=found and found.path,
        simulated=simulated,
        workers=workers,
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
        worker_args=_simulated_arguments(worker) if simulated else worker.arguments(),
        policy=policy,
        policy_set=policy_set or (),
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        scheduler_args=[
            *switches_for({"enable-prefix-caching": enable_prefix_caching, "overlap": overlap}),
            *_recording_arguments(record_memory, tokens=record_tokens),
            *([] if reflection else ["--no-reflection"]),
            *arguments_for(SchedulerSettings, limits),
        ],
        gateway_args=[
            *_chat_arguments(tool_parser, reasoning_parser),
            *_origin_arguments(allowed_origins or ()),
            *([] if reflection else ["--no-reflection"]),
            *arguments_for(GatewaySettings, limits),
        ],
    )
    _run(options)


def _chat_arguments(tool_parser: str, reasoning_parser: str) -> list[str]:
    """ConfigError for names that there are not, before anything starts."""
    settings_of(GatewaySettings, option_name, tool_parser=tool_parser, reasoning_parser=reasoning_parser)
    return ["--tool-parser", tool_parser, "--reasoning-parser", reasoning_parser]


def _origin_arguments(origins: Sequence[str]) -> list[str]:
    """ConfigError for what is no origin, before anything starts."""
    settings_of(GatewaySettings, option_name, allowed_origins=tuple(origins))
    return [part for origin in origins for part in ("--allowed-origins", origin)]


def _recording_arguments(memory: str | None, *, tokens: bool) -> list[str]:
    """ConfigError for a size that is none, before anything starts."""
    if memory is not None:
        parse_size(memory, "--record-memory")
    sized = [] if memory is None else ["--record-memory", memory]
    return [*sized, "--record-tokens"] if tokens else sized


def _simulated_arguments(worker: WorkerOptions) -> list[str]:
    named = {
        "--served-model-name": worker.served_model_name or None,
        "--max-model-len": worker.max_model_len,
        "--block-size": worker.block_size,
        "--num-gpu-blocks": worker.num_gpu_blocks_override,
        "--max-adapters": worker.max_adapters,
    }
    return [part for name, value in named.items() if value is not None for part in (name, str(value))]


class _Stopped(BaseException):
    """SIGTERM or SIGINT arrived while the services were starting."""


@contextmanager
def _signals_set(stop: threading.Event) -> Iterator[None]:
    """SIGTERM and SIGINT set `stop` and interrupt what waits; further ones do nothing, so that stopping is not cut short."""

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
