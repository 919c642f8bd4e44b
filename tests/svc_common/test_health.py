"""Health of a process while it serves and while it drains, as a caller sees it."""

import asyncio

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from svc_common.net import rpc
from svc_common.net.health import LIVENESS, ServiceHealth

_STATUS = health_pb2.HealthCheckResponse.ServingStatus


async def _seen(stub: health_pb2_grpc.HealthStub, *names: str) -> list[str]:
    async def status(name: str) -> str:
        try:
            answer = await stub.Check(health_pb2.HealthCheckRequest(service=name))
        except grpc.aio.AioRpcError as error:
            return error.code().name
        return _STATUS.Name(answer.status)

    return [await status(name) for name in names]


async def _test() -> None:
    health, server = ServiceHealth(), rpc.server()
    health_pb2_grpc.add_HealthServicer_to_server(health.servicer, server)
    port = rpc.bind(server, "127.0.0.1", 0, option="--port")
    await server.start()
    async with rpc.channel(f"127.0.0.1:{port}") as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        assert await _seen(stub, LIVENESS) == ["NOT_FOUND"]
        await health.start()
        await health.set(("", "a", LIVENESS), serving=False)
        assert await _seen(stub, LIVENESS, "", "a") == ["SERVING", "NOT_SERVING", "NOT_SERVING"]
        await health.set(("", "b"), serving=True)
        assert await _seen(stub, LIVENESS, "", "a", "b") == ["SERVING", "SERVING", "SERVICE_UNKNOWN", "SERVING"]
        await health.drain()
        await health.set(("", "b"), serving=True)
        assert await _seen(stub, LIVENESS, "", "b") == ["SERVING", "NOT_SERVING", "NOT_SERVING"]
    await server.stop(0)


def test_liveness_stays_while_a_service_drains() -> None:
    """A supervisor that restarts what is not live would cut off the requests that the drain is for."""
    asyncio.run(asyncio.wait_for(_test(), 60))
