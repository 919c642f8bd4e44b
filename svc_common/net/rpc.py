"""gRPC conventions of all services: channel and server options, error mapping, identity.

The only module that knows gRPC status codes: `abort` sends a `QuireError` as google.rpc.Status with details,
`from_rpc_error` reads one back. Keepalive is set to find a dead peer in seconds, not minutes.
"""

import asyncio
import logging
import uuid
from collections.abc import Sequence
from types import TracebackType
from typing import Any

import grpc
import grpc.aio
from google.protobuf import any_pb2, duration_pb2
from google.rpc import code_pb2, error_details_pb2, status_pb2  # type: ignore[import-untyped]
from grpc_status import rpc_status

from protos.common.v1 import common_pb2
from svc_common import errors
from svc_common.clipping import DESCRIPTION_BYTES, MESSAGE_BYTES, NAME_BYTES, VALUE_BYTES, clip, clip_all
from svc_common.version import SPOKEN, VERSION, Revisions

log = logging.getLogger(__name__)

ERROR_DOMAIN = "quire"
PUBLIC_MESSAGE_BYTES = 4 * 2**20
PUBLIC_METADATA_BYTES = 16 * 2**10
PUBLIC_STREAMS_PER_CONNECTION = 1_000
INTERNAL_MESSAGE_BYTES = 64 * 2**20

KEEPALIVE_S = 1.0
"""A service that stopped or was cut off is detected within twice this time."""

# Mark refusals as final: a client's service config that retries UNAVAILABLE is meant for broken connections.
# A refusal may have waited long, and gives its own retry time (RetryInfo).
_FINAL = ("grpc-retry-pushback-ms", "-1")

# A status queues behind all that the client has not read; it is sent whether or not the handler waits for it.
_UNREAD_STATUS_S = 1.0

_CLIENT_OPTIONS: list[tuple[str, Any]] = [
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    # Reconnect to a returning peer quickly. "min" limits one connection attempt, also to a stopped peer.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 250),
    ("grpc.min_reconnect_backoff_ms", 2_000),
    # A peer that was moved has another address: look its name up again when a connection ends (default: every 30 s at most).
    ("grpc.dns_min_time_between_resolutions_ms", 500),
    ("grpc.max_receive_message_length", INTERNAL_MESSAGE_BYTES),
    ("grpc.max_send_message_length", INTERNAL_MESSAGE_BYTES),
]

_SERVER_OPTIONS: list[tuple[str, Any]] = [
    ("grpc.so_reuseport", 0),
    ("grpc.http2.min_ping_interval_without_data_ms", int(500 * KEEPALIVE_S)),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.server.max_pending_requests", 20_000),
    ("grpc.server.max_pending_requests_hard_limit", 20_000),
]

_PUBLIC_OPTIONS: list[tuple[str, Any]] = [
    ("grpc.max_receive_message_length", PUBLIC_MESSAGE_BYTES),
    ("grpc.max_send_message_length", PUBLIC_MESSAGE_BYTES),
    # Without these, a client that does not read makes the server buffer megabytes.
    ("grpc.http2.bdp_probe", 0),
    ("grpc.http2.lookahead_bytes", 65_536),
    ("grpc.http2.write_buffer_size", 65_536),
    # Per connection: further calls of a client wait at the client, unless it opens another connection.
    ("grpc.max_concurrent_streams", PUBLIC_STREAMS_PER_CONNECTION),
    ("grpc.max_metadata_size", PUBLIC_METADATA_BYTES),
    ("grpc.absolute_max_metadata_size", PUBLIC_METADATA_BYTES),
]

_INTERNAL_OPTIONS: list[tuple[str, Any]] = [
    ("grpc.max_receive_message_length", INTERNAL_MESSAGE_BYTES),
    ("grpc.max_send_message_length", INTERNAL_MESSAGE_BYTES),
]


def channel(
    address: str,
    *,
    credentials: grpc.ChannelCredentials | None = None,
    options: Sequence[tuple[str, Any]] = (),
) -> grpc.aio.Channel:
    """Open a channel between services.

    Without `credentials` it is plain text, only for loopback or a private network (see `peers`). A peer that
    stops answering, hung or cut off, ends all calls with UNAVAILABLE within twice `KEEPALIVE_S`. The peer's
    transport answers pings, even while its Python code is blocked.
    """
    all_options = [*_CLIENT_OPTIONS, *_keepalive(KEEPALIVE_S), *options]
    if credentials is None:
        return grpc.aio.insecure_channel(address, options=all_options)
    return grpc.aio.secure_channel(address, credentials, options=all_options)


def _keepalive(seconds: float) -> list[tuple[str, Any]]:
    """Keepalive options: ping after that many seconds without a byte from the peer, and wait as long for the answer.

    `ping_timeout_ms` applies while data waits to be written; its default is a minute.
    """
    options = ("grpc.keepalive_time_ms", "grpc.keepalive_timeout_ms", "grpc.http2.ping_timeout_ms")
    return [(option, int(1_000 * seconds)) for option in options]


