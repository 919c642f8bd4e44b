"""`quire blocks`: the KV-cache ledger at one instant."""

import json
from typing import Annotated

import typer

from quire import admin as administration
from quire.cli import options as o
from quire.cli.groups import new_app

app = new_app()


@app.command()
def blocks(
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object, for programs.")] = False,
    admin: o.Admin = o.DEFAULT_ADMIN,
) -> None:
    """Show the KV-cache blocks: pools, the table of each live sequence, reference counts.

    [bold]quire blocks[/bold]
    [bold]quire blocks --json | jq .gpu[/bold]
    """
    with administration.AdminClient(o.host_and_port(admin, "--admin")) as client:
        response = client.blocks()
    typer.echo(json.dumps(administration.blocks_json(response)) if as_json else administration.blocks_text(response))
