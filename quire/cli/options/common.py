"""Options that several commands share: where services listen and are found; and the addresses that people write.

Not here: models and memory (model_options), scheduling (scheduling_options), what settings say themselves (setting_options).
"""

from typing import Annotated

import typer

from svc_common.errors import ConfigError
from svc_common.log_format import LogFormat

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


_SERVER, _CHATS = "Where it listens", "Chats"

Host = Annotated[
    str,
    typer.Option(
        help="Address to listen on; 0.0.0.0 = all (plain text: private networks only).", rich_help_panel=_SERVER
    ),
]
Port = Annotated[
    int, typer.Option(min=0, max=65535, help="Port of the gRPC listener; 0 = any free one.", rich_help_panel=_SERVER)
]
GrpcPort = Annotated[
    int,
    typer.Option(
        "--grpc-port", min=0, max=65535, help="Port of the gRPC API; 0 = any free one.", rich_help_panel=_SERVER
    ),
]
GatewayPort = Annotated[
    int,
    typer.Option(
        "--port",
        "--grpc-port",
        min=0,
        max=65535,
        help="Port of the gRPC API; 0 = any free one.",
        rich_help_panel=_SERVER,
    ),
]
HttpPort = Annotated[
    int,
    typer.Option(
        "--http-port", min=0, max=65535, help="Port of the OpenAI HTTP API; 0 = any free one.", rich_help_panel=_SERVER
    ),
]
AdminPort = Annotated[
    int,
    typer.Option(
        "--admin-port", min=0, max=65535, help="Port of the operators' API; 0 = any free one.", rich_help_panel=_SERVER
    ),
]
AdminHttpPort = Annotated[
    int,
    typer.Option(
        "--admin-http-port",
        min=0,
        max=65535,
        help="Port of the lab and of /metrics, for operators; 0 = any free one.",
        rich_help_panel=_SERVER,
    ),
]
AllowedOrigins = Annotated[
    list[str] | None,
    typer.Option(
        "--allowed-origins",
        metavar="ORIGIN",
        help="A web origin (https://chat.example.org) whose pages may call the OpenAI API from a browser; repeatable, * = all.",
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
MetricsPort = Annotated[
    int,
    typer.Option(
        "--metrics-port",
        min=0,
        max=65535,
        help="Port of /metrics for Prometheus; 0 = any free one.",
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
StopWithStdin = Annotated[
    bool, typer.Option("--stop-with-stdin", help="End when standard input closes (for a parent process).", hidden=True)
]

Reflection = Annotated[
    bool,
    typer.Option(
        "--reflection/--no-reflection", help="Tell clients which services and messages there are (gRPC reflection)."
    ),
]
ToolParser = Annotated[
    str,
    typer.Option(
        help="How the model writes tool calls: hermes, llama3, mistral, mistral-args; auto = as its template shows; none.",
        rich_help_panel=_CHATS,
    ),
]
ReasoningParser = Annotated[
    str,
    typer.Option(
        help="How the model marks what it thinks: think; auto = as its template shows; none.",
        rich_help_panel=_CHATS,
    ),
]

Target = Annotated[
    str,
    typer.Option("--target", envvar="QUIRE_TARGET", help="The gateway's gRPC door, HOST:PORT."),
]
Admin = Annotated[
    str,
    typer.Option(
        "--admin", envvar="QUIRE_ADMIN", help="The operators' API of the gateway or the scheduler, HOST:PORT."
    ),
]
DEFAULT_TARGET = f"127.0.0.1:{DEFAULT_GRPC_PORT}"
DEFAULT_ADMIN = f"127.0.0.1:{DEFAULT_ADMIN_PORT}"
