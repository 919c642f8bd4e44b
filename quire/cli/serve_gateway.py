"""`quire serve gateway`."""

from typing import Annotated

import typer

from gateway_svc import app as gateway
from gateway_svc.settings import GatewaySettings
from quire.cli import options as o
from quire.cli import service
from quire.cli.groups import new_app
from quire.settings import option_name, settings_of

app = new_app()


@app.command()
def serve_gateway(
    scheduler: Annotated[
        str, typer.Option(help="Address of the scheduler, HOST:PORT.")
    ] = f"127.0.0.1:{o.DEFAULT_SCHEDULER_PORT}",
    host: o.Host = "127.0.0.1",
    port: o.GatewayPort = o.DEFAULT_GRPC_PORT,
    http_port: o.HttpPort = o.DEFAULT_HTTP_PORT,
    admin_port: o.AdminPort = o.DEFAULT_ADMIN_PORT,
    stop_with_stdin: o.StopWithStdin = False,
) -> None:
    """Start a gateway: gRPC for every language, and the OpenAI HTTP API, over one pipeline.

    It keeps nothing that another gateway could not rebuild: start as many as you like. Tokenizer and chat template come from the
    scheduler's worker, so it needs no checkpoint.

      [bold]quire serve gateway --scheduler 127.0.0.1:50060[/bold]
    """
    settings = settings_of(
        GatewaySettings,
        option_name,
        scheduler=o.host_and_port(scheduler, "--scheduler"),
        host=host,
        grpc_port=port,
        http_port=http_port,
        admin_port=admin_port,
    )
    service.run(
        gateway.serve(settings, on_ready=lambda address, *_: service.announce("gateway", address)),
        stop_with_stdin=stop_with_stdin,
    )
