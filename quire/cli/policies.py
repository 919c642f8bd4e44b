"""`quire policies`: the presets and what they are made of."""

import dataclasses
import json
from collections.abc import Iterable
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from quire.cli.groups import new_app
from scheduler_svc.core import presets
from scheduler_svc.policy_keys import known_keys

app = new_app()

_PARTS = ("phases", "cache", "progress", "grouping", "batching")


@app.command()
def policies(
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object: every preset with all keys.")] = False,
) -> None:
    """List the scheduling policies: parts, knobs that differ from the default, and all keys of --set.

    [bold]quire policies[/bold]
    [bold]quire up --policy vllm-v0 --set preemption_mode=swap[/bold]
    """
    specs = [dataclasses.asdict(presets.preset(name)) for name in presets.policy_names()]
    if as_json:
        typer.echo(json.dumps({spec.pop("name"): spec for spec in specs}))
        return
    console = Console()
    console.print(_table(specs))
    console.print("Keys of --set KEY=VALUE:", ", ".join(known_keys()), highlight=False)


def _table(specs: list[dict[str, Any]]) -> Table:
    table = Table("policy", "parts", "knobs that differ")
    table.columns[0].no_wrap = True
    defaults = dataclasses.asdict(presets.preset("vllm-v1"))
    for spec in specs:
        knobs = [key for key in spec if key not in (*_PARTS, "name") and spec[key] != defaults[key]]
        table.add_row(spec["name"], _pairs(spec, _PARTS), _pairs(spec, knobs))
    return table


def _pairs(spec: dict[str, Any], keys: Iterable[str]) -> str:
    return "\n".join(f"{key}={spec[key]}" for key in keys)
