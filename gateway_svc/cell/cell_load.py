"""Load of the cell: all workers of the gateway's scheduler, asked of it when it is needed here.

Endpoint pickers ask each endpoint many times per second (llm-d: every 50 ms), so one answer serves all calls
within 0.1 s.
"""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import grpc
import grpc.aio

from protos.inference.v1 import admin_pb2
from svc_common.clock import NS_PER_S, monotonic_ns
from svc_common.errors import QuireError, Unavailable
from svc_common.net import rpc

FRESH_S = 0.1
KEPT_S = 5.0
TIMEOUT_S = 1.0

_GET_LOAD = "/quire.inference.v1.AdminService/GetLoad"


@dataclass(frozen=True, slots=True)
class CellReading:
    """The load at `read_ns`, on this process's monotonic clock."""

    load: admin_pb2.GetLoadResponse
    read_ns: int

    @property
    def age_s(self) -> float:
        """Seconds since the scheduler was asked."""
        return (monotonic_ns() - self.read_ns) / NS_PER_S

    @property
    def num_waiting(self) -> int:
        """Requests that wait, those swapped out too."""
        return self.load.queues.waiting + self.load.queues.swapped

    @property
    def num_running(self) -> int:
        """Requests that run."""
        return self.load.queues.running

    @property
    def kv_usage(self) -> float:
        """Part of the device's blocks that running requests hold, 0..1; 0 before there are any."""
        pool = self.load.gpu
        return (pool.total - pool.free) / pool.total if pool.total else 0.0

    @property
    def hit_rate(self) -> float:
        """Part of the prompt tokens that the prefix cache had, since the scheduler started."""
        totals = self.load.totals
        return totals.hit_tokens / totals.queried_tokens if totals.queried_tokens else 0.0


class CellLoad:
    """Owner of the last answer. `connected()` returns the channel to the scheduler's AdminService or raises Unavailable."""

    def __init__(self, connected: Callable[[], Awaitable[grpc.aio.Channel]]) -> None:
        self._connected = connected
        self._last: CellReading | None = None
        self._error: QuireError = Unavailable("the scheduler does not answer", reason="SCHEDULER_AWAY")
        self._asking: asyncio.Task[None] | None = None

    async def read(self) -> CellReading:
        """The load, at most 0.1 s old; up to 5 s while the scheduler does not answer. After that raises Unavailable."""
        if self._last is None or self._last.age_s > FRESH_S:
            if self._asking is None:
                self._asking = asyncio.create_task(self._ask())
            await asyncio.wait({self._asking}, timeout=TIMEOUT_S)
        if self._last is None or self._last.age_s > KEPT_S:
            raise self._error
        return self._last

    async def _ask(self) -> None:
        asked_ns = monotonic_ns()
        try:
            channel = await self._connected()
            call = channel.unary_unary(_GET_LOAD, None, admin_pb2.GetLoadResponse.FromString)
            load = await call(admin_pb2.GetLoadRequest().SerializeToString(), timeout=TIMEOUT_S)
            self._last = CellReading(load, asked_ns)
        except grpc.aio.AioRpcError as error:
            self._error = rpc.from_rpc_error(error)
        except QuireError as error:
            self._error = error
        finally:
            self._asking = None
