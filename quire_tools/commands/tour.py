"""`quire tour`: each mechanism on one screen, drawn from a live stack."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from quire import extras
from quire.cli.groups import new_app
from quire.cli.options import access as a
from quire.cli.options import common as o
from quire.cli.options.gathering import gathers
from quire.client.connections import Credentials
from quire_tools.tour import route
from quire_tools.tour.console import screen_console
from quire_tools.tour.guide import Guide
from quire_tools.tour.page import page
from quire_tools.tour.stage import RunningStack
from svc_common.errors import ConfigError

app = new_app()


@app.command()
@gathers(credentials=a.credentials)
def tour(
    names: Annotated[list[str] | None, typer.Argument(metavar="NAME", help="Stops to show; --list lists them.")] = None,
    every: Annotated[bool, typer.Option("--all", help="All stops, in order.")] = False,
    listing: Annotated[bool, typer.Option("--list", help="List the stops.")] = False,
    html: Annotated[
        Path | None,
        typer.Option("--html", metavar="FILE", help="Also write the screens to one page.", show_default=False),
    ] = None,
    address: Annotated[
        str | None,
        typer.Option(
            "--address",
            metavar="HOST:PORT",
            help="gRPC address of a running stack, for stops that need no special options.",
            show_default=False,
        ),
    ] = None,
    admin: o.Admin = o.DEFAULT_ADMIN,
    steps: Annotated[
        Path | None,
        typer.Option(
            "--steps",
            metavar="DIR",
            help="Write the steps behind each screen, in the format of quire steps --json.",
            show_default=False,
        ),
    ] = None,
    *,
    credentials: Credentials,
) -> None:
    """Demonstrate each mechanism: a stack is started and driven, and a screen shows what it did, with numbers read from it.

    Each screen ends with the verdict of its checks; exit status 1 if one fails.

    [bold]quire tour --list[/bold]                  list the stops
    [bold]quire tour batching[/bold]                one stop
    [bold]quire tour --all --html tour.html[/bold]  all stops, and as one page
    """
    stops = list(route.STOPS.values()) if every else route.chosen(names or [])
    if listing or not stops:
        _list()
        return
    running = None
    if address is not None:
        door, operators = o.host_and_port(address, "--address"), o.host_and_port(admin, "--admin")
        running = RunningStack(door, operators, credentials)
    extras.require("quire tour", *extras.services())
    if steps is not None:
        with _refusing("--steps", steps):
            steps.mkdir(parents=True, exist_ok=True)
    if html is not None:
        with _refusing("--html", html):
            html.touch()  # fail before the tour, not after it
    guide = Guide(screen_console(), running=running, steps_folder=steps, progress=_progress)
    visits = guide.lead(stops)
    if html is not None:
        html.write_text(page(visits), encoding="utf-8")
    if not all(visit.passed for visit in visits):
        raise typer.Exit(1)


def _list() -> None:
    width = max(len(name) for name in route.STOPS)
    for name, stop in route.STOPS.items():
        typer.echo(f"{name:<{width}}  {stop.summary}")


@contextmanager
def _refusing(option: str, path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ConfigError(f"{option} {path}: {error.strerror}", reason="INVALID_SETTING") from None


@contextmanager
def _progress(text: str) -> Iterator[None]:
    """Show a line on standard error: temporary on a terminal, permanent elsewhere."""
    console = Console(stderr=True, markup=False, highlight=False)
    if not console.is_terminal:
        console.print(text)
        yield
        return
    with console.status(text):
        yield
