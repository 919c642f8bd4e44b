"""One HTTP/1.1 connection: uvicorn's, with deadlines for header and body, and strict about where a request ends.

uvicorn limits only idle connections. h11 limits a header only while it is incomplete, and accepts
Content-Length together with Transfer-Encoding, which RFC 9112, 6.1 treats as attempted request smuggling.
"""

import asyncio
import ipaddress
import json
import logging
from collections import Counter
from typing import Any

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from gateway_svc.http.errors import error_body, error_headers, http_status
from gateway_svc.request_ids import new_request_id
from gateway_svc.settings import HttpLimits
from svc_common.errors import DeadlineExceeded, InvalidArgument, QuireError, ResourceExhausted

log = logging.getLogger(__name__)
log.setLevel(logging.ERROR)  # uvicorn logs a warning for each malformed request

_RETRY_S = 1.0
_HEADER_TOO_LARGE = 431
_FIELD_OVERHEAD = len(b": \r\n")
_IPV6_SITE_BITS = 64


class PeerConnections:
    """Counts of open connections by peer address."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._open: Counter[str] = Counter()

    def enter(self, host: str) -> bool:
        """Count one more connection; False, without counting, if the peer has reached its limit."""
        peer = _peer_of(host)
        if self._open[peer] >= self._most:
            return False
        self._open[peer] += 1
        return True

    def leave(self, host: str) -> None:
        """Stop counting a connection that `enter` counted."""
        peer = _peer_of(host)
        self._open[peer] -= 1
        if not self._open[peer]:
            del self._open[peer]


def _peer_of(host: str) -> str:
    """Peer of an address; all addresses of one IPv6 /64, which one machine may own, are one peer."""
    if ":" not in host:
        return host
    address = int(ipaddress.IPv6Address(host.partition("%")[0]))
    return f"{address >> _IPV6_SITE_BITS:x}/{_IPV6_SITE_BITS}"


class BoundedConnection(H11Protocol):
    """Connection with limits.

    A late or malformed request is answered with an error object, and the connection closed.
    """

    def __init__(self, limits: HttpLimits, peers: PeerConnections, config: uvicorn.Config, **state: Any) -> None:
        super().__init__(config, **state)
        self.logger = log
        self.conn = self._parser = _StrictParser(limits.header_bytes)
        self._limits = limits
        self._peers = peers
        self._peer: str | None = None
        self._awaits: type | None = None
        self._deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Refuse the connection if its peer has too many."""
        super().connection_made(transport)
        host = self.client[0] if self.client else ""
        if self._peers.enter(host):
            self._peer = host
            self._watch()
        else:
            self._refuse(
                ResourceExhausted(
                    f"there are {self._limits.connections_per_peer} connections from this address, the most it may have; use "
                    "open ones again",
                    reason="TOO_MANY_CONNECTIONS",
                    retry_after_s=_RETRY_S,
                )
            )

    def connection_lost(self, exc: Exception | None) -> None:
        """Free the peer's place."""
        self._forget_deadline()
        if self._peer is not None:
            self._peers.leave(self._peer)
            self._peer = None
        super().connection_lost(exc)

    def handle_events(self) -> None:
        """Process received data, and set the deadline for what is missing."""
        super().handle_events()
        self._watch()

    def send_400_response(self, msg: str) -> None:
        """Answer that the request is malformed; called by uvicorn."""
        self._refuse(self._parser.refused_because())

    # --- deadlines ---------------------------------------------------------------------------------------------------

    def _watch(self) -> None:
        """Set one deadline for each header and each body; it does not move while pieces arrive."""
        awaits = self._missing()
        if awaits is self._awaits:
            return
        self._forget_deadline()
        self._awaits = awaits
        if awaits is not None:
            after = self._limits.body_s if awaits is h11.SEND_BODY else self._limits.header_s
            self._deadline = self.loop.call_later(after, self._late)

    def _missing(self) -> type | None:
        """Return IDLE for a missing header, SEND_BODY for a missing body.

        None: nothing is missing, or only the next request of an idle connection (uvicorn's limit).
        """
        state = self.conn.their_state
        if self.transport.is_closing() or state not in (h11.IDLE, h11.SEND_BODY):
            return None
        is_between_requests = state is h11.IDLE and self.cycle is not None and not self.conn.trailing_data[0]
        return None if is_between_requests else state

    def _late(self) -> None:
        if self._awaits is h11.IDLE and not self.conn.trailing_data[0]:
            self.transport.close()
            return
        part, seconds = ("header", self._limits.header_s) if self._awaits is h11.IDLE else ("body", self._limits.body_s)
        self._refuse(
            DeadlineExceeded(f"the request's {part} did not arrive within {seconds:g} s", reason="REQUEST_TOO_SLOW")
        )

    def _forget_deadline(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    # --- refusals ----------------------------------------------------------------------------------------------------

    def _refuse(self, error: QuireError) -> None:
        """Answer with the error unless a response has begun, and close the connection.

        A handler that waits for the body sees a disconnect.
        """
        self._forget_deadline()
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            self._write_error(error)
        if self.cycle is not None and not self.cycle.response_complete:
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        self.transport.close()

    def _write_error(self, error: QuireError) -> None:
        body = json.dumps(error_body(error)).encode()
        headers = {
            "content-type": "application/json",
            "content-length": str(len(body)),
            "connection": "close",
            "x-request-id": new_request_id(),
        }
        answer = h11.Response(status_code=http_status(error), headers=list((headers | error_headers(error)).items()))
        for event in (answer, h11.Data(data=body), h11.EndOfMessage()):
            self.transport.write(self.conn.send(event) or b"")


class _StrictParser(h11.Connection):
    """h11's parser, strict about ambiguous requests, and with a limit also for headers that arrive in one piece."""

    def __init__(self, header_bytes: int) -> None:
        super().__init__(h11.SERVER, header_bytes)
        self._header_bytes = header_bytes
        self._refused: h11.RemoteProtocolError | None = None

    def next_event(self) -> Any:
        """Return h11's next event.

        Raises RemoteProtocolError also for two lengths, HTTP/1.0 chunks and a long header.
        """
        try:
            event = super().next_event()
            if isinstance(event, h11.Request):
                self._check(event)
        except h11.RemoteProtocolError as error:
            self._refused = error
            raise
        return event

    def refused_because(self) -> InvalidArgument:
        """Error that describes the last malformed request."""
        if self._refused is not None and self._refused.error_status_hint == _HEADER_TOO_LARGE:
            return InvalidArgument(
                f"the request's header is larger than {self._header_bytes} bytes; send fewer or shorter fields",
                reason="HEADER_TOO_LARGE",
            )
        return InvalidArgument(f"this is no HTTP/1.1 request: {self._refused}", reason="MALFORMED_REQUEST")

    def _check(self, request: h11.Request) -> None:
        names, size = set(), len(request.target)
        for name, value in request.headers:
            names.add(name)
            size += len(name) + len(value) + _FIELD_OVERHEAD
        if b"transfer-encoding" in names and b"content-length" in names:
            raise h11.RemoteProtocolError("it has both Content-Length and Transfer-Encoding")
        if b"transfer-encoding" in names and request.http_version < b"1.1":
            raise h11.RemoteProtocolError("HTTP/1.0 has no Transfer-Encoding")
        if size > self._header_bytes:
            raise h11.RemoteProtocolError("the header is too large", error_status_hint=_HEADER_TOO_LARGE)
