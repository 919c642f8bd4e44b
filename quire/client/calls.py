"""Errors of client calls: the typed error that the service sent, or advice if another or no service answers."""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import grpc

from svc_common.errors import Internal, QuireError, Unavailable, Unimplemented
from svc_common.net import rpc

_TLS_FAILURES = ("handshake failed", "verification check failed", "socket closed", "connection reset")
_CONNECT_FAILURES = ("failed to connect", "connection refused", "dns resolution failed", "name resolution")


@dataclass(frozen=True, slots=True)
class Door:
    """A kind of listener that a client connects to, and the label under which `quire up` prints its address."""

    name: str
    printed_as: str


GATEWAY = Door("gateway", "grpc=")
ADMIN = Door("admin listener (admin API)", "admin=")


@contextlib.contextmanager
def typed_errors(target: str, door: Door) -> Iterator[None]:
    """Convert gRPC errors to QuireErrors.

    Transport errors say how to reach a listener of kind `door`, expected at `target`.
    """
    try:
        yield
    except grpc.RpcError as error:
        typed = rpc.from_rpc_error(error)
        raise (typed if _is_answer(error) else _explained(typed, target, door)) from None


def _is_answer(error: Any) -> bool:
    """True if a Quire service sent the error: services attach `grpc-status-details-bin`, the transport never does."""
    trailing = error.trailing_metadata() if hasattr(error, "trailing_metadata") else ()
    return any(key == "grpc-status-details-bin" for key, _ in trailing or ())


def _explained(error: QuireError, target: str, door: Door) -> QuireError:
    if isinstance(error, Unimplemented):
        return Unimplemented(
            f"what listens at {target} is no {door.name}; give the address that `quire up` prints as {door.printed_as}",
            reason="WRONG_LISTENER",
            metadata={"target": target},
        )
    said = error.message.lower() if isinstance(error, Unavailable | Internal) else ""
    if isinstance(error, Internal) and "rst_stream" in said:
        return Unavailable(f"the connection to the {door.name} at {target} was lost; {error.message}")
    if "failed to connect" in said and any(text in said for text in _TLS_FAILURES):
        return Unavailable(
            f"the server at {target} and this client disagree on TLS: give the CA of its certificate, and a "
            f"client certificate if required (--tls-ca, --tls-cert, --tls-key), or none of them if it serves plain "
            f"text; {error.message}",
            reason="TLS_FAILED",
            metadata={"target": target},
        )
    if any(text in said for text in _CONNECT_FAILURES):
        return Unavailable(
            f"no {door.name} answers at {target}; start one with `quire up`, or give the address that it prints as "
            f"{door.printed_as}",
            reason="CONNECT_FAILED",
            metadata={"target": target},
        )
    return error
