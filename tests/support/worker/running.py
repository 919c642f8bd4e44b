"""A simulated worker in this process, reached by real gRPC."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass

import grpc.aio

from protos.worker.v1 import worker_pb2, worker_pb2_grpc
from quire_tools.simulated_worker.engine import SimulatedEngine
from quire_tools.simulated_worker.settings import SimulatedWorkerSettings
from svc_common.net import rpc
from worker_svc import app
from worker_svc.engine import Engine


@dataclass(slots=True)
class RunningWorker:
    """A worker that listens, and a stub to it."""

    address: str
    channel: grpc.aio.Channel
    stub: worker_pb2_grpc.WorkerServiceStub
    stop: asyncio.Event
    task: asyncio.Task[None]
    budgets: list[str]

    async def make_ready(self, num_gpu_blocks: int = 64, num_cpu_blocks: int = 16) -> worker_pb2.LoadModelResponse:
        """Load, profile, allocate; returns the load's last message."""
        last = [part async for part in self.stub.LoadModel(worker_pb2.LoadModelRequest())][-1]
        await self.stub.ProfileCache(worker_pb2.ProfileCacheRequest(max_num_batched_tokens=512, max_num_seqs=64))
        await self.stub.AllocateCache(
            worker_pb2.AllocateCacheRequest(num_gpu_blocks=num_gpu_blocks, num_cpu_blocks=num_cpu_blocks)
        )
        return last

    async def stop_now(self) -> None:
        self.stop.set()
        await asyncio.wait_for(self.task, 40)


def fast(**values: object) -> SimulatedWorkerSettings:
    """Settings of a simulated worker that never waits."""
    defaults = {"time_scale": 0, "num_gpu_blocks": 64, "num_cpu_blocks": 16, "block_size": 4, "max_model_len": 128}
    return SimulatedWorkerSettings.of(**(defaults | values))


@contextlib.asynccontextmanager
async def running(
    settings: SimulatedWorkerSettings | None = None,
    make_engine: Callable[[SimulatedWorkerSettings], Engine] = SimulatedEngine,
) -> AsyncIterator[RunningWorker]:
    """A worker, stopped in order at the end."""
    settings = settings or fast()
    stop, listening, budgets = asyncio.Event(), asyncio.get_running_loop().create_future(), []
    task = asyncio.create_task(
        app.serve_engine(
            settings,
            lambda: make_engine(settings),
            on_ready=listening.set_result,
            watchers=app.Watchers(on_budget=budgets.append),
            stop=stop,
        )
    )
    await asyncio.wait([task, listening], return_when=asyncio.FIRST_COMPLETED)
    if task.done():
        task.result()
    address = await listening
    async with rpc.channel(address) as channel:
        worker = RunningWorker(address, channel, worker_pb2_grpc.WorkerServiceStub(channel), stop, task, budgets)
        try:
            yield worker
        finally:
            if not task.done():
                await worker.stop_now()
