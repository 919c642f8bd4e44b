"""`quire why`: where a request's time went, and why."""

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
from quire.operators import why as timeline

app = new_app()


@app.command()
@gathers(credentials=a.credentials)
def why(
    request_id: Annotated[
        str,
        typer.Argument(
            metavar="ID", help="The request's id: x-request-id, cmpl-..., chatcmpl-..., msg_..., or as in its trace."
        ),
    ],
    tenant: Annotated[str, typer.Option(help="Tenant that the id belongs to.")] = "",
    what_if: Annotated[
        bool, typer.Option("--what-if", help="Search what would have ended each wait; takes up to 25 s.")
    ] = False,
    as_json: o.AsJson = False,
    admin: o.Admin = o.DEFAULT_ADMIN,
    *,
    credentials: Credentials,
) -> None:
    """Show why a request waited: every state and reason, with the numbers that decided.

    [bold]quire why 7c9e6679[/bold]            a table, oldest first
    [bold]quire why 7c9e6679 --what-if[/bold]  with the settings that would have ended each wait
    [bold]quire why 7c9e6679 --json[/bold]     for a program
    """
    with administration.AdminClient(o.host_and_port(admin, "--admin"), credentials=credentials) as client:
        response = client.explain(request_id, tenant=tenant, needs=what_if)
    if as_json:
        typer.echo(json.dumps(timeline.why_json(response)))
    else:
        console = Console()
        console.print(timeline.why_table(response))
        console.print(timeline.summary(response))
        if response.num_waits_not_searched:
            num = response.num_waits_not_searched
            console.print(f"what would have ended {num} of these waits was not found in time; ask again to go on")
        if response.others:
            console.print(f"the call had more prompts; see also: {', '.join(response.others)}")
