"""`quire serve gateway`."""

import importlib
from typing import Annotated, Any

import typer

from gateway_svc.settings import GatewaySettings
from quire import extras
from quire.cli.groups import new_app
from quire.cli.options import access as a
from quire.cli.options import common as o
from quire.cli.options.chats import parsers
from quire.cli.options.gathering import gathers
from quire.cli.options.settings import options_of
from quire.cli.options.vllm import Aliases
from quire.cli.serving import service
from quire.settings import option_name, settings_of
from svc_common.net.names import DNS_SCHEME
from svc_common.net.tls_settings import DoorSettings, PeerSettings
from svc_common.observability.log_format import LogFormat

app = new_app()

_limits = options_of(
    GatewaySettings,
    panels={
        "Limits": (
            *("max_waiting_requests", "max_waiting_tokens", "max_live_requests", "max_live_bytes"),
            *("max_buffered_tokens", "max_connections_per_peer"),
        ),
        "Times": (
            *("max_request_s", "scheduler_lookup_s", "scheduler_away_s", "warm_up_s", "unreachable_s", "drain_s"),
            *("http_header_s", "http_body_s"),
        ),
        "Traces": ("trace_content", "max_forced_traces"),
    },
)


@app.command()
@gathers(chats=parsers, limits=_limits, peers=a.peer_settings, doors=a.door_settings)
def serve_gateway(
    *,
    scheduler: Annotated[
        list[str] | None,
        typer.Option(
            help="Address of a scheduler, HOST:PORT; repeatable: requests go to the one that serves their model. dns:///NAME:PORT: "
            "the name is looked up again and again, and the gateway follows it.",
            show_default=f"127.0.0.1:{o.DEFAULT_SCHEDULER_PORT}",
        ),
    ] = None,
    host: o.Host = "127.0.0.1",
    port: o.GatewayPort = o.DEFAULT_GRPC_PORT,
    http_port: o.HttpPort = o.DEFAULT_HTTP_PORT,
    admin_port: o.AdminPort = o.DEFAULT_ADMIN_PORT,
    admin_http_port: o.AdminHttpPort = o.DEFAULT_ADMIN_HTTP_PORT,
    admin_http_name: o.AdminHttpNames = None,
    allowed_origins: o.AllowedOrigins = None,
    model_alias: Aliases = None,
    reflection: o.Reflection = True,
    chats: dict[str, Any],
    tenants: a.Tenants = None,
    log_format: o.LogForm = LogFormat.TEXT,
    stop_with_stdin: o.StopWithStdin = False,
    limits: dict[str, Any],
    peers: PeerSettings,
    doors: DoorSettings,
) -> None:
    """Start a gateway: gRPC for every language, and the OpenAI HTTP API, over one pipeline.

    Gateways keep no state that another could not rebuild: start as many as needed. Tokenizer and chat template come
    from the scheduler's worker, so it needs no checkpoint. Once it listens it prints

      service gateway pid=4713 address=127.0.0.1:50051 http=http://127.0.0.1:8000 admin=127.0.0.1:50052 lab=http://127.0.0.1:8001

      [bold]quire serve gateway --scheduler 127.0.0.1:50060[/bold]
      [bold]quire serve gateway --host 0.0.0.0 --tenants tenants.toml --tls-cert gateway.pem --tls-key gateway-key.pem[/bold]
    """
    extras.require("quire serve gateway", "gateway")
    settings = settings_of(
        GatewaySettings,
        option_name,
        schedulers=tuple(map(_scheduler, scheduler or [f"127.0.0.1:{o.DEFAULT_SCHEDULER_PORT}"])),
        host=host,
        grpc_port=port,
        http_port=http_port,
        admin_port=admin_port,
        admin_http_port=admin_http_port,
        admin_http_names=tuple(admin_http_name or ()),
        allowed_origins=tuple(allowed_origins or ()),
        model_aliases=tuple(model_alias or ()),
        reflection=reflection,
        tenants=tenants,
        **chats,
        **limits,
        peers=peers,
        doors=doors.model_copy(update={"insecure": peers.insecure}),
    )

    scheme = "https" if doors.encrypted else "http"

    def ready(address: str, http: str, admin: str, admin_http: str) -> None:
        urls = {"http": f"{scheme}://{http}", "admin": admin, "lab": f"{scheme}://{admin_http}"}
        service.announce("gateway", address, **urls)

    gateway: Any = importlib.import_module("gateway_svc.app")  # imports packages of the extra
    service.run(
        gateway.serve(settings, on_ready=ready), stop_with_stdin=stop_with_stdin, name="gateway", log_form=log_format
    )


def _scheduler(address: str) -> str:
    """An address, or a name that is looked up."""
    o.host_and_port(address.removeprefix(DNS_SCHEME), "--scheduler")
    return address
