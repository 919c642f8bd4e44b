"""`quire serve worker`."""

from typing import Any

from quire import extras
from quire.cli.groups import new_app
from quire.cli.options import access as a
from quire.cli.options import common as o
from quire.cli.options import model as m
from quire.cli.options.gathering import gathers
from quire.cli.options.settings import options_of
from quire.cli.options.worker import WorkerOptions
from quire.cli.serving import worker_service
from quire.hub import checkpoint_folder
from svc_common.log_format import LogFormat
from svc_common.tls_settings import PeerSettings
from worker_svc import app as worker
from worker_svc.settings import WorkerSettings

app = new_app()

_limits = options_of(WorkerSettings, panels={"Times": ("owner_lease_s",), "Traces": ("step_span_interval",)})


@app.command()
@gathers(limits=_limits, peers=a.peer_settings)
def serve_worker(
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
    max_adapters: m.MaxAdapters = None,
    max_adapter_rank: m.MaxAdapterRank = None,
    mask_budget_ms: m.MaskBudgetMs = None,
    block_size: m.BlockSize = None,
    kv_cache_dtype: m.KvCacheDtype = "auto",
    kv_cache_memory: m.KvCacheMemory = None,
    gpu_memory_utilization: m.GpuMemoryUtilization = None,
    swap_space: m.SwapSpace = None,
    num_gpu_blocks_override: m.NumGpuBlocksOverride = None,
    host: o.Host = "127.0.0.1",
    port: o.Port = o.DEFAULT_WORKER_PORT,
    metrics_port: o.MetricsPort = o.DEFAULT_WORKER_METRICS_PORT,
    log_format: o.LogForm = LogFormat.TEXT,
    stop_with_stdin: o.StopWithStdin = False,
    *,
    limits: dict[str, Any],
    peers: PeerSettings,
) -> None:
    """Start a worker: it loads a checkpoint, owns the KV cache and executes the scheduler's steps.

    [bold]quire serve worker --model models/tiny[/bold]
    [bold]quire serve worker --model ~/Qwen3-0.6B --dtype bfloat16 --kv-cache-memory 2GiB[/bold]
    """
    extras.require("quire serve worker", "worker")
    found = checkpoint_folder(model, revision)
    given = WorkerOptions(
        served_model_name=served_model_name or found.name,
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
    settings = WorkerSettings.of(
        host=host, port=port, metrics_port=metrics_port, peers=peers, **limits, **given.setting_values(found.path)
    )
    worker_service.run(worker.serve, settings, stop_with_stdin=stop_with_stdin, log_form=log_format)
