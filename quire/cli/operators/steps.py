"""`quire steps`: the scheduler's decisions."""

import json
from typing import Annotated

import typer

from quire.cli.groups import new_app
from quire.cli.options import access as a
from quire.cli.options import common as o
from quire.cli.options.gathering import gathers
from quire.client.connections import Credentials
from quire.operators import admin as administration
from svc_common.step_text import step_text

app = new_app()


@app.command()
@gathers(credentials=a.credentials)
def steps(
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Continue with new steps as they complete.")] = False,
    since: Annotated[int, typer.Option(min=0, help="First step to show; 0 = the oldest held.")] = 0,
    tables: Annotated[bool, typer.Option("--tables", help="With the block tables after each step.")] = False,
    decode: Annotated[bool, typer.Option("--decode", help="Every group, swap and sampled token, readable.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object per line, for programs.")] = False,
    admin: o.Admin = o.DEFAULT_ADMIN,
    *,
    credentials: Credentials,
) -> None:
    """Show what the scheduler decided: the last 10,000 steps, oldest first.

    [bold]quire steps[/bold]                       one line per step
    [bold]quire steps --decode --since 120[/bold]  all about the steps from 120 on
    [bold]quire steps --json --follow[/bold]       for a program, as they happen
    """
    with administration.AdminClient(o.host_and_port(admin, "--admin"), credentials=credentials) as client:
        for report in client.steps(since=since, follow=follow, tables=tables):
            if as_json:
                typer.echo(json.dumps(administration.step_json(report, tables=tables)))
            elif decode or tables:
                typer.echo(step_text(report))
            else:
                typer.echo(administration.step_line(report))
