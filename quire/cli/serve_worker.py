"""`quire serve worker`."""

from quire.built_in_model import default_model
from quire.cli import options as o
from quire.cli import service
from quire.cli.groups import new_app
from quire.cli.worker_options import WorkerOptions
from worker_svc import app as worker
from worker_svc.settings import WorkerSettings

app = new_app()


@app.command()
def serve_worker(
    model: o.Model = None,
    served_model_name: o.ServedModelName = "",
    dtype: o.Dtype = "auto",
    max_model_len: o.MaxModelLen = None,
    backend: o.Backend = "auto",
    device: o.Device = "auto",
    num_threads: o.NumThreads = None,
    invariant: o.Invariant = None,
    max_adapters: o.MaxAdapters = None,
    max_adapter_rank: o.MaxAdapterRank = None,
    block_size: o.BlockSize = None,
    kv_cache_dtype: o.KvCacheDtype = "auto",
    kv_cache_memory: o.KvCacheMemory = None,
    gpu_memory_utilization: o.GpuMemoryUtilization = None,
    swap_space: o.SwapSpace = None,
    num_gpu_blocks_override: o.NumGpuBlocksOverride = None,
    host: o.Host = "127.0.0.1",
    port: o.Port = o.DEFAULT_WORKER_PORT,
    stop_with_stdin: o.StopWithStdin = False,
) -> None:
    """Start a worker: it loads a checkpoint, owns the KV cache and executes the scheduler's steps.

    [bold]quire serve worker --model models/tiny[/bold]
    [bold]quire serve worker --model ~/Qwen3-0.6B --dtype bfloat16 --kv-cache-memory 2GiB[/bold]
    """
    given = WorkerOptions(
        served_model_name=served_model_name,
        dtype=dtype,
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
        invariant=invariant,
        max_adapters=max_adapters,
        max_adapter_rank=max_adapter_rank,
    )
    settings = WorkerSettings.of(host=host, port=port, **given.setting_values(model or default_model()))
    service.run(
        worker.serve(settings, on_ready=lambda address: service.announce("worker", address)),
        stop_with_stdin=stop_with_stdin,
    )
