"""`quire top`: what the scheduler does, live."""

import contextlib
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from quire.cli.groups import new_app
from quire.cli.options import access as a
from quire.cli.options import common as o
from quire.cli.options.gathering import gathers
from quire.client.connections import Credentials
from quire.operators import admin as administration
from quire_tools.top import screen
from quire_tools.top.live import LiveTopSource
from quire_tools.top.recorded import RecordedTopSource
from quire_tools.top.states import Source
from scheduler_svc.observe.recording.file_format import Recording

app = new_app()


@app.command()
@gathers(credentials=a.credentials)
def top(
    interval: Annotated[float, typer.Option(min=0.1, help="Seconds between two updates.")] = 1.0,
    once: Annotated[
        bool, typer.Option("--once", help="Print the state once as text and exit; of a recording, its end.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="A JSON object per update, for programs.")] = False,
    recording: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Show a recording of `quire record` instead, at its original speed; in a pipe all at once.",
            show_default=False,
        ),
    ] = None,
    admin: o.Admin = o.DEFAULT_ADMIN,
    *,
    credentials: Credentials,
) -> None:
    """Watch the scheduler: waiting requests and reasons, blocks, step times, throughput, workers.

    On a terminal a screen that is updated: q quits, p pauses, s or the arrows sort and scroll. In a pipe a few lines per update.
    A scheduler that cannot be reached is retried.

    [bold]quire top[/bold]
    [bold]quire top --once --json | jq .waits[/bold]
    [bold]quire top --interval 10 | tee top.log[/bold]
    [bold]quire top --recording slow.rec --interval 5 | less[/bold]
    """
    with contextlib.ExitStack() as held:
        source = _source(held, recording, interval, admin, credentials)
        console = Console()
        if once:
            screen.once(source, _write, as_json=as_json)
        elif as_json or not console.is_terminal:
            screen.lines(source, _write, interval_s=interval, as_json=as_json)
        else:
            screen.show(source, console, interval_s=interval)


def _source(
    held: contextlib.ExitStack, recording: Path | None, interval_s: float, admin: str, credentials: Credentials
) -> Source:
    if recording is not None:
        return RecordedTopSource(Recording(recording), interval_s)
    client = administration.AdminClient(o.host_and_port(admin, "--admin"), credentials=credentials)
    return LiveTopSource(held.enter_context(client))


def _write(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()
