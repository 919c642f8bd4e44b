"""Options about a model and the memory for it, under vLLM's names where vLLM has them; for all commands that load or plan one."""

from typing import Annotated

import typer

_MODEL, _MEMORY = "Model", "Memory"

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
ServedModelName = Annotated[
    str,
    typer.Option(
        help="Name that requests use. Default: the folder's name.", show_default=False, rich_help_panel=_MODEL
    ),
]
Dtype = Annotated[
    str,
    typer.Option(
        help="float32, bfloat16, float16, or auto: what the checkpoint and the device suit.", rich_help_panel=_MODEL
    ),
]
Quantization = Annotated[
    str,
    typer.Option(
        help="int8: weights are rounded to 8 bits and a scale for each column when they are loaded; CPU only. none: as they are.",
        rich_help_panel=_MODEL,
    ),
]
MaxModelLen = Annotated[
    int | None,
    typer.Option(
        help="Longest prompt plus output, in tokens. Default: what the checkpoint says.",
        show_default=False,
        rich_help_panel=_MODEL,
    ),
]
Backend = Annotated[str, typer.Option(help="Kernels: auto, reference, cpu or cuda.", rich_help_panel=_MODEL)]
Device = Annotated[
    str,
    typer.Option(
        help="cpu, cuda, cuda:N, or auto: the first CUDA device, else the CPU, as also with --backend cpu, --quantization or "
        "--invariant.",
        rich_help_panel=_MODEL,
    ),
]
NumThreads = Annotated[
    int | None,
    typer.Option(
        help="Compute threads on CPU. Default: what the container has.", show_default=False, rich_help_panel=_MODEL
    ),
]
Invariant = Annotated[
    bool | None,
    typer.Option(
        "--invariant/--no-invariant",
        help="Bitwise equal logits for any batch, chunking and block placement. Default: on CPU yes, on CUDA no.",
        show_default=False,
        rich_help_panel=_MODEL,
    ),
]
Fuse = Annotated[
    bool | None,
    typer.Option(
        "--fuse/--no-fuse",
        help="Run the decoder as one program over packed weights where its build is known; CPU only. Default: yes.",
        show_default=False,
        rich_help_panel=_MODEL,
    ),
]
BlockSize = Annotated[
    int | None, typer.Option(help="Tokens per KV block. Default: 16.", show_default=False, rich_help_panel=_MEMORY)
]
GpuMemoryUtilization = Annotated[
    float | None,
    typer.Option(
        help="Share of the GPU's memory for weights, the largest step and the KV cache, which gets what is left. CUDA only. "
        "Default: 0.9.",
        show_default=False,
        rich_help_panel=_MEMORY,
    ),
]
MaxAdapters = Annotated[
    int | None,
    typer.Option(help="Adapters loaded at a time. Default: 16.", show_default=False, rich_help_panel=_MODEL),
]
MaxAdapterRank = Annotated[
    int | None,
    typer.Option(help="Largest rank of an adapter. Default: 256.", show_default=False, rich_help_panel=_MODEL),
]
MaskBudgetMs = Annotated[
    float | None,
    typer.Option(
        help="CPU milliseconds that a grammar mask of one sequence may take on average; the first 100 may take 100 times that. "
        "Default: 10.",
        show_default=False,
        rich_help_panel=_MODEL,
    ),
]
Adapters = Annotated[
    list[str] | None,
    typer.Option(
        "--adapter",
        metavar="NAME=PATH",
        help="LoRA adapter to load at the start, and into every worker that comes later; repeatable: --adapter "
        "sql=/adapters/sql. PATH as the workers see it.",
        show_default=False,
        rich_help_panel=_MODEL,
    ),
]
SwapSpace = Annotated[
    str | None,
    typer.Option(
        help="Host memory for swapped blocks: 512MiB, or a plain number of GiB. Default: 0.25.",
        show_default=False,
        rich_help_panel=_MEMORY,
    ),
]
NumGpuBlocksOverride = Annotated[
    int | None,
    typer.Option(
        help="Number of KV blocks, whatever the profile run says.", show_default=False, rich_help_panel=_MEMORY
    ),
]
KvCacheDtype = Annotated[
    str,
    typer.Option(
        help="What keys and values are stored in: float32, bfloat16, float16, or auto: as the model computes.",
        rich_help_panel=_MEMORY,
    ),
]
KvCacheMemory = Annotated[
    str | None,
    typer.Option(
        help="Memory of the KV cache: 512MiB, 2GiB or bytes. Default: on CPU 512MiB unless less is free, on CUDA by "
        "--gpu-memory-utilization.",
        show_default=False,
        rich_help_panel=_MEMORY,
    ),
]
