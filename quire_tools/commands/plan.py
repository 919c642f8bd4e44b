"""`quire plan`: what fits in this memory, and why."""

import importlib
import json
from typing import Annotated, Any

import typer
from rich.console import Console

from quire import extras
from quire.cli.groups import new_app
from quire.cli.options import common as o
from quire.cli.options import model as m
from quire.cli.options.gathering import gathers
from quire.cli.options.settings import options_of
from quire.hub import checkpoint_folder
from quire.sizes import parse_size
from scheduler_svc.settings import SchedulerSettings
from worker_svc.settings import WorkerSettings, option_of

app = new_app()

_worker = options_of(
    WorkerSettings,
    spelled=option_of,
    panels={
        "Model": ("device", "dtype", "quantization", "quantization_group", "max_model_len", "draft_model"),
        "Memory": (
            *("block_size", "kv_cache_dtype", "kv_cache_memory_bytes", "swap_space_gib"),
            *("gpu_memory_utilization", "num_gpu_blocks_override", "attention_backend"),
        ),
    },
)
_limits = options_of(SchedulerSettings, panels={"Scheduling": ("max_num_seqs", "max_num_batched_tokens")})


@app.command()
@gathers(worker=_worker, limits=_limits)
def plan(
    *,
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
    worker: dict[str, Any],
    limits: dict[str, Any],
    as_json: o.AsJson = False,
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
        memory=None if memory is None else parse_size(memory, "--memory"),
        worker=worker,
        **limits,
    )
    answer = made.answered(asked)
    if as_json:
        typer.echo(json.dumps(made.plan_json(answer)))
    else:
        Console().print(made.plan_picture(answer))
    if answer.problems:
        raise typer.Exit(1)
