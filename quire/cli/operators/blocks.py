"""`quire blocks`: the KV-cache ledger at one instant."""

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
from quire.operators import memory as memory_report

app = new_app()


@app.command()
@gathers(credentials=a.credentials)
def blocks(
    memory: Annotated[
        bool, typer.Option("--memory", help="Show memory use, and what contiguous allocation would hold.")
    ] = False,
    as_json: o.AsJson = False,
    admin: o.Admin = o.DEFAULT_ADMIN,
    *,
    credentials: Credentials,
) -> None:
    """Show the KV-cache blocks: pools, the table of each live sequence, reference counts.

    [bold]quire blocks[/bold]
    [bold]quire blocks --json | jq .gpu[/bold]
    [bold]quire blocks --memory[/bold]  what sharing saves and last blocks waste, beside memory without paging
    """
    with administration.AdminClient(o.host_and_port(admin, "--admin"), credentials=credentials) as client:
        response = client.blocks(memory=memory)
    if memory and not as_json:
        Console().print(memory_report.memory_tables(response))
    elif as_json:
        values = memory_report.memory_json(response) if memory else administration.blocks_json(response)
        typer.echo(json.dumps(values))
    else:
        typer.echo(administration.blocks_text(response))
