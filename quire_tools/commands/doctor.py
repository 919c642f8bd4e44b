"""`quire doctor`: check installation, machine, model and service, and say what to do."""

import functools
import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from quire.cli.groups import new_app
from quire.cli.options import access as a
from quire.cli.options import common as o
from quire.cli.options.gathering import gathers
from quire.client.connections import Credentials
from quire_tools.doctor import installation, machine, model, service
from quire_tools.doctor.findings import Check, Severity, findings, findings_json, findings_text

app = new_app()

_PORTS = {
    "--grpc-port": o.DEFAULT_GRPC_PORT,
    "--http-port": o.DEFAULT_HTTP_PORT,
    "--admin-port": o.DEFAULT_ADMIN_PORT,
    "--admin-http-port": o.DEFAULT_ADMIN_HTTP_PORT,
}
_SERVICE = "A running service"


@app.command()
@gathers(credentials=a.credentials)
def doctor(
    checkpoint: Annotated[
        Path | None,
        typer.Option("--model", metavar="FOLDER", help="A checkpoint to check too.", show_default=False),
    ] = None,
    target: Annotated[
        str | None,
        typer.Option(
            "--target",
            envvar="QUIRE_TARGET",
            help="A gateway, HOST:PORT.",
            show_default=False,
            rich_help_panel=_SERVICE,
        ),
    ] = None,
    admin: Annotated[
        str | None,
        typer.Option(
            "--admin",
            envvar="QUIRE_ADMIN",
            help="The admin API, HOST:PORT: the scheduler and its workers.",
            show_default=False,
            rich_help_panel=_SERVICE,
        ),
    ] = None,
    scheduler: Annotated[
        str | None,
        typer.Option("--scheduler", help="A scheduler, HOST:PORT.", show_default=False, rich_help_panel=_SERVICE),
    ] = None,
    worker: Annotated[
        list[str] | None,
        typer.Option("--worker", help="A worker, HOST:PORT; repeatable.", show_default=False, rich_help_panel=_SERVICE),
    ] = None,
    as_json: o.AsJson = False,
    *,
    credentials: Credentials,
) -> None:
    """Check this installation and this machine, and a model or a running service if named. Each finding says what to do.

    Exit status 1 when there is a problem; warnings do not count. Packages of the services that are not installed are a problem
    unless a running service is named.

    [bold]quire doctor[/bold]
    [bold]quire doctor --model ~/Qwen3-0.6B[/bold]
    [bold]quire doctor --target 127.0.0.1:50051 --admin 127.0.0.1:50052[/bold]
    [bold]quire doctor --json | jq '.findings[] | select(.state != "ok")'[/bold]
    """
    checks = _installation(runs_services=not (target or admin or scheduler or worker))
    if not (target or admin):
        checks.append(("ports", functools.partial(machine.ports, _PORTS)))
    if checkpoint is not None:
        checks.append(("model", functools.partial(model.folder, checkpoint.expanduser())))
    if target is not None:
        checks.append(("gateway", functools.partial(service.gateway, o.host_and_port(target, "--target"), credentials)))
    if admin is not None:
        checks.append(
            ("scheduler", functools.partial(service.scheduler, o.host_and_port(admin, "--admin"), credentials))
        )
    if scheduler is not None:
        address = o.host_and_port(scheduler, "--scheduler")
        checks.append(("scheduler", functools.partial(service.health, "scheduler", address, credentials)))
    for address in worker or ():
        checks.append(("worker", functools.partial(service.worker, o.host_and_port(address, "--worker"), credentials)))
    found = list(findings(checks))
    if as_json:
        typer.echo(json.dumps(findings_json(found)))
    else:
        Console().print(findings_text(found), soft_wrap=True)
    if any(finding.state is Severity.PROBLEM for finding in found):
        raise typer.Exit(1)


def _installation(*, runs_services: bool) -> list[tuple[str, Check]]:
    return [
        ("Python", installation.python),
        ("packages", functools.partial(installation.packages, runs_services=runs_services)),
        ("conflicting packages", installation.conflicts),
        ("torch", installation.torch),
        ("CPU kernels", installation.kernels),
        ("processor", machine.processor),
        ("memory", machine.memory),
        ("disk", machine.disk),
        ("open files", machine.open_files),
        ("clock", machine.clock),
    ]
