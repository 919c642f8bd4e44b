"""Errors of calls as people meet them: the typed error that the service sent, or what to do when nobody, or another, listens."""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import grpc

from svc_common import rpc
from svc_common.errors import Internal, QuireError, Unavailable, Unimplemented

_TLS_FAILURES = ("handshake failed", "verification check failed", "socket closed", "connection reset")
_CONNECT_FAILURES = ("failed to connect", "connection refused", "dns resolution failed", "name resolution")


@dataclass(frozen=True, slots=True)
class Door:
    """What a client wants to reach, and under which word `quire up` prints its address."""

    name: str
    printed_as: str


GATEWAY = Door("gateway", "grpc=")
ADMIN = Door("admin listener (operators' API)", "admin=")


@contextlib.contextmanager
def typed_errors(target: str, door: Door) -> Iterator[None]:
    """Turns gRPC errors into QuireErrors; the transport's own say what to do about `door`, which is wanted at `target`."""
    try:
        yield
    except grpc.RpcError as error:
        typed = rpc.from_rpc_error(error)
        raise (typed if _is_answer(error) else _explained(typed, target, door)) from None


def _is_answer(error: Any) -> bool:
    """Whether one of our services sent it: these add details, the transport never does."""
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
            f"what listens at {target} does not agree on encryption: say who signed its certificate and show one if it wants one "
            f"(--tls-ca, --tls-cert, --tls-key), or neither where it speaks plain text; {error.message}",
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
