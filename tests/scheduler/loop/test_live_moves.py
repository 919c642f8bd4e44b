"""A worker that is drained hands its sequences over to another one with their KV, while streams go on."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass

import pytest

from protos.inference.v1 import admin_pb2
from quire_tools.simulated_worker.engine import SimulatedEngine
from quire_tools.simulated_worker.settings import SimulatedWorkerSettings
from tests.support.services.harness import Admin, Gateway, once, run_async, scheduler, stack, worker
from tests.support.services.proxy import Proxy, proxy
from worker_svc.engine import Engine

SLOW = {"time_scale": 1.0, "step_base_s": 0.004, "num_gpu_blocks": 512}
PROMPTS = [[40 + i, *range(50, 80 + i)] for i in range(6)]
NUM_TOKENS = 60
Make = Callable[[SimulatedWorkerSettings], Engine]


class OddLayout(SimulatedEngine):
    """Its blocks are laid out in another way."""

    @property
    def cache_layout(self) -> str:
        return "odd"


class SlowReader(SimulatedEngine):
    """Takes its time to read blocks."""

    def read_blocks(self, blocks: Sequence[int]) -> memoryview:
        time.sleep(0.05)
        return super().read_blocks(blocks)


@dataclass(frozen=True)
class Workers:
    """Two simulated workers under one scheduler."""

    addresses: list[str]
    gateway: Gateway
    admin: Admin
    links: list[Proxy]

    async def drain(self, number: int, *, undo: bool = False) -> None:
        request = admin_pb2.DrainRequest(worker=self.addresses[number], move=not undo, undo=undo)
        await self.admin.stub.Drain(request)

    async def all_ready(self) -> None:
        """Wait until both run steps."""
        while not all(
            each.ready for each in (await self.admin.stub.ListWorkers(admin_pb2.ListWorkersRequest())).workers
        ):
            await asyncio.sleep(0.01)

    async def busiest(self) -> int:
        """Number of the worker on which most run: all may have started on the one that was ready first."""
        listed = (await self.admin.stub.ListWorkers(admin_pb2.ListWorkersRequest())).workers
        return max(range(len(listed)), key=lambda number: listed[number].num_running)

    async def empty(self, number: int) -> None:
        """Wait until nothing runs there."""
        while (await self.admin.stub.ListWorkers(admin_pb2.ListWorkersRequest())).workers[number].num_running:
            await asyncio.sleep(0.01)

    async def num_moves(self, handle: int) -> int:
        """How often a request moved, by its timeline."""
        answer = await self.admin.stub.ExplainRequest(admin_pb2.ExplainRequestRequest(request_id=f"gateway-1-{handle}"))
        return sum(episode.reason == "MOVED" for episode in answer.episodes)

    async def num_computed(self) -> int:
        """Tokens computed by all steps."""
        return sum(report.computed_tokens for report in await self.admin.steps())


@contextlib.asynccontextmanager
async def workers(
    policy: str = "quire", *, make_first: Make | None = None, make_second: Make | None = None, **values: float
) -> AsyncIterator[Workers]:
    """`make_first`, `make_second`: engines that differ; `values`: of all workers."""
    async with contextlib.AsyncExitStack() as exits:
        made = [
            await exits.enter_async_context(worker(make, **{**SLOW, **values})) for make in (make_first, make_second)
        ]
        links = [await exits.enter_async_context(proxy(address)) for (address,) in made]
        addresses = [link.address for link in links]
        address, admin_address = await exits.enter_async_context(scheduler(*addresses, policy=policy))
        admin = await exits.enter_async_context(Admin(admin_address))
        gateway = await exits.enter_async_context(Gateway(address))
        made_ready = Workers(addresses, gateway, admin, links)
        await made_ready.all_ready()
        yield made_ready


@once
async def undisturbed() -> list[list[int]]:
    async with stack({"num_gpu_blocks": 512}) as s:
        handles = await s.gateway.submit_all(PROMPTS, max_tokens=NUM_TOKENS)
        return [(await s.gateway.end_of(h)).tokens for h in handles]


@pytest.mark.parametrize("policy", ["quire", "vllm-v0", "vllm-v1", "vllm-v1-async"])
@run_async
async def test_all_go_on_at_the_other_worker(policy: str) -> None:
    """None is computed again: nothing is preempted, and the steps have as many prompt tokens as there are."""
    async with workers(policy) as w:
        handles = await w.gateway.submit_all(PROMPTS, max_tokens=NUM_TOKENS)
        for number in (0, 1, 0):
            for handle in handles:
                await w.gateway.tokens_of(handle, 5 + 10 * number)
            await w.drain(number)
            await w.empty(number)
            await w.drain(number, undo=True)
        ends = [await w.gateway.end_of(handle) for handle in handles]
        assert [end.tokens for end in ends] == await undisturbed()
        assert sum([await w.num_moves(handle) for handle in handles]) >= len(PROMPTS)
        assert await w.num_computed() == sum(len(prompt) + NUM_TOKENS - 1 for prompt in PROMPTS)
        await w.admin.assert_all_free()


@run_async
async def test_workers_that_cannot_exchange_blocks() -> None:
    """Their sequences are computed again, and streams go on with the same tokens."""
    async with workers(make_second=OddLayout, step_base_s=0.03) as w:
        handles = await w.gateway.submit_all(PROMPTS, max_tokens=NUM_TOKENS)
        for handle in handles:
            await w.gateway.tokens_of(handle, 5)
        left = await w.busiest()
        await w.drain(left)
        await w.empty(left)
        assert [(await w.gateway.end_of(handle)).tokens for handle in handles] == await undisturbed()
        assert sum([await w.num_moves(handle) for handle in handles]) == 0
        assert await w.num_computed() > sum(len(prompt) + NUM_TOKENS - 1 for prompt in PROMPTS)
        await w.admin.assert_all_free()


@pytest.mark.parametrize("lost", [0, 1], ids=["source", "target"])
@run_async
async def test_a_worker_is_lost_on_the_way(lost: int) -> None:
    """While blocks are fetched: what ran there is computed again, the rest goes on, and nothing is held for ever."""
    async with workers(make_first=SlowReader) as w:
        handles = await w.gateway.submit_all(PROMPTS, max_tokens=NUM_TOKENS)
        for handle in handles:
            await w.gateway.tokens_of(handle, 5)
        await w.drain(0)
        w.links[lost].cut()
        assert [(await w.gateway.end_of(handle)).tokens for handle in handles] == await undisturbed()
        await w.admin.assert_all_free()


@run_async
async def test_one_moves_before_it_would_be_preempted() -> None:
    """One of two workers has all sequences, and its blocks run out: some move to the other one, and none is preempted."""
    async with workers(num_gpu_blocks=34) as w:
        await w.drain(1)
        handles = await w.gateway.submit_all(PROMPTS, max_tokens=NUM_TOKENS)
        for handle in handles:
            await w.gateway.tokens_of(handle, 2)
        await w.drain(1, undo=True)
        assert [(await w.gateway.end_of(handle)).tokens for handle in handles] == await undisturbed()
        assert sum([await w.num_moves(handle) for handle in handles]) > 0
        assert not any(report.preempted for report in await w.admin.steps())
        await w.admin.assert_all_free()
