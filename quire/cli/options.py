"""Options that several commands share, under vLLM's names where vLLM has them, and the addresses that people write."""

from pathlib import Path
from typing import Annotated

import typer

from svc_common.errors import ConfigError

DEFAULT_GRPC_PORT = 50051
DEFAULT_HTTP_PORT = 8000
DEFAULT_ADMIN_PORT = 50052
DEFAULT_SCHEDULER_PORT = 50060
DEFAULT_WORKER_PORT = 50061
DEFAULT_SCHEDULER_ADMIN_PORT = 50062
DEFAULT_WORKER = f"127.0.0.1:{DEFAULT_WORKER_PORT}"


def host_and_port(address: str, option: str) -> str:
    """`address`, or ConfigError where it is not HOST:PORT."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit() or not 0 < int(port) < 65_536:
        raise ConfigError(
            f"{option}: {address!r} is no address; write HOST:PORT, for example 127.0.0.1:{DEFAULT_GRPC_PORT}",
            reason="BAD_ADDRESS",
        )
    return address


_SERVER, _MODEL, _MEMORY, _SCHEDULING = "Where it listens", "Model", "Memory", "Scheduling"
_RECORDING = "Recording"

Host = Annotated[
    str,
    typer.Option(
        help="Address to listen on; 0.0.0.0 = all (plain text: private networks only).", rich_help_panel=_SERVER
    ),
]
Port = Annotated[
    int, typer.Option(min=0, max=65535, help="Port of the gRPC listener; 0 = any free one.", rich_help_panel=_SERVER)
]
GrpcPort = Annotated[
    int,
    typer.Option(
        "--grpc-port", min=0, max=65535, help="Port of the gRPC API; 0 = any free one.", rich_help_panel=_SERVER
    ),
]
GatewayPort = Annotated[
    int,
    typer.Option(
        "--port",
        "--grpc-port",
        min=0,
        max=65535,
        help="Port of the gRPC API; 0 = any free one.",
        rich_help_panel=_SERVER,
    ),
]
HttpPort = Annotated[
    int,
    typer.Option(
        "--http-port", min=0, max=65535, help="Port of the OpenAI HTTP API; 0 = any free one.", rich_help_panel=_SERVER
    ),
]
AdminPort = Annotated[
    int,
    typer.Option(
        "--admin-port", min=0, max=65535, help="Port of the operators' API; 0 = any free one.", rich_help_panel=_SERVER
    ),
]
StopWithStdin = Annotated[
    bool, typer.Option("--stop-with-stdin", help="End when standard input closes (for a parent process).", hidden=True)
]

Model = Annotated[
    Path | None,
    typer.Option(
        help="Folder of a checkpoint: config.json, tokenizer.json, *.safetensors. Default: the built-in models/tiny.",
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
MaxModelLen = Annotated[
    int | None,
    typer.Option(
        help="Longest prompt plus output, in tokens. Default: what the checkpoint says.",
        show_default=False,
        rich_help_panel=_MODEL,
    ),
]
Backend = Annotated[str, typer.Option(help="Kernels: auto, reference, cpu or cuda.", rich_help_panel=_MODEL)]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.", rich_help_panel=_MODEL)]
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

BlockSize = Annotated[
    int | None, typer.Option(help="Tokens per KV block. Default: 16.", show_default=False, rich_help_panel=_MEMORY)
]
GpuMemoryUtilization = Annotated[
    float | None,
    typer.Option(
        help="Share of the GPU's memory that may be used. Default: 0.9.", show_default=False, rich_help_panel=_MEMORY
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
        help="Memory of the KV cache on CPU: 512MiB, 2GiB or bytes. Default: 512MiB unless less is free.",
        show_default=False,
        rich_help_panel=_MEMORY,
    ),
]

Policy = Annotated[
    str,
    typer.Option(
        metavar="NAME|FILE",
        help="Scheduling policy: quire, vllm-v1, vllm-v1-async, vllm-v0, vllm-v0-chunked, vllm-2023, chitu, chitu-skew, "
        "chitu-dp, static, or a YAML or JSON file. `quire policies` shows them.",
        rich_help_panel=_SCHEDULING,
    ),
]
PolicySet = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="Change a part, knob or limit of the policy; repeatable: --policy vllm-v0 --set preemption_mode=swap.",
        show_default=False,
        rich_help_panel=_SCHEDULING,
    ),
]
MaxNumSeqs = Annotated[
    int | None,
    typer.Option(
        help="Most sequences in one step. Default: 256, or the tokens of a step where these are fewer.",
        show_default=False,
        rich_help_panel=_SCHEDULING,
    ),
]
MaxNumBatchedTokens = Annotated[
    int | None,
    typer.Option(
        help="Most tokens in one step; longer prompts are cut in chunks where the policy cuts them. Default: 2048; "
        "vllm-v0-chunked 512; whole prompts: at least --max-model-len.",
        show_default=False,
        rich_help_panel=_SCHEDULING,
    ),
]
EnablePrefixCaching = Annotated[
    bool | None,
    typer.Option(
        "--enable-prefix-caching/--no-enable-prefix-caching",
        help="Reuse KV blocks of equal prefixes. Default: yes.",
        show_default=False,
        rich_help_panel=_SCHEDULING,
    ),
]

RecordMemory = Annotated[
    str | None,
    typer.Option(
        help="Memory for the last steps, which `quire record` writes into a file: 64MiB, or bytes; 0 = record nothing. "
        "Default: 64MiB.",
        show_default=False,
        rich_help_panel=_RECORDING,
    ),
]
Overlap = Annotated[
    bool,
    typer.Option(
        "--overlap/--no-overlap",
        help="Plan the next step while one runs, where the policy can (quire, vllm-v1-async).",
        rich_help_panel=_SCHEDULING,
    ),
]
RecordTokens = Annotated[
    bool,
    typer.Option(
        "--record-tokens",
        help="Record tokens as they are; else recordings have other names for them, from which no text can be read.",
        rich_help_panel=_RECORDING,
    ),
]

Target = Annotated[
    str,
    typer.Option("--target", envvar="QUIRE_TARGET", help="The gateway's gRPC door, HOST:PORT."),
]
Admin = Annotated[
    str,
    typer.Option(
        "--admin", envvar="QUIRE_ADMIN", help="The operators' API of the gateway or the scheduler, HOST:PORT."
    ),
]
DEFAULT_TARGET = f"127.0.0.1:{DEFAULT_GRPC_PORT}"
DEFAULT_ADMIN = f"127.0.0.1:{DEFAULT_ADMIN_PORT}"

LoggedSteps = Annotated[
    int, typer.Option(min=1, help="Steps that `quire steps` looks back on.", rich_help_panel=_RECORDING)
]
LoggedEvents = Annotated[
    int,
    typer.Option(
        min=1,
        help="Decisions that `quire why` looks back on; a request makes about five.",
        rich_help_panel=_RECORDING,
    ),
]
