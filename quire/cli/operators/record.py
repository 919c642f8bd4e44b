"""`quire record`: write the scheduler's last steps and their inputs to a file."""

from contextlib import suppress
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from quire.cli.groups import new_app
from quire.cli.options import access as a
from quire.cli.options import common as o
from quire.cli.options.gathering import gathers
from quire.client.connections import Credentials
from quire.operators import admin as administration
from quire.operators import recordings

app = new_app()


@app.command()
@gathers(credentials=a.credentials)
def record(
    out: Annotated[
        Path, typer.Option("--out", "-o", metavar="FILE", help="File to write; one that exists is replaced.")
    ],
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Continue recording until Ctrl-C.")] = False,
    seconds: Annotated[
        float | None, typer.Option(min=0.0, help="Continue recording for this many seconds.", show_default=False)
    ] = None,
    admin: o.Admin = o.DEFAULT_ADMIN,
    *,
    credentials: Credentials,
) -> None:
    """Record a running scheduler's last steps, with every input of each decision.

    The scheduler keeps the last steps at all times, so a recording begins before the command. Tokens are replaced by other ids
    unless the scheduler was started to record them as they are.

    [bold]quire record --out slow.rec[/bold]               what it holds now
    [bold]quire record --out slow.rec --seconds 60[/bold]  and the next minute
    [bold]quire replay slow.rec[/bold]                     every decision again
    """
    progress = Progress(
        SpinnerColumn(),
        TextColumn("{task.description}"),
        TimeElapsedColumn(),
        console=Console(stderr=True),
        transient=True,
    )
    task = progress.add_task("asking the scheduler")

    def show(fetch: recordings.Fetch) -> None:
        left = f", {fetch.num_left} more" if fetch.num_left else ""
        progress.update(task, description=f"{_told(fetch)}{left}")

    with (
        administration.AdminClient(o.host_and_port(admin, "--admin"), credentials=credentials) as client,
        recordings.written(out) as writer,
    ):
        fetch = recordings.Fetch(client, writer, show)
        with progress:
            if follow or seconds is not None:
                with suppress(KeyboardInterrupt):
                    fetch.coming(seconds)
            fetch.held()
        fetch.finish()
    typer.echo(f"{out}: {_told(fetch)}")


def _told(fetch: recordings.Fetch) -> str:
    return f"{fetch.num_steps:,} steps in {fetch.num_segments} segments, {fetch.num_bytes / 2**20:.1f} MiB"
