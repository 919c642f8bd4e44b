"""`quire drain`: stop a scheduler, or one of its workers, from accepting requests before it is shut down."""

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
    worker: Annotated[
        str,
        typer.Option(help="Drain the worker at this address only, as `quire workers` lists it.", metavar="HOST:PORT"),
    ] = "",
    move: Annotated[
        bool,
        typer.Option("--move", help="With --worker: its requests move to other workers, with their KV where possible."),
    ] = False,
    as_json: o.AsJson = False,
    admin: o.Admin = o.DEFAULT_ADMIN,
    *,
    credentials: Credentials,
) -> None:
    """Stop the scheduler from accepting requests; those that it has run to their end.

    New ones are refused with UNAVAILABLE and a retry time, and health says "not serving", so that load balancers use others.
    Repeat the command to see how many are left. With --worker, the scheduler goes on and starts no request on that worker.

      [bold]quire drain[/bold]
      [bold]quire drain --undo[/bold]
      [bold]quire drain --worker 10.0.0.3:50061[/bold]         before that worker is shut down
      [bold]quire drain --worker 10.0.0.3:50061 --move[/bold]  the same without waiting for its requests
    """
    if move and not worker:
        raise typer.BadParameter("needs --worker: the requests of one worker continue on the others")
    with administration.AdminClient(o.host_and_port(admin, "--admin"), credentials=credentials) as client:
        num_requests = client.drain(undo=undo, worker=worker, move=move)
    if as_json:
        of_worker = {"worker": worker} if worker else {}
        typer.echo(json.dumps({"draining": not undo, "num_requests": num_requests, **of_worker}))
        return
    state = "takes requests again" if undo else "takes no more requests"
    what = f"the worker at {worker}" if worker else "the scheduler"
    typer.echo(f"{what} {state}; {num_requests} {'run there' if worker else 'have not ended'}")
