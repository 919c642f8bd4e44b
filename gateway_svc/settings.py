"""Settings of a gateway. Nothing here reads the environment: the command line passes the values in."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

from svc_common.net.rpc import PUBLIC_METADATA_BYTES
from svc_common.net.tls_settings import DoorSettings, PeerSettings

ToolFormatName = Literal[
    "hermes",
    "llama3",
    "granite",
    "phi4",
    "command",
    "hunyuan",
    "nemotron",
    "mistral",
    "mistral-args",
    "deepseek-v3",
    "deepseek-v3.1",
    "kimi-k2",
    "harmony",
    "qwen3-coder",
    "glm",
    "minimax-m2",
    "seed-oss",
    "deepseek-v3.2",
    "deepseek-v4",
    "step3",
    "llama4",
    "olmo3",
    "lfm2",
    "gemma3",
    "gemma4",
    "functiongemma",
]
ReasoningFormatName = Literal[
    "think", "hunyuan", "seed-oss", "mistral", "command", "granite", "granite-3.3", "gemma4", "harmony"
]

Port = Annotated[int, Field(ge=0, le=65535)]
Seconds = Annotated[float, Field(gt=0)]
_OBJECTIVE = re.compile(r"[^=,\s]+=-?\d{1,9}", re.ASCII)
_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^\s/?#@]+")


def _known_origin(text: str) -> str:
    """Return `text` if it is `*` or an origin in browsers' form; raises ValueError otherwise."""
    if text != "*" and not _ORIGIN.fullmatch(text):
        raise ValueError(f"{text!r} is no web origin; write SCHEME://HOST or SCHEME://HOST:PORT without a path, or *")
    return text


def _known_objectives(text: str) -> str:
    """Return `text` if it is a list of NAME=PRIORITY; raises ValueError otherwise."""
    for part in filter(None, text.split(",")):
        if not _OBJECTIVE.fullmatch(part):
            raise ValueError(f"{part!r} is no objective; write NAME=PRIORITY, with a whole number")
    return text


@dataclass(frozen=True, slots=True)
class HttpLimits:
    """Limits of one listener.

    `header_s`: from the connection, or the first byte of a further request, to the end of the header (TLS
    handshakes too); `body_s`: from there to the end of the body. `header_bytes`: request line and header
    fields together.
    """

    header_s: float = 10.0
    body_s: float = 60.0
    header_bytes: int = PUBLIC_METADATA_BYTES
    connections_per_peer: int = 1024


