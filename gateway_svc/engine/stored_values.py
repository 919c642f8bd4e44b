"""Values that the scheduler keeps for this gateway and any other (`scheduler_svc.requests.value_store`)."""

import asyncio
import logging
from collections.abc import Callable
from typing import Any

import grpc
import grpc.aio

from protos.engine.v1 import engine_pb2, engine_pb2_grpc
from svc_common.clock import NS_PER_S, monotonic_ns
from svc_common.errors import Unavailable
from svc_common.net import rpc

log = logging.getLogger(__name__)

TIMEOUT_S = 5.0
MIN_TIMEOUT_S = 0.1
PAUSE_S = 0.05
RETRY_AFTER_S = 1.0


class StoredValues:
    """Values by tenant and key. A call waits up to 5 s for a scheduler that is being restarted."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self._stub = engine_pb2_grpc.EngineServiceStub(channel)  # type: ignore[no-untyped-call]

    async def put(self, tenant: str, key: str, value: bytes) -> bool:
        """Store a value. False: there is no room for it, or the scheduler did not answer, which is logged."""
        request = engine_pb2.PutValueRequest(tenant=tenant, key=key, value=value)
        try:
            return bool((await _answer(self._stub.PutValue, request)).kept)
        except Unavailable as error:
            log.warning("a value of %d bytes could not be stored: %s", len(value), error)
            return False

    async def get(self, tenant: str, key: str) -> bytes | None:
        """Return a value; None = there is none, or no longer. Raises Unavailable if the scheduler does not answer."""
        found = await _answer(self._stub.GetValue, engine_pb2.GetValueRequest(tenant=tenant, key=key))
        return found.value if found.HasField("value") else None

    async def delete(self, tenant: str, key: str) -> bool:
        """Drop a value. False: there was none. Raises Unavailable if the scheduler does not answer."""
        request = engine_pb2.DeleteValueRequest(tenant=tenant, key=key)
        return bool((await _answer(self._stub.DeleteValue, request)).deleted)


async def _answer(method: Callable[..., Any], request: object) -> Any:
    """Call until there is an answer or time is up: a connection may break as the scheduler ends."""
    until_ns = monotonic_ns() + int(TIMEOUT_S * NS_PER_S)
    while True:
        remaining_s = (until_ns - monotonic_ns()) / NS_PER_S
        try:
            return await method(request, timeout=max(remaining_s, MIN_TIMEOUT_S), wait_for_ready=True)
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.UNAVAILABLE and remaining_s > 0:
                await asyncio.sleep(PAUSE_S)
                continue
            problem = rpc.from_rpc_error(error)
        raise Unavailable(
            f"stored responses cannot be reached: {problem}", reason="SCHEDULER_AWAY", retry_after_s=RETRY_AFTER_S
        )
