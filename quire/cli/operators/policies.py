"""`quire policies`: the presets and what they are made of."""

import json
from collections.abc import Iterable
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from quire.cli.groups import new_app
from scheduler_svc.core.composition import presets
from scheduler_svc.core.spec.policy_spec import as_written
from scheduler_svc.policy.assembly import choose
from scheduler_svc.policy.keys import known_keys

app = new_app()

_PARTS = ("phases", "cache", "progress", "grouping", "batching")


@app.command()
def policies(
    as_json: Annotated[
        bool, typer.Option("--json", help="One JSON object: every preset with all keys, as the service uses them.")
    ] = False,
) -> None:
    """List the scheduling policies as the service uses them: parts, keys that differ from the default, and all keys of --set.

    null: the worker decides, there is no limit, or the policy does not read the key.

    [bold]quire policies[/bold]
    [bold]quire up --policy vllm-v0 --set preemption_mode=swap[/bold]
    """
    values = {name: choose(name).effective() for name in presets.policy_names()}
    if as_json:
        typer.echo(json.dumps(values))
        return
    console = Console()
    console.print(_table(values))
    console.print("Keys of --set KEY=VALUE:", ", ".join(known_keys()), highlight=False)


def _table(values: dict[str, dict[str, Any]]) -> Table:
    table = Table("policy", "parts", "keys that differ")
    table.columns[0].no_wrap = True
    defaults = values[presets.DEFAULT_POLICY]
    for name, of_policy in values.items():
        others = [key for key in of_policy if key not in _PARTS and of_policy[key] != defaults[key]]
        table.add_row(name, _pairs(of_policy, _PARTS), _pairs(of_policy, others))
    return table


def _pairs(values: dict[str, Any], keys: Iterable[str]) -> str:
    return "\n".join(f"{key}={as_written(values[key], str)}" for key in keys)
