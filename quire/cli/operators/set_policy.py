"""`quire set-policy`: change the policy of a running scheduler."""

import json
from typing import Annotated

import typer

from quire.cli.groups import new_app
from quire.cli.options import access as a
from quire.cli.options import common as o
from quire.cli.options.gathering import gathers
from quire.client.connections import Credentials
from quire.operators import admin as administration

app = new_app()


@app.command()
@gathers(credentials=a.credentials)
def set_policy(
    settings: Annotated[list[str], typer.Argument(metavar="KEY=VALUE...", help="Keys as in --set at start.")],
    as_json: o.AsJson = False,
    admin: o.Admin = o.DEFAULT_ADMIN,
    *,
    credentials: Credentials,
) -> None:
    """Change ordering, admission, preemption and limits while the scheduler runs; requests and blocks stay.

    All or nothing, from the next step on, and recorded. Phases, cache rules and the like are fixed at start; an error says which.

    [bold]quire set-policy policy=fcfs[/bold]
    [bold]quire set-policy max_num_seqs=32 watermark_blocks=20[/bold]
    """
    with administration.AdminClient(o.host_and_port(admin, "--admin"), credentials=credentials) as client:
        response = client.set_policy(settings)
    if as_json:
        changes = {change.key: {"old": change.old_value, "new": change.new_value} for change in response.changes}
        typer.echo(json.dumps({"from_step": response.from_step, "changes": changes}))
        return
    for change in response.changes:
        typer.echo(f"{change.key} = {change.new_value} (was {change.old_value})")
    if not response.changes:
        typer.echo("nothing changed: these are the values in force")
    else:
        typer.echo(f"from step {response.from_step} on")