class GatewaySettings(BaseModel):
    """Settings of one gateway process; port 0 = any free port."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    schedulers: Annotated[tuple[str, ...], Field(min_length=1)] = ("127.0.0.1:50060",)
    """Addresses of schedulers' EngineServices, HOST:PORT; requests go to the one that serves their model, those without a model to
    the first. dns:///NAME:PORT: one of NAME's addresses, for as long as it has it."""
    host: str = "127.0.0.1"
    grpc_port: Port = 50051
    http_port: Port = 8000
    admin_port: Port = 50052
    admin_http_port: Port = 8001
    """Port of the admin HTTP listener: the lab and metrics."""
    admin_http_names: tuple[str, ...] = ()
    """Host names under which browsers may reach the admin HTTP listener, besides IP addresses and localhost."""

    model_aliases: tuple[Annotated[str, Field(min_length=1, max_length=128)], ...] = ()
    """Further names under which requests may ask for the model; answers have its first name."""
    allowed_origins: tuple[Annotated[str, AfterValidator(_known_origin)], ...] = ()
    """Web origins with pages that may call the OpenAI API from a browser; `*` = every origin. Default: none."""
    max_connections_per_peer: Annotated[int, Field(ge=1)] = HttpLimits().connections_per_peer
    """Open HTTP connections per client address; raise it where all clients come through a proxy."""
    http_header_s: Seconds = HttpLimits().header_s
    """Seconds within which the header of an HTTP request has to arrive, and a TLS handshake has to end."""
    http_body_s: Seconds = HttpLimits().body_s
    """Seconds within which the body of an HTTP request has to arrive."""
    max_request_s: Seconds = 600.0
    """Default deadline of a request, and the maximum that a client can set, in seconds."""
    max_waiting_requests: Annotated[int, Field(ge=1)] = 1024
    """Requests that may wait in the gateway while the scheduler is unreachable or no model is loaded."""
    max_waiting_tokens: Annotated[int, Field(ge=1)] = 1_000_000
    """Total prompt tokens of the requests that wait in the gateway."""
    max_live_requests: Annotated[int, Field(ge=1)] = 20_000
    """Maximum number of requests, waiting or running, in this gateway; further ones are refused with a retry time."""
    max_live_bytes: Annotated[int, Field(ge=1)] = 512 * 2**20
    """Total bytes of the messages of these requests."""
    scheduler_lookup_s: Seconds = 1.0
    """Seconds between two lookups of the scheduler's name (dns:///NAME:PORT)."""
    scheduler_away_s: Seconds = 30.0
    """Seconds for which requests survive a lost scheduler; then they end with UNAVAILABLE."""
    warm_up_s: Seconds = 60.0
    """Seconds for which a request waits for the first model while a worker is loading it."""
    unreachable_s: Seconds = 5.0
    """Seconds for which a request waits for the first model while none is being loaded: no scheduler or no worker."""
    max_buffered_tokens: Annotated[int, Field(ge=1)] = 4_000_000
    """Tokens buffered for clients that read more slowly than generation; above it the slowest stream ends."""
    drain_s: Annotated[float, Field(ge=0)] = 2.0
    """Seconds for which running requests may continue after a stop signal."""
    tool_parser: Literal["auto", "none", ToolFormatName] = "auto"
    """Tool-call format, by a name of docs/tool-formats.md; auto = as the chat template shows; none = calls stay text."""
    reasoning_parser: Literal["auto", "none", ReasoningFormatName] = "auto"
    """Reasoning format, by a name of docs/tool-formats.md; auto = as the chat template shows; none = reasoning is content."""
    score_template: Path | None = None
    """Jinja file that makes the prompt of /score and /rerank from messages of the roles query and document. Default: their vectors
    are compared."""
    score_tokens: str = "yes,no"
    """With --score-template: texts of one token each; the score is the probability of the first among them."""
    enable_tokenizer_info_endpoint: bool = False
    """Answer GET /tokenizer_info, which shows the chat template."""
    metrics_names: Literal["all", "quire", "vllm"] = "all"
    """Names under which /metrics has the cell's values: Quire's, vLLM's, or all."""
    router_headers: bool = False
    """Take tenant, priority and deadline of a request from the x-llm-d-* headers of a router that sets or removes them."""
    objectives: Annotated[str, AfterValidator(_known_objectives)] = ""
    """With --router-headers: priorities of the objectives in x-llm-d-inference-objective, as NAME=PRIORITY,...; others have 0."""
    kv_events_endpoint: str = ""
    """Publish KV events as vLLM does, at this ZeroMQ endpoint, as tcp://*:5557; the scheduler needs --kv-events. Default: not."""
    kv_events_replay_endpoint: str = ""
    """ZeroMQ endpoint at which subscribers ask for batches that they missed, as tcp://*:5558. Default: none."""
    kv_events_topic: str = ""
    """Topic of the KV events; llm-d expects kv@POD-IP:PORT@MODEL."""
    openengine: bool = False
    """Serve the contract openengine.v1 on the gRPC port, at the revision of docs/routers.md; experimental."""
    reflection: bool = True
    """Offer gRPC server reflection."""
    trace_content: bool = False
    """Put prompts and outputs on spans, visible to every reader of the traces."""
    max_forced_traces: Annotated[float, Field(ge=0)] = 10.0
    """Traces per second that callers may force by the sampled flag of their `traceparent`, beyond those the sampler chooses."""
    tenants: Path | None = None
    """File of tenants, their API keys and quotas, reloaded when it changes. Default: every client is the default tenant."""
    doors: DoorSettings = DoorSettings()
    """Encryption towards clients."""
    peers: PeerSettings = PeerSettings()
    """Encryption towards the scheduler."""

    @model_validator(mode="after")
    def _objectives_come_in_headers(self) -> Self:
        if self.objectives and not self.router_headers:
            raise ValueError("objectives are named by headers, which only router_headers makes the gateway read")
        return self

    @model_validator(mode="after")
    def _kv_events_have_an_endpoint(self) -> Self:
        if (self.kv_events_replay_endpoint or self.kv_events_topic) and not self.kv_events_endpoint:
            raise ValueError("a replay endpoint or a topic of KV events needs kv_events_endpoint")
        return self

    @property
    def priorities(self) -> Mapping[str, int]:
        """Priority of each objective."""
        pairs = (part.partition("=") for part in self.objectives.split(",") if part)
        return {name: int(priority) for name, _, priority in pairs}

    @property
    def http_limits(self) -> HttpLimits:
        """Limits of each HTTP listener."""
        return HttpLimits(
            header_s=self.http_header_s,
            body_s=self.http_body_s,
            connections_per_peer=self.max_connections_per_peer,
        )