def server(
    *, public: bool = False, interceptors: "Sequence[grpc.aio.ServerInterceptor[Any, Any]]" = ()
) -> grpc.aio.Server:
    """Make a server: `public` for clients (small messages, bounded buffers), else for calls between services."""
    options = _SERVER_OPTIONS + (_PUBLIC_OPTIONS if public else _INTERNAL_OPTIONS)
    return grpc.aio.server(interceptors=interceptors, options=options)


def bind(
    srv: grpc.aio.Server, host: str, port: int, *, option: str, credentials: grpc.ServerCredentials | None = None
) -> int:
    """Bind and return the port (0 = any free one). Raises ConfigError naming `option` if it is taken."""
    address = f"{host}:{port}"
    try:
        bound = srv.add_secure_port(address, credentials) if credentials else srv.add_insecure_port(address)
    except RuntimeError:
        bound = 0
    if not bound:
        raise errors.ConfigError(
            f"port {port} on {host} is in use or not allowed; choose another with {option} (0 = any free port)",
            reason="PORT_IN_USE",
            metadata={"port": str(port)},
        )
    return bound


class Identity:
    """Identity of this process for its peers: one per process, made in the composition root."""

    def __init__(self, spoken: Revisions = SPOKEN) -> None:
        self.boot_id = uuid.uuid4().hex
        self._spoken = spoken

    def message(self) -> common_pb2.PeerIdentity:
        """Wire form."""
        return common_pb2.PeerIdentity(
            protocol_revision=self._spoken.oldest,
            newest_revision=self._spoken.newest,
            build=VERSION,
            boot_id=self.boot_id,
        )

    def agree(self, peer: common_pb2.PeerIdentity, name: str) -> int:
        """The revision to speak with a peer, at which it arrives too. Raises FailedPrecondition, with both sides' revisions, if
        there is none.
        """
        theirs = revisions_of(peer)
        agreed = self._spoken.agreed(theirs)
        if agreed is None:
            raise errors.FailedPrecondition(
                f"{name} speaks protocol revision {theirs} (build {peer.build or 'unknown'}), this process {self._spoken} "
                f"(build {VERSION}); run releases next to each other",
                reason="PROTOCOL_REVISION",
                metadata={"theirs": str(theirs), "ours": str(self._spoken)},
            )
        return agreed


def revisions_of(peer: common_pb2.PeerIdentity) -> Revisions:
    """Those that a peer speaks; one only if it does not say which is the newest."""
    return Revisions(peer.protocol_revision, max(peer.protocol_revision, peer.newest_revision))


# --- errors ----------------------------------------------------------------------------------------------------------


def to_error_status(error: errors.QuireError) -> common_pb2.ErrorStatus:
    """Convert an error to a field of an internal message."""
    return common_pb2.ErrorStatus(
        status=error.status,
        reason=error.reason,
        message=error.message,
        metadata=error.metadata,
        field_violations=[
            common_pb2.FieldViolation(field=v.field, description=v.description) for v in error.violations
        ],
        retry_after_ns=int((error.retry_after_s or 0) * 1e9),
        resource_type=error.resource_type if isinstance(error, errors.NotFound) else "",
        resource_name=error.resource_name if isinstance(error, errors.NotFound) else "",
    )


def from_error_status(message: common_pb2.ErrorStatus) -> errors.QuireError:
    """Convert back from `to_error_status`."""
    cls = errors.from_status_name(message.status)
    resource: dict[str, Any] = {"resource_type": message.resource_type, "resource_name": message.resource_name}
    return cls(
        message.message,
        reason=message.reason,
        metadata=dict(message.metadata),
        violations=[errors.FieldViolation(v.field, v.description) for v in message.field_violations],
        retry_after_s=message.retry_after_ns / 1e9 if message.retry_after_ns else None,
        **(resource if issubclass(cls, errors.NotFound) else {}),
    )


def _detail(message: Any) -> any_pb2.Any:
    packed = any_pb2.Any()
    packed.Pack(message)
    return packed


