"""Options about a model and the memory for it, with vLLM's names where vLLM has them."""

from typing import Annotated

import typer

from quire.cli.options.settings import options_of
from worker_svc.settings import WorkerSettings, option_of

_MODEL, _MEMORY, _RANKS = "Model", "Memory", "Ranks"

Model = Annotated[
    str | None,
    typer.Option(
        metavar="FOLDER|ORG/NAME",
        help="Folder of a checkpoint (config.json, tokenizer.json, *.safetensors), or a model of the hub, which is downloaded. "
        "Default: the built-in models/tiny.",
        show_default=False,
        rich_help_panel=_MODEL,
    ),
]
Revision = Annotated[
    str,
    typer.Option(
        help="Branch, tag or commit of a model of the hub. Default: the newest.",
        show_default=False,
        rich_help_panel=_MODEL,
    ),
]
Adapters = Annotated[
    list[str] | None,
    typer.Option(
        "--adapter",
        metavar="NAME=PATH",
        help="LoRA adapter to load at the start, and into every worker that connects later; repeatable: --adapter "
        "sql=/adapters/sql. PATH as the workers see it.",
        show_default=False,
        rich_help_panel=_MODEL,
    ),
]

# --- collectors, for `gathers`: fields of WorkerSettings ---------------------------------------------------------------

loading = options_of(
    WorkerSettings,
    spelled=option_of,
    panels={
        _MODEL: (
            *("served_model_name", "dtype", "quantization", "quantization_group", "max_model_len", "backend"),
            *(
                "attention_backend",
                "device",
                "num_threads",
                "fuse",
                "weight_cache",
                "cache_groups",
                "latent_cache",
                "checkpoint_tokens",
                "invariant",
            ),
            *("draft_model", "drafts"),
        )
    },
)
adapter_limits = options_of(
    WorkerSettings, spelled=option_of, panels={_MODEL: ("max_adapters", "max_adapter_rank", "mask_budget_ms")}
)
ranks = options_of(
    WorkerSettings, spelled=option_of, panels={_RANKS: ("tensor_parallel", "pipeline_parallel", "rank_timeout_s")}
)
membership = options_of(
    WorkerSettings,
    spelled=option_of,
    panels={_RANKS: ("tensor_parallel", "pipeline_parallel", "rank", "leader", "group_port", "rank_timeout_s")},
)
memory = options_of(
    WorkerSettings,
    spelled=option_of,
    panels={
        _MEMORY: (
            *("block_size", "kv_cache_dtype", "kv_cache_memory_bytes", "gpu_memory_utilization"),
            *("swap_space_gib", "num_gpu_blocks_override"),
        )
    },
)
