"""`quire load`: how busy the scheduler is."""

import json
import time
from typing import Annotated

import typer
from rich.console import Console
from rich.live import Live

from quire.cli.groups import new_app
from quire.cli.options import access as a
from quire.cli.options import common as o
from quire.cli.options.gathering import gathers
from quire.client.connections import Credentials
from quire.operators import admin as administration
from quire.operators import load as report

app = new_app()

_WATCH_S = 1.0


@app.command()
@gathers(credentials=a.credentials)
def load(
    watch: Annotated[bool, typer.Option("--watch", "-w", help="Once a second, until Ctrl-C.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="A JSON object, with --watch one each line.")] = False,
    admin: o.Admin = o.DEFAULT_ADMIN,
    *,
    credentials: Credentials,
) -> None:
    """Show the scheduler's load: waiting and running requests, free blocks, token rates.

    [bold]quire load[/bold]
    [bold]quire load --watch[/bold]
    [bold]quire load --json | jq .num_waiting[/bold]
    """
    with administration.AdminClient(o.host_and_port(admin, "--admin"), credentials=credentials) as client:
        if as_json:
            _print_json(client, watch=watch)
        elif watch:
            _watch(client)
        else:
            Console().print(report.load_table(client.load()))


def _print_json(client: administration.AdminClient, *, watch: bool) -> None:
    typer.echo(json.dumps(report.load_json(client.load())))
    while watch:
        time.sleep(_WATCH_S)
        typer.echo(json.dumps(report.load_json(client.load())))


def _watch(client: administration.AdminClient) -> None:
    with Live(report.load_table(client.load()), auto_refresh=False) as live:
        while True:
            time.sleep(_WATCH_S)
            live.update(report.load_table(client.load()), refresh=True)
