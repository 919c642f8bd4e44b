"""`quire plan`: what fits in this memory, and why."""

import importlib
import json
from typing import Annotated, Any

import typer
from rich.console import Console

from quire import extras
from quire.cli.groups import new_app
from quire.cli.options import model as m
from quire.cli.options import scheduling as sch
from quire.hub import checkpoint_folder
from quire.sizes import GIB, parse_size

app = new_app()

_DEFAULT_BLOCK_SIZE, _DEFAULT_SWAP_GIB, _DEFAULT_SEQS, _DEFAULT_TOKENS = 16, 0.25, 256, 2_048
_DEFAULT_UTILIZATION = 0.9


@app.command()
def plan(
    model: m.Model = None,
    revision: m.Revision = "",
    memory: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE",
            help="Memory to plan for, 24GiB: of a GPU, or with --device cpu of a machine. Default: what is free here.",
            show_default=False,
        ),
    ] = None,
    device: m.Device = "auto",
    dtype: m.Dtype = "auto",
    max_model_len: m.MaxModelLen = None,
    block_size: m.BlockSize = None,
    kv_cache_dtype: m.KvCacheDtype = "auto",
    kv_cache_memory: m.KvCacheMemory = None,
    swap_space: m.SwapSpace = None,
    gpu_memory_utilization: m.GpuMemoryUtilization = None,
    num_gpu_blocks_override: m.NumGpuBlocksOverride = None,
    max_num_seqs: sch.MaxNumSeqs = None,
    max_num_batched_tokens: sch.MaxNumBatchedTokens = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object, for programs.")] = False,
) -> None:
    """What fits in this memory, and why: weights, KV blocks, how many requests at a time, what to change if it does not.

    No weights are read: config.json is enough, and of a model of the hub nothing else that is large is downloaded. Weights and
    blocks are counted as a worker counts them; the largest step is estimated. Exit status 1 when it does not fit.

    [bold]quire plan[/bold]                                             the built-in model, here
    [bold]quire plan --model ~/Qwen3-0.6B --max-model-len 8192[/bold]
    [bold]quire plan --model Qwen/Qwen3-8B --memory 24GiB --device cuda[/bold]
    [bold]quire plan --model ~/big --memory 16GiB --kv-cache-dtype bfloat16 --json[/bold]
    """
    extras.require("quire plan", "worker")
    found = checkpoint_folder(model, revision, weights=False)
    made: Any = importlib.import_module("quire_tools.plan.request")  # imports torch, an optional package
    asked = made.Wanted(
        folder=found.path,
        name=found.name,
        device=device,
        memory=None if memory is None else parse_size(memory, "--memory"),
        dtype=dtype,
        kv_cache_dtype=kv_cache_dtype,
        max_model_len=max_model_len,
        cache_bytes=None if kv_cache_memory is None else parse_size(kv_cache_memory, "--kv-cache-memory"),
        swap_bytes=int(_DEFAULT_SWAP_GIB * GIB)
        if swap_space is None
        else parse_size(swap_space, "--swap-space", plain_unit=GIB),
        block_size=block_size or _DEFAULT_BLOCK_SIZE,
        max_num_seqs=max_num_seqs or _DEFAULT_SEQS,
        max_num_batched_tokens=max_num_batched_tokens or _DEFAULT_TOKENS,
        num_gpu_blocks_override=num_gpu_blocks_override,
        utilization=gpu_memory_utilization or _DEFAULT_UTILIZATION,
    )
    answer = made.answered(asked)
    if as_json:
        typer.echo(json.dumps(made.plan_json(answer)))
    else:
        Console().print(made.plan_picture(answer))
    if answer.problems:
        raise typer.Exit(1)
