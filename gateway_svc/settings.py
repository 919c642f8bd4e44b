"""Settings of a gateway. Nothing here reads the environment: the command line passes the values in."""

import re
from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from gateway_svc.chat.tool_calls.formats import AUTO, known_reasoning_parser, known_tool_parser
from gateway_svc.http.limits import HttpLimits
from svc_common.net.tls_settings import DoorSettings, PeerSettings

Port = Annotated[int, Field(ge=0, le=65535)]
Seconds = Annotated[float, Field(gt=0)]
_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^\s/?#@]+")


def _known_origin(text: str) -> str:
    """Return `text` if it is `*` or an origin in browsers' form; raises ValueError otherwise."""
    if text != "*" and not _ORIGIN.fullmatch(text):
        raise ValueError(f"{text!r} is no web origin; write SCHEME://HOST or SCHEME://HOST:PORT without a path, or *")
    return text


class GatewaySettings(BaseModel):
    """Settings of one gateway process; port 0 = any free port."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    scheduler: str = "127.0.0.1:50060"
    """Address of the scheduler's EngineService, HOST:PORT."""
    host: str = "127.0.0.1"
    grpc_port: Port = 50051
    http_port: Port = 8000
    admin_port: Port = 50052
    admin_http_port: Port = 8001
    """Of the admin HTTP listener: the lab, and metrics."""
    admin_http_names: tuple[str, ...] = ()
    """Names by which browsers may call that, beside addresses and localhost."""

    allowed_origins: tuple[Annotated[str, AfterValidator(_known_origin)], ...] = ()
    """Web origins whose pages may call the OpenAI API from a browser; `*` = every page, none = no page."""
    max_connections_per_peer: Annotated[int, Field(ge=1)] = HttpLimits().connections_per_peer
    """HTTP connections that one address may have open; raise it where a proxy is the only peer."""
    http_header_s: Seconds = HttpLimits().header_s
    """Seconds in which the header of an HTTP request has to arrive, and a TLS handshake to end."""
    http_body_s: Seconds = HttpLimits().body_s
    """Seconds in which its body has to arrive."""
    max_request_s: Seconds = 600.0
    """Deadline in seconds of requests whose client gave none, and the longest one that counts."""
    max_waiting_requests: Annotated[int, Field(ge=1)] = 1024
    """Requests that may wait here while the scheduler is away or no model is loaded."""
    max_waiting_tokens: Annotated[int, Field(ge=1)] = 1_000_000
    """Prompt tokens of these, in all."""
    max_live_requests: Annotated[int, Field(ge=1)] = 20_000
    """Requests that this gateway holds at a time, waiting or running; beyond it they are refused with a retry time."""
    max_live_bytes: Annotated[int, Field(ge=1)] = 512 * 2**20
    """Bytes of their messages, in all."""
    scheduler_away_s: Seconds = 30.0
    """Seconds that requests outlive a lost scheduler; then they end with UNAVAILABLE."""
    warm_up_s: Seconds = 60.0
    """Seconds that a request waits for the first model while a worker is loading it."""
    unreachable_s: Seconds = 5.0
    """Seconds that a request waits for the first model while nobody is loading one: no scheduler, no worker."""
    max_buffered_tokens: Annotated[int, Field(ge=1)] = 4_000_000
    """Tokens kept for readers that are slower than generation; beyond it the slowest stream ends."""
    drain_s: Annotated[float, Field(ge=0)] = 2.0
    """Seconds that running requests may go on after a stop was asked for."""
    tool_parser: Annotated[str, AfterValidator(known_tool_parser)] = AUTO
    """How the model writes tool calls: hermes, llama3, mistral, mistral-args; auto = as its chat template shows; none = as text."""
    reasoning_parser: Annotated[str, AfterValidator(known_reasoning_parser)] = AUTO
    """How the model marks its reasoning: think; auto = as its chat template shows; none = not at all."""
    reflection: bool = True
    """Offer gRPC server reflection."""
    trace_content: bool = False
    """Put prompts and outputs on spans, where all readers of traces see them."""
    max_forced_traces: Annotated[float, Field(ge=0)] = 10.0
    """Traces per second that callers may force by the sampled flag of their `traceparent`, where our own sampler says no."""
    tenants: Path | None = None
    """File of tenants, their API keys and quotas, read again when it changes; None = everybody is the default tenant."""
    doors: DoorSettings = DoorSettings()
    """Encryption towards clients."""
    peers: PeerSettings = PeerSettings()
    """Encryption towards the scheduler."""

    @property
    def http_limits(self) -> HttpLimits:
        """Limits of each HTTP listener."""
        return HttpLimits(
            header_s=self.http_header_s,
            body_s=self.http_body_s,
            connections_per_peer=self.max_connections_per_peer,
        )
