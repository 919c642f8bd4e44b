"""`quire workers`: the scheduler's workers and what is known of each."""

import json
from typing import Annotated

import typer
from rich.console import Console

from quire.cli.groups import new_app
from quire.cli.options import access as a
from quire.cli.options import common as o
from quire.cli.options.gathering import gathers
from quire.client.connections import Credentials
from quire.operators import admin as administration
from quire.operators import load as report

app = new_app()


@app.command()
@gathers(credentials=a.credentials)
def workers(
    as_json: Annotated[bool, typer.Option("--json", help="One JSON list, for programs.")] = False,
    admin: o.Admin = o.DEFAULT_ADMIN,
    *,
    credentials: Credentials,
) -> None:
    """Show the workers: which run steps, why the others do not, what they serve.

    [bold]quire workers[/bold]
    [bold]quire workers --json | jq '.[] | select(.ready | not)'[/bold]
    """
    with administration.AdminClient(o.host_and_port(admin, "--admin"), credentials=credentials) as client:
        found = client.workers()
    if as_json:
        typer.echo(json.dumps(report.workers_json(found)))
    else:
        Console().print(report.workers_table(found))
