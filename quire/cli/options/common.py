"""Options that several commands share: addresses of listeners and services, and how the log is written.

Options made from settings are in `quire.cli.options.settings`.
"""

from typing import Annotated, Any

import typer

from svc_common.errors import ConfigError
from svc_common.observability.log_format import LogFormat

DEFAULT_GRPC_PORT = 50051
DEFAULT_HTTP_PORT = 8000
DEFAULT_ADMIN_PORT = 50052
DEFAULT_ADMIN_HTTP_PORT = 8001
DEFAULT_SCHEDULER_PORT = 50060
DEFAULT_WORKER_PORT = 50061
DEFAULT_SCHEDULER_ADMIN_PORT = 50062
DEFAULT_SCHEDULER_METRICS_PORT = 8002
DEFAULT_WORKER_METRICS_PORT = 8003
DEFAULT_WORKER = f"127.0.0.1:{DEFAULT_WORKER_PORT}"


def host_and_port(address: str, option: str) -> str:
    """`address`, or ConfigError where it is not HOST:PORT."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit() or not 0 < int(port) < 65_536:
        raise ConfigError(
            f"{option}: {address!r} is no address; write HOST:PORT, for example 127.0.0.1:{DEFAULT_GRPC_PORT}",
            reason="BAD_ADDRESS",
        )
    return address


_SERVER = "Where it listens"


def _port(text: str, *names: str) -> Any:
    """An option for a port; without `names`, it has that of its parameter."""
    return typer.Option(*names, min=0, max=65535, help=f"{text}; 0 = any free one.", rich_help_panel=_SERVER)


Host = Annotated[
    str,
    typer.Option(
        help="Address to listen on; 0.0.0.0 = all (plain text: private networks only).", rich_help_panel=_SERVER
    ),
]
Port = Annotated[int, _port("Port of the gRPC listener")]
GrpcPort = Annotated[int, _port("Port of the gRPC API")]
GatewayPort = Annotated[int, _port("Port of the gRPC API", "--port", "--grpc-port")]
HttpPort = Annotated[int, _port("Port of the OpenAI HTTP API")]
AdminPort = Annotated[int, _port("Port of the admin API")]
AdminHttpPort = Annotated[int, _port("Port of the lab and of /metrics, for operators")]
MetricsPort = Annotated[int, _port("Port of /metrics for Prometheus")]
AllowedOrigins = Annotated[
    list[str] | None,
    typer.Option(
        "--allowed-origins",
        metavar="ORIGIN",
        help="A web origin (https://chat.example.org) that may call the OpenAI API from a browser; repeatable, * = all.",
        show_default=False,
        rich_help_panel=_SERVER,
    ),
]
AdminHttpNames = Annotated[
    list[str] | None,
    typer.Option(
        "--admin-http-name",
        metavar="NAME",
        help="A host name by which browsers may open the lab, beside addresses and localhost; repeatable.",
        show_default=False,
        rich_help_panel=_SERVER,
    ),
]
LogForm = Annotated[
    LogFormat,
    typer.Option(
        "--log-format",
        help="How the log is written to standard error: lines of text, or one JSON object per line.",
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="One JSON object, for programs.")]
StopWithStdin = Annotated[
    bool, typer.Option("--stop-with-stdin", help="End when standard input closes (for a parent process).", hidden=True)
]

Reflection = Annotated[
    bool,
    typer.Option(
        "--reflection/--no-reflection", help="Offer gRPC server reflection, which lists services and messages."
    ),
]
Target = Annotated[
    str,
    typer.Option("--target", envvar="QUIRE_TARGET", help="The gateway's gRPC address, HOST:PORT."),
]
Admin = Annotated[
    str,
    typer.Option("--admin", envvar="QUIRE_ADMIN", help="The admin API of the gateway or the scheduler, HOST:PORT."),
]
DEFAULT_TARGET = f"127.0.0.1:{DEFAULT_GRPC_PORT}"
DEFAULT_ADMIN = f"127.0.0.1:{DEFAULT_ADMIN_PORT}"
