"""Options of `generate` and `chat`: how tokens are chosen, what they must match. What is not given (None) is left to the server."""

from pathlib import Path
from typing import Annotated, Any

import typer

from quire.client.structured_outputs import StructuredOutputsParams
from svc_common.errors import ConfigError

_PANEL = "Sampling (absent = the model's default)"

MaxTokens = Annotated[
    int | None,
    typer.Option(
        help="Maximum number of tokens to generate. Default: up to the model's context length.",
        show_default=False,
        rich_help_panel=_PANEL,
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
IgnoreEos = Annotated[
    bool, typer.Option("--ignore-eos", help="Continue past the model's end-of-sequence token.", rich_help_panel=_PANEL)
]
Model = Annotated[
    str,
    typer.Option(help="The model's name or an adapter's (`quire models`). Default: the model.", show_default=False),
]

_MORE = "More sampling"

MinP = Annotated[
    float | None,
    typer.Option(
        help="Keep tokens at least this times as likely as the likeliest; in [0, 1].",
        show_default=False,
        rich_help_panel=_MORE,
    ),
]
RepetitionPenalty = Annotated[
    float | None,
    typer.Option(
        help="Above 1: tokens of prompt and output become less likely.", show_default=False, rich_help_panel=_MORE
    ),
]
PresencePenalty = Annotated[
    float, typer.Option(help="Above 0: tokens of the output become less likely.", rich_help_panel=_MORE)
]
FrequencyPenalty = Annotated[
    float, typer.Option(help="Above 0: the same, for each occurrence in the output.", rich_help_panel=_MORE)
]
BadWords = Annotated[
    list[str] | None,
    typer.Option("--bad-word", help="Never in the output; repeatable.", show_default=False, rich_help_panel=_MORE),
]

_CHOICES = "Several outputs"

N = Annotated[int, typer.Option("--n", "-n", help="Outputs wanted.", rich_help_panel=_CHOICES)]
BestOf = Annotated[
    int | None,
    typer.Option(
        help="Outputs generated, the likeliest of which are shown. Default: --n.",
        show_default=False,
        rich_help_panel=_CHOICES,
    ),
]
BeamWidth = Annotated[
    int | None,
    typer.Option(
        help="Beam search of this width; the --n best hypotheses are shown.",
        show_default=False,
        rich_help_panel=_CHOICES,
    ),
]
LengthPenalty = Annotated[
    float, typer.Option(help="Of a beam search: above 0 favours long outputs.", rich_help_panel=_CHOICES)
]

_STRUCTURE = "What the output must match (one of them)"

JsonSchema = Annotated[
    Path | None,
    typer.Option(help="A JSON schema, in this file.", show_default=False, rich_help_panel=_STRUCTURE),
]
Regex = Annotated[
    str | None, typer.Option(help="A regular expression.", show_default=False, rich_help_panel=_STRUCTURE)
]
Choice = Annotated[
    list[str] | None,
    typer.Option(help="One of these texts; repeatable.", show_default=False, rich_help_panel=_STRUCTURE),
]
Grammar = Annotated[
    Path | None,
    typer.Option(help="A Lark grammar, in this file.", show_default=False, rich_help_panel=_STRUCTURE),
]


def structured_outputs(
    json_schema: Path | None, regex: str | None, choice: list[str] | None, grammar: Path | None
) -> StructuredOutputsParams | None:
    """The one that is given; InvalidArgument for several, ConfigError for a file that cannot be read."""
    given: dict[str, Any] = {
        "json": None if json_schema is None else _text_of(json_schema, "--json-schema"),
        "regex": regex,
        "choice": choice or None,
        "grammar": None if grammar is None else _text_of(grammar, "--grammar"),
    }
    return StructuredOutputsParams(**given) if any(value is not None for value in given.values()) else None


def _text_of(path: Path, option: str) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{option}: {path} cannot be read: {error}", reason="BAD_FILE") from None
