"""`quire replay`: replay a recording decision by decision, or predict what another policy would have done."""

import importlib
import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from quire import extras
from quire.cli.groups import new_app
from quire.cli.options import common as o
from quire_tools.replay import report as reports
from quire_tools.replay.memory_course import MemoryCourse
from quire_tools.replay.request_steps import RequestStepsObserver
from quire_tools.replay.what_if import WhatIf, one_life, what_if
from scheduler_svc.observe.recording import changes
from scheduler_svc.observe.recording.changes import Change
from scheduler_svc.observe.recording.file_format import Recording
from scheduler_svc.observe.recording.replay import Replayer
from svc_common.errors import ConfigError

DIFFERENT_STATUS = 1
_NUM_MEMORY_POINTS = 20
_OPTION = "--set"

_PLOT_SUFFIXES = (".png", ".svg", ".pdf")

app = new_app()


@app.command()
def replay(
    file: Annotated[Path, typer.Argument(metavar="REC", help="A recording, made by `quire record`.")],
    policy: Annotated[
        str | None,
        typer.Option(metavar="NAME|FILE", help="Predict the run under this policy.", show_default=False),
    ] = None,
    sets: Annotated[
        list[str] | None,
        typer.Option(
            _OPTION,
            metavar="KEY=VALUE[@STEP]",
            help="Predict the run with this value, from the start or from just before that step; repeatable.",
            show_default=False,
        ),
    ] = None,
    from_segment: Annotated[int, typer.Option(min=0, help="Segment to start from; 0 = the first.")] = 0,
    memory: Annotated[bool, typer.Option("--memory", help="Show memory use over time.")] = False,
    as_json: o.AsJson = False,
    plot: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Write a picture of the prediction: .png, .svg or .pdf.", show_default=False),
    ] = None,
) -> None:
    """Replay a recording's inputs and compare every decision. Exit status 1 if one differs.

    With --policy or --set: what if. All is as recorded up to the first step that they name; from there steps take as long as a
    model fitted to the recorded ones says, and requests come when they came and get the tokens they got.

    [bold]quire replay slow.rec[/bold]
    [bold]quire replay slow.rec --policy vllm-v0[/bold]
    [bold]quire replay slow.rec --set num_gpu_blocks=512@1200 --plot more-blocks.png[/bold]
    """
    wanted = changes.from_sets(sets or (), _OPTION)
    _check(wanted, policy, memory=memory, plot=plot)
    recording = Recording(file)
    if policy is None and not wanted:
        _replay(recording, from_segment, memory=memory, as_json=as_json)
        return
    with _busy("what if"):
        found = what_if(one_life(recording.segments(from_segment)), policy, wanted)
    title = _title(policy, sets or [])
    if plot is not None:
        if plot.suffix.lower() not in _PLOT_SUFFIXES or not plot.absolute().parent.is_dir():
            raise ConfigError(
                f"--plot {plot}: give a file in a folder that exists, ending in {', '.join(_PLOT_SUFFIXES)}",
                reason="OPTIONS",
            )
        _plotting().save(plot, found, title)
    _print_what_if(found, title, as_json=as_json)


def _check(wanted: list[Change], policy: str | None, *, memory: bool, plot: Path | None) -> None:
    """Check that the options go together."""
    what_if_wanted = policy is not None or wanted
    if memory and what_if_wanted:
        raise ConfigError("--memory is about the recording as it is; leave --policy and --set away", reason="OPTIONS")
    if plot is not None and not what_if_wanted:
        raise ConfigError("--plot shows a what-if; give --policy or --set too", reason="OPTIONS")
    if plot is not None:
        _plotting()


def _replay(recording: Recording, start: int, *, memory: bool, as_json: bool) -> None:
    course = MemoryCourse(recording.num_steps // _NUM_MEMORY_POINTS) if memory else None
    seen = RequestStepsObserver()
    replayer = Replayer(seen, *([] if course is None else [course]))
    with _busy("replaying"):
        replayer.run(recording.segments(start))
    report = replayer.report
    if as_json:
        values = reports.replay_json(report, seen.requests)
        typer.echo(json.dumps(values if course is None else {**values, "memory": reports.memory_json(course.points)}))
    else:
        typer.echo(reports.replay_text(report, seen.requests, recording.num_segments - start))
        if course is not None:
            Console().print(reports.memory_table(course.points))
    if not report.identical:
        raise typer.Exit(DIFFERENT_STATUS)


def _print_what_if(found: WhatIf, title: str, *, as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps(reports.what_if_json(found)))
    else:
        Console().print(reports.what_if_table(found, title))


def _title(policy: str | None, sets: list[str]) -> str:
    return " ".join([*([] if policy is None else [Path(policy).stem]), *sets])


def _busy(what: str) -> Progress:
    """Show progress on standard error, on a terminal."""
    progress = Progress(
        SpinnerColumn(),
        TextColumn("{task.description}"),
        TimeElapsedColumn(),
        console=Console(stderr=True),
        transient=True,
    )
    progress.add_task(what)
    return progress


def _plotting() -> Any:
    """The plotting module. Raises ConfigError if matplotlib is not installed."""
    extras.require("--plot", "bench")
    return importlib.import_module("quire_tools.replay.plot")
