"""Lab source for a running stack: queries the scheduler's admin API through the relay's channel."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from typing import Any

import grpc
import grpc.aio

from gateway_svc.lab import translation
from gateway_svc.lab.source import LIVE, MAX_LISTED, About, LabSnapshot, Step, Tell, Why
from gateway_svc.lab.tables import TableChanges
from gateway_svc.lab.translation import RUNNING, PoolSizes
from protos.inference.v1 import admin_pb2 as pb
from protos.inference.v1 import admin_pb2_grpc
from svc_common.net import rpc
from svc_common.version import VERSION

SNAPSHOT_S = 0.4
NUM_STEPS_AT_FIRST = 120
MOST_STEPS_BEHIND = 2_000
_TIMEOUT_S = 10.0
_NEEDS_TIMEOUT_S = 60.0

Connected = Callable[[], Awaitable[grpc.aio.Channel]]


class LiveLabSource:
    """Live LabSource. `connected()`: a channel to the scheduler's AdminService; raises Unavailable if there is none."""

    def __init__(self, connected: Connected, *, title: str, can_generate: bool) -> None:
        self._connected = connected
        self._about = About(LIVE, title, VERSION, can_generate)

    async def about(self) -> About:
        """Describe the source."""
        return self._about

    async def steps(self, since: int, limit: int) -> list[Step]:
        """Return completed steps; see LabSource."""
        found: list[Step] = []
        changes = TableChanges()
        async with self._watch(since, follow=False) as reports:
            async for report in reports:
                found.append(translation.step(report, changes.to(translation.tables(report)), None))
                if len(found) >= limit:
                    break
        return found

    async def follow(self, since: int, tell: Tell) -> None:
        """Follow the scheduler; see LabSource."""
        first = await self._snapshot()
        oldest = first.step - (MOST_STEPS_BEHIND if since else NUM_STEPS_AT_FIRST)
        pools = PoolSizes(first.block_size, first.pools)
        await _together(self._tell_steps(max(1, since, oldest), pools, tell), self._tell_while_idle(pools, tell))

    async def why(self, request_id: str, tenant: str, *, needs: bool) -> Why:
        """Explain a request; see LabSource."""
        request = pb.ExplainRequestRequest(request_id=request_id, tenant=tenant, needs=needs)
        timeout_s = _NEEDS_TIMEOUT_S if needs else _TIMEOUT_S
        async with _known_errors():
            return translation.why(await (await self._stub()).ExplainRequest(request, timeout=timeout_s))
        raise AssertionError("an error ends the call")

    # --- following ---------------------------------------------------------------------------------------------------

    async def _tell_steps(self, since: int, pools: PoolSizes, tell: Tell) -> None:
        """Send each step with queues, reasons and cached blocks right after its plan.

        Steps planned before this call lack those.
        """
        changes = TableChanges()
        async with self._watch(since, follow=True) as reports:
            async for report in reports:
                state = translation.state(report, pools) if report.HasField("state") else None
                await tell(translation.step(report, changes.to(translation.tables(report)), state))

    async def _tell_while_idle(self, pools: PoolSizes, tell: Tell) -> None:
        """Poll for changes that no step reports: requests that wait while none runs, and changed pool sizes.

        While requests run, steps report the state. An unchanged state is not sent again.
        """
        last: LabSnapshot | None = None
        while True:
            snapshot = await self._snapshot()
            pools.block_size, pools.pools = snapshot.block_size, snapshot.pools
            if snapshot != last and not any(count.queue == RUNNING for count in snapshot.reasons):
                await tell(snapshot)
                last = snapshot
            await asyncio.sleep(SNAPSHOT_S)

    async def _snapshot(self) -> LabSnapshot:
        """Blocks and queues at one instant."""
        async with _known_errors():
            stub = await self._stub()
            blocks, workers = await asyncio.gather(
                stub.GetBlocks(pb.GetBlocksRequest(cached=True, max_requests=MAX_LISTED), timeout=_TIMEOUT_S),
                stub.ListWorkers(pb.ListWorkersRequest(), timeout=_TIMEOUT_S),
            )
            return translation.snapshot(blocks, workers)
        raise AssertionError("an error ends the call")

    # --- calls to the scheduler --------------------------------------------------------------------------------------

    @contextlib.asynccontextmanager
    async def _watch(self, since: int, *, follow: bool) -> AsyncIterator[Any]:
        """Context of a call that streams steps with their tables and states."""
        request = pb.WatchSchedulerRequest(since_step=since, follow=follow, tables=True, state=True)
        async with _known_errors():
            call = (await self._stub()).WatchScheduler(request)
            try:
                yield call
            finally:
                call.cancel()

    async def _stub(self) -> Any:
        return admin_pb2_grpc.AdminServiceStub(await self._connected())  # type: ignore[no-untyped-call]


@contextlib.asynccontextmanager
async def _known_errors() -> AsyncIterator[None]:
    """Pass the scheduler's error on unchanged."""
    try:
        yield
    except grpc.aio.AioRpcError as error:
        raise rpc.from_rpc_error(error) from None


async def _together(*works: Coroutine[Any, Any, None]) -> None:
    """Run until one of them fails or the caller is cancelled, then cancel all."""
    tasks = [asyncio.ensure_future(work) for work in works]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
