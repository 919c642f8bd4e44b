"""Guard of a gRPC listener: every method of every service needs a known caller, except for the few listed here."""

from collections.abc import Callable, Mapping
from typing import Any

import grpc
import grpc.aio

from gateway_svc.calls import Caller, Callers
from svc_common.errors import PermissionDenied, QuireError
from svc_common.net import rpc

HEALTH = "/grpc.health.v1.Health/"
REFLECTION = ("/grpc.reflection.v1.ServerReflection/", "/grpc.reflection.v1alpha.ServerReflection/")
Check = Callable[[Caller, str], None]
"""Takes the caller and the method's path; raises if the caller may not call the method."""

FREE = frozenset(
    {
        "/quire.inference.v1.InferenceService/Cancel",
        "/vllm.grpc.engine.VllmEngine/Abort",
        "/openengine.v1.Control/Abort",
    }
)
"""Not counted: a caller over its quota must be able to cancel its running requests."""


def enter(caller: Caller, method: str) -> None:
    """Check for the clients' listener: count each call. Raises ResourceExhausted."""
    if method not in FREE:
        caller.terms.count_call()


def enter_as_admin(caller: Caller, method: str) -> None:
    """Check for the operators' listener. Raises PermissionDenied for keys not marked `admin`."""
    if not caller.is_admin:
        raise PermissionDenied(
            "this API key may not use the admin API; it takes one marked `admin = true` in the tenants file",
            reason="ADMIN_KEY_NEEDED",
        )


class GrpcGuard(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]
    """Identifies the caller of each call and lets `check(caller, method)` refuse it, before its message is read."""

    def __init__(self, callers: Callers, check: Check, *, open_reflection: bool) -> None:
        self._callers = callers
        self._check = check
        self._open = (HEALTH, *(REFLECTION if open_reflection else ()))

    async def intercept_service(self, continuation: Callable[..., Any], details: Any) -> Any:
        """Return the method's handler, or one that refuses."""
        if not details.method.startswith(self._open):
            try:
                self._check(self._callers.of(_metadata(details)), details.method)
            except QuireError as error:
                return _refusing(error)
        return await continuation(details)


def _metadata(details: Any) -> Mapping[str, str]:
    given = details.invocation_metadata or ()
    return {key: value for key, value in given if isinstance(value, str)}


def _refusing(error: QuireError) -> Any:
    """Handler for methods of all kinds that reads nothing and answers with the error."""

    async def refuse(messages: Any, context: Any) -> None:
        await rpc.abort(context, error)

    return grpc.stream_stream_rpc_method_handler(refuse)
