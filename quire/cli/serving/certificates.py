"""`quire certs`: certificates to try mutual TLS with."""

import importlib
from pathlib import Path
from typing import Annotated, Any

import typer

from quire import extras
from quire.cli.groups import new_app
from quire.local_stack.certificate_folder import CertificateFolder

app = new_app()


@app.command()
def certs(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Folder to write them to.")],
    host: Annotated[
        list[str] | None,
        typer.Option(
            help="Name or address under which clients reach the gateway, beside localhost; repeatable.",
            show_default=False,
        ),
    ] = None,
    days: Annotated[int, typer.Option(min=1, max=825, help="Days of validity.")] = 365,
) -> None:
    """Make a development CA, and certificates for gateway, scheduler, worker, operators and clients.

    Run it again to renew them: the CA stays, and running services reload them.

      [bold]quire certs certs/[/bold]
      [bold]quire up --tls certs/[/bold]
      [bold]quire chat --tls-ca certs/ca.pem --tls-cert certs/client.pem --tls-key certs/client-key.pem[/bold]
    """
    extras.require("quire certs", "tls")
    certificates: Any = importlib.import_module(
        "quire.local_stack.certificates"
    )  # imports cryptography, an optional package
    made: list[Path] = certificates.make_certificates(CertificateFolder(folder), hosts=host or (), days=days)
    for path in made:
        typer.echo(str(path))
    typer.echo(f"valid for {days} days; keep {folder}/ca-key.pem to yourself", err=True)