def to_rich_status(error: errors.QuireError) -> status_pb2.Status:
    """google.rpc.Status with ErrorInfo, and BadRequest, RetryInfo, QuotaFailure or ResourceInfo where they apply."""
    numbers = {clip(name, 64): clip(value, VALUE_BYTES) for name, value in list(error.metadata.items())[:8]}
    details = [_detail(error_details_pb2.ErrorInfo(reason=error.reason, domain=ERROR_DOMAIN, metadata=numbers))]
    if error.violations:
        bad = error_details_pb2.BadRequest()
        texts = clip_all([v.description for v in error.violations], DESCRIPTION_BYTES)
        for v, text in zip(error.violations, texts, strict=True):
            bad.field_violations.add(field=clip(v.field, 100), description=text)
        details.append(_detail(bad))
    if error.retry_after_s is not None:
        delay = duration_pb2.Duration()
        delay.FromNanoseconds(int(error.retry_after_s * 1e9))
        details.append(_detail(error_details_pb2.RetryInfo(retry_delay=delay)))
    if error.quota is not None:
        failure = error_details_pb2.QuotaFailure()
        failure.violations.add(subject=error.quota.subject, description=error.quota.description)
        details.append(_detail(failure))
    if isinstance(error, errors.NotFound) and error.resource_type:
        kind, name = error.resource_type, clip(error.resource_name, NAME_BYTES)
        details.append(_detail(error_details_pb2.ResourceInfo(resource_type=kind, resource_name=name)))
    code = code_pb2.Code.Value(error.status)
    return status_pb2.Status(code=code, message=clip(error.message, MESSAGE_BYTES), details=details)


def hide(error: BaseException) -> errors.Internal:
    """Log an unexpected exception and return the Internal error for the client, with an id.

    The log has the traceback but not the exception's message (see `log_format`).
    """
    error_id = uuid.uuid4().hex[:12]
    log.error("internal error %s", error_id, exc_info=error)
    return errors.Internal(f"internal error {error_id}", reason="INTERNAL", metadata={"error_id": error_id})


async def abort(context: grpc.aio.ServicerContext[Any, Any], error: BaseException) -> None:
    """End the call with the error's status and details; anything but a QuireError becomes INTERNAL with an id."""
    known = error if isinstance(error, errors.QuireError) else hide(error)
    status: Any = rpc_status.to_status(to_rich_status(known))
    final = status._replace(trailing_metadata=(*status.trailing_metadata, _FINAL, *_plain_details(known)))
    try:
        async with asyncio.timeout(_UNREAD_STATUS_S):
            await context.abort_with_status(final)  # type: ignore[attr-defined]
    except (grpc.aio.InternalError, TimeoutError):
        raise asyncio.CancelledError from None  # the client disconnected meanwhile, or has not read yet


def _plain_details(error: errors.QuireError) -> list[tuple[str, str]]:
    """Reason and retry time as text trailers, for clients in languages without google.rpc.Status."""
    retry_ms = [] if error.retry_after_s is None else [("x-retry-after-ms", str(int(1_000 * error.retry_after_s)))]
    return [("x-error-reason", error.reason), *retry_ms]


class errors_to_status:
    """Context around a handler's body that ends the call by `abort` on an exception. Cancellation passes through."""

    __slots__ = ("_context",)

    def __init__(self, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        self._context = context

    async def __aenter__(self) -> None:
        """No-op."""

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if isinstance(error, Exception) and not isinstance(error, grpc.aio.AbortError):
            await abort(self._context, error)


def from_rpc_error(error: grpc.RpcError) -> errors.QuireError:
    """Return the error that `abort` sent, or the transport's own status as the class of that name."""
    status = _status_of(error)
    code = error.code() if hasattr(error, "code") else grpc.StatusCode.UNKNOWN
    cls = errors.from_status_name(code.name)
    details = (error.details() if hasattr(error, "details") else "") or str(code.name)
    if status is None:
        return cls(details)
    return _with_details(cls, status)


def is_from_peer(error: grpc.RpcError) -> bool:
    """True if the peer sent the error (`abort`).

    Otherwise the transport did, which may report a torn connection as INTERNAL.
    """
    return _status_of(error) is not None


def _status_of(error: grpc.RpcError) -> status_pb2.Status | None:
    pairs: Any = error.trailing_metadata() if hasattr(error, "trailing_metadata") else ()
    raw = {key: value for key, value in pairs or ()}.get("grpc-status-details-bin")
    return status_pb2.Status.FromString(raw) if raw else None


def _with_details(cls: type[errors.QuireError], status: status_pb2.Status) -> errors.QuireError:
    info, bad, retry = error_details_pb2.ErrorInfo(), error_details_pb2.BadRequest(), error_details_pb2.RetryInfo()
    resource, quota = error_details_pb2.ResourceInfo(), error_details_pb2.QuotaFailure()
    for detail in status.details:
        for message in (info, bad, retry, resource, quota):
            if detail.Is(message.DESCRIPTOR):
                detail.Unpack(message)
    details: dict[str, Any] = {
        "reason": info.reason,
        "metadata": dict(info.metadata),
        "violations": [errors.FieldViolation(v.field, v.description) for v in bad.field_violations],
        "retry_after_s": retry.retry_delay.ToNanoseconds() / 1e9 if retry.HasField("retry_delay") else None,
        "quota": next((errors.QuotaViolation(v.subject, v.description) for v in quota.violations), None),
    }
    if issubclass(cls, errors.NotFound):
        details |= {"resource_type": resource.resource_type, "resource_name": resource.resource_name}
    return cls(status.message, **details)
