"""Errors of calls as people meet them: the typed error that the service sent, or what to do when nobody listens."""

import contextlib
from collections.abc import Iterator

import grpc

from svc_common import rpc
from svc_common.errors import QuireError, Unavailable

_CONNECT_FAILURES = ("failed to connect", "connection refused", "dns resolution failed", "name resolution")


@contextlib.contextmanager
def typed_errors(target: str, what: str) -> Iterator[None]:
    """Turns gRPC errors into QuireErrors. `what` listens at `target` ("gateway"), for the message when nobody does."""
    try:
        yield
    except grpc.RpcError as error:
        raise _explained(rpc.from_rpc_error(error), target, what) from None


def _explained(error: QuireError, target: str, what: str) -> QuireError:
    if not isinstance(error, Unavailable) or not any(text in error.message.lower() for text in _CONNECT_FAILURES):
        return error
    return Unavailable(
        f"no {what} answers at {target}; start one with `quire up`, or give the address that it printed",
        reason="CONNECT_FAILED",
        metadata={"target": target},
    )
