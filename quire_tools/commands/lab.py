"""`quire lab`: the page that shows queues, blocks and steps of a running stack or a recording."""

import asyncio
import importlib
import socket
import webbrowser
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import urlsplit

import typer

from quire import extras
from quire.cli.groups import new_app
from quire.cli.options import common as o
from quire_tools.lab.recorded import RecordedLabSource
from scheduler_svc.observe.recording.file_format import Recording
from svc_common.errors import ConfigError, Unavailable

app = new_app()

_REACH_S = 3.0
_RUNNING = f"http://127.0.0.1:{o.DEFAULT_ADMIN_HTTP_PORT}"


@app.command()
def lab(
    recording: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Show a recording of `quire record` instead of a running stack.", show_default=False
        ),
    ] = None,
    url: Annotated[
        str, typer.Option(envvar="QUIRE_LAB", help="The gateway's admin HTTP listener; `quire up` prints it.")
    ] = _RUNNING,
    open_it: Annotated[bool, typer.Option("--open", help="Open the page in the browser.")] = False,
    port: Annotated[
        int, typer.Option(min=0, max=65535, help="Port on this machine for a recording's page; 0 = any free one.")
    ] = 0,
) -> None:
    """Show queues, blocks, lanes and reasons step by step, in a browser.

    A running stack's gateway serves the page; this prints its URL. For a recording the page is served here, until Ctrl-C.

      [bold]quire lab --open[/bold]
      [bold]quire lab --recording slow.rec --open[/bold]
    """
    if recording is None:
        _check_there(url)
        _tell(url, open_it=open_it)
        return
    extras.require("quire lab --recording", "gateway")
    server: Any = importlib.import_module("quire_tools.lab.server")  # imports packages of the extra
    source = RecordedLabSource(Recording(recording))
    asyncio.run(server.serve(source, port, lambda at: _tell(at, open_it=open_it), asyncio.Event()))


def _check_there(url: str) -> None:
    """Raises ConfigError for a malformed URL, Unavailable if nothing listens there."""
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ConfigError(f"--url: {url!r} is none; write for example {_RUNNING}", reason="BAD_ADDRESS")
    port = parts.port or (443 if parts.scheme == "https" else 80)
    try:
        socket.create_connection((parts.hostname, port), _REACH_S).close()
    except OSError:
        raise Unavailable(
            f"nothing listens at {url}: start `quire up`, which prints its lab, and give that as --url; or give a --recording",
            reason="NO_LAB",
        ) from None


def _tell(url: str, *, open_it: bool) -> None:
    typer.echo(f"lab {url}")
    if open_it:
        webbrowser.open(url)
