"""Options of `generate` and `chat`: how tokens are chosen. What is not given (None) is left to the server."""

from typing import Annotated

import typer

_PANEL = "Sampling (absent = the model's default)"

MaxTokens = Annotated[
    int | None,
    typer.Option(
        help="Most tokens to generate. Default: up to the model's context.", show_default=False, rich_help_panel=_PANEL
    ),
]
Temperature = Annotated[float | None, typer.Option(help="0 = greedy.", show_default=False, rich_help_panel=_PANEL)]
TopP = Annotated[float | None, typer.Option(help="In (0, 1].", show_default=False, rich_help_panel=_PANEL)]
TopK = Annotated[int | None, typer.Option(help="0 = all.", show_default=False, rich_help_panel=_PANEL)]
Seed = Annotated[
    int | None,
    typer.Option(
        help="Equal requests with equal seeds give equal outputs. Default: drawn.",
        show_default=False,
        rich_help_panel=_PANEL,
    ),
]
Stop = Annotated[
    list[str] | None,
    typer.Option(help="Ends the output before this text; repeatable.", show_default=False, rich_help_panel=_PANEL),
]
IgnoreEos = Annotated[bool, typer.Option("--ignore-eos", help="Go on past the model's end.", rich_help_panel=_PANEL)]
