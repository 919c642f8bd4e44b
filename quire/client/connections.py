"""Connections to gateways: addresses, credentials and channel options. Channels are created on first use."""

import functools
import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
from opentelemetry import propagate

from protos.inference.v1 import inference_pb2_grpc
from quire.client.value_checks import valid_request_id
from svc_common.errors import ConfigError
from svc_common.net import rpc, tls

API_KEY_VARIABLE = "QUIRE_API_KEY"

_OPTIONS: list[tuple[str, Any]] = [
    ("grpc.max_receive_message_length", rpc.PUBLIC_MESSAGE_BYTES),
    ("grpc.max_send_message_length", rpc.PUBLIC_MESSAGE_BYTES),
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.http2.ping_timeout_ms", 5_000),
    ("grpc.enable_retries", 0),  # quire.client.retrying retries instead, across gateways
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Credentials:
    """Credentials of a client. `api_key` None = the environment variable QUIRE_API_KEY, if set.

    `tls`: encrypt; the server's certificate is signed by a public authority or by `tls_ca` (a PEM file, which implies `tls`).
    `tls_cert`, `tls_key`: PEM files of the client's own certificate, for servers that require one.
    `tls_name`: the name to expect in the server's certificate; empty = the host of the address.
    """

    api_key: str | None = field(default=None, repr=False)
    tls: bool = False
    tls_ca: Path | str | None = None
    tls_cert: Path | str | None = None
    tls_key: Path | str | None = None
    tls_name: str = ""

    @property
    def is_encrypted(self) -> bool:
        """True if any TLS option is set."""
        return self.tls or self.tls_ca is not None or self.tls_cert is not None or bool(self.tls_name)

    def channel(self) -> grpc.ChannelCredentials | None:
        """gRPC channel credentials; None = plain text. Raises ConfigError for unusable files."""
        if (self.tls_cert is None) != (self.tls_key is None):
            raise ConfigError("tls_cert and tls_key go together; give both or none", reason="TLS_OPTIONS")
        if not self.is_encrypted:
            return None
        given = (self.tls_ca, self.tls_cert, self.tls_key)
        files = tls.TlsFiles(*(None if path is None else Path(path) for path in given))
        return tls.channel_credentials(tls.WatchedFiles(files).current())

    def metadata(self) -> list[tuple[str, str]]:
        """Authorization metadata of each call. Raises ConfigError for a malformed API key."""
        key = os.environ.get(API_KEY_VARIABLE, "") if self.api_key is None else self.api_key
        if not (key.isascii() and key.isprintable() and key == key.strip()):
            raise ConfigError("the API key has characters that no key has; copy it again", reason="API_KEY")
        return [("authorization", f"Bearer {key}")] if key else []


@dataclass(frozen=True, slots=True)
class Connection:
    """A threaded or asyncio channel to one gateway, with its InferenceService stub."""

    channel: Any
    stub: Any


class Gateways:
    """One connection per gateway of a service, of which one is in use at a time.

    `make(address)` creates a channel. Thread-safe.
    """

    def __init__(self, targets: str | Sequence[str], make: Callable[[str], Any]) -> None:
        given = targets.split(",") if isinstance(targets, str) else targets
        self.targets = tuple(target.strip() for target in given)
        if not self.targets or not all(self.targets):
            raise ConfigError("no gateway is given; write HOST:PORT, several with commas between", reason="NO_TARGET")
        self._make = make
        self._connections: dict[str, Connection] = {}
        self._former: list[Any] = []
        self._current = 0
        self._lock = threading.Lock()

    @property
    def target(self) -> str:
        """Address of the gateway in use."""
        return self.targets[self._current]

    def stub(self, target: str) -> Any:
        """InferenceService stub of the gateway at `target`."""
        with self._lock:
            if target not in self._connections:
                channel = self._make(target)
                stub = inference_pb2_grpc.InferenceServiceStub(channel)  # type: ignore[no-untyped-call]
                self._connections[target] = Connection(channel, stub)
            return self._connections[target].stub

    def leave(self, target: str) -> None:
        """Switch to the next gateway because `target` is unavailable; no-op if another call has already switched."""
        with self._lock:
            if target == self.target:
                self._current = (self._current + 1) % len(self.targets)

    def renew(self, target: str) -> None:
        """Give later calls a new channel; calls in flight keep the old one.

        Ctrl-C may interrupt gRPC's own bookkeeping, after which a later call on that channel would hang
        forever.
        """
        with self._lock:
            former = self._connections.pop(target, None)
            self._former += [] if former is None else [former.channel]

    def channels(self) -> list[Any]:
        """All channels created so far."""
        return [*self._former, *(connection.channel for connection in self._connections.values())]


def blocking_channel(
    credentials: Credentials, options: Sequence[tuple[str, Any]] = _OPTIONS
) -> Callable[[str], grpc.Channel]:
    """Factory of channels for threads."""
    secret = credentials.channel()
    if secret is None:
        return functools.partial(grpc.insecure_channel, options=options)
    options = [*options, *tls.expects(credentials.tls_name)]
    return functools.partial(grpc.secure_channel, credentials=secret, options=options)


def asyncio_channel(
    credentials: Credentials, options: Sequence[tuple[str, Any]] = _OPTIONS
) -> Callable[[str], grpc.aio.Channel]:
    """Factory of channels for asyncio."""
    secret = credentials.channel()
    if secret is None:
        return functools.partial(grpc.aio.insecure_channel, options=options)
    options = [*options, *tls.expects(credentials.tls_name)]
    return functools.partial(grpc.aio.secure_channel, credentials=secret, options=options)


def call_metadata(credentials: Credentials, request_id: str, *, idempotent: bool = False) -> list[tuple[str, str]]:
    """Metadata of one call: API key, trace context, request id.

    If `idempotent`, a repeated call attaches to the first call's request.
    """
    carrier: dict[str, str] = {}
    propagate.inject(carrier)
    if valid_request_id(request_id):
        carrier["x-request-id"] = request_id
    if idempotent and request_id:
        carrier["idempotency-key"] = request_id
    return [*carrier.items(), *credentials.metadata()]
