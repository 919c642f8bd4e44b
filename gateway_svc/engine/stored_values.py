"""Values that the scheduler keeps for this gateway and any other (`scheduler_svc.gateways.value_store`)."""

import logging

import grpc
import grpc.aio

from protos.engine.v1 import engine_pb2, engine_pb2_grpc
from svc_common.errors import QuireError, Unavailable
from svc_common.net import rpc

log = logging.getLogger(__name__)

TIMEOUT_S = 5.0
RETRY_AFTER_S = 1.0


class StoredValues:
    """Values by tenant and key. A call waits up to 5 s for a scheduler that is being restarted."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self._stub = engine_pb2_grpc.EngineServiceStub(channel)

    async def put(self, tenant: str, key: str, value: bytes) -> bool:
        """Store a value. False: there is no room for it, or the scheduler did not answer, which is logged."""
        request = engine_pb2.PutValueRequest(tenant=tenant, key=key, value=value)
        try:
            return (await self._stub.PutValue(request, timeout=TIMEOUT_S, wait_for_ready=True)).kept
        except grpc.aio.AioRpcError as error:
            log.warning("a value of %d bytes could not be stored: %s", len(value), rpc.from_rpc_error(error))
            return False

    async def get(self, tenant: str, key: str) -> bytes | None:
        """Return a value; None = there is none, or no longer. Raises Unavailable if the scheduler does not answer."""
        request = engine_pb2.GetValueRequest(tenant=tenant, key=key)
        try:
            found = await self._stub.GetValue(request, timeout=TIMEOUT_S, wait_for_ready=True)
        except grpc.aio.AioRpcError as error:
            raise _away(error) from None
        return found.value if found.HasField("value") else None

    async def delete(self, tenant: str, key: str) -> bool:
        """Drop a value. False: there was none. Raises Unavailable if the scheduler does not answer."""
        request = engine_pb2.DeleteValueRequest(tenant=tenant, key=key)
        try:
            return (await self._stub.DeleteValue(request, timeout=TIMEOUT_S, wait_for_ready=True)).deleted
        except grpc.aio.AioRpcError as error:
            raise _away(error) from None


def _away(error: grpc.aio.AioRpcError) -> QuireError:
    return Unavailable(
        f"stored responses cannot be reached: {rpc.from_rpc_error(error)}",
        reason="SCHEDULER_AWAY",
        retry_after_s=RETRY_AFTER_S,
    )
