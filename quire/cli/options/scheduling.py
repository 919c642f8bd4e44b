"""Options about scheduling and recording, with vLLM's names where vLLM has them."""

from typing import Annotated

import typer

from quire.cli.options.settings import options_of
from scheduler_svc.settings import SchedulerSettings

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
        help="Set a key of the policy (`quire policies --json`); repeatable: --policy vllm-v0 --set preemption_mode=swap.",
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

# --- collectors, for `gathers`: fields of SchedulerSettings ------------------------------------------------------------

steps = options_of(
    SchedulerSettings,
    panels={_SCHEDULING: ("max_num_seqs", "max_num_batched_tokens", "enable_prefix_caching", "overlap", "grants")},
)
