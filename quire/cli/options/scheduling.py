"""Options about scheduling and what is kept of it, under vLLM's names where vLLM has them."""

from typing import Annotated

import typer

_SCHEDULING, _RECORDING = "Scheduling", "Recording"

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
Overlap = Annotated[
    bool | None,
    typer.Option(
        "--overlap/--no-overlap",
        help="Plan the next step while one runs, where the policy can (quire, vllm-v1-async). Default: yes, unless workers "
        "compute on a CPU.",
        show_default=False,
        rich_help_panel=_SCHEDULING,
    ),
]
RecordMemory = Annotated[
    str | None,
    typer.Option(
        help="Memory for the last steps, which `quire record` writes into a file: 16MiB, or bytes; 0 = record nothing. "
        "Default: 16MiB.",
        show_default=False,
        rich_help_panel=_RECORDING,
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
ForceOwnership = Annotated[
    bool,
    typer.Option(
        "--force-ownership",
        help="Take workers from another scheduler at once, for one that replaces a dead one; else their leases are waited for.",
        rich_help_panel=_SCHEDULING,
    ),
]
