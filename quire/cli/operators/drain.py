"""`quire drain`: stop a scheduler from accepting requests before it is shut down."""

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
def drain(
    undo: Annotated[bool, typer.Option("--undo", help="Accept requests again.")] = False,
    as_json: o.AsJson = False,
    admin: o.Admin = o.DEFAULT_ADMIN,
    *,
    credentials: Credentials,
) -> None:
    """Stop the scheduler from accepting requests; those that it has run to their end.

    New ones are refused with UNAVAILABLE and a retry time, and health says "not serving", so that load balancers use others.
    Repeat the command to see how many are left.

      [bold]quire drain[/bold]
      [bold]quire drain --undo[/bold]
    """
    with administration.AdminClient(o.host_and_port(admin, "--admin"), credentials=credentials) as client:
        num_requests = client.drain(undo=undo)
    if as_json:
        typer.echo(json.dumps({"draining": not undo, "num_requests": num_requests}))
    else:
        state = "takes requests again" if undo else "takes no more requests"
        typer.echo(f"the scheduler {state}; {num_requests} have not ended")
