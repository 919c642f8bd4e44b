"""P2 on a real stack: the scheduler is killed in the middle of a stream and started again; the stream goes on (design.md 8)."""

import asyncio
import contextlib
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc.aio

from protos.inference.v1 import inference_pb2 as pb
from protos.inference.v1 import inference_pb2_grpc
from tests.gateway.scripted_engine import asynchronous, gateway
from worker_svc import app as worker_app
from worker_svc.settings import SimulatedWorkerSettings


@contextlib.asynccontextmanager
async def simulated_worker() -> AsyncIterator[str]:
    """In this process, with a short lease so that the next scheduler need not wait."""
    ready: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    stop = asyncio.Event()
    settings = SimulatedWorkerSettings(owner_lease_s=0.1)
    task = asyncio.create_task(worker_app.serve_simulated(settings, on_ready=ready.set_result, stop=stop))
    try:
        yield await ready
    finally:
        stop.set()
        await task


async def start_scheduler(worker: str, port: str) -> tuple[asyncio.subprocess.Process, str]:
    """A scheduler process and its address."""
    command = ("-m", "quire", "serve", "scheduler", "--worker", worker, "--port", port, "--admin-port", "0")
    process = await asyncio.create_subprocess_exec(sys.executable, *command, stdout=asyncio.subprocess.PIPE)
    assert process.stdout is not None
    while b"address=" not in (line := await process.stdout.readline()):
        assert line, "the scheduler ended"
    return process, line.decode().split("address=")[1].strip()


def request(max_tokens: int, **sampling: int) -> pb.GenerateRequest:
    made = pb.GenerateRequest(text="hello", sampling=pb.SamplingParams(seed=11, **sampling))
    made.stop.max_tokens = max_tokens
    return made


async def read(call: Any, on_tokens: Callable[[int], Awaitable[None]]) -> tuple[list[list[int]], int]:
    """Tokens of each choice, each exactly once, and usage; `on_tokens` hears of each delta how many tokens there are."""
    ids: dict[int, list[int]] = {}
    async for event in call:
        if event.HasField("delta"):
            mine = ids.setdefault(event.delta.choice, [])
            assert event.delta.token_offset == len(mine)
            mine += event.delta.token_ids
            await on_tokens(sum(map(len, ids.values())))
    return [ids[choice] for choice in sorted(ids)], event.usage.completion_tokens


@asynchronous
async def test_streams_survive_the_death_of_the_scheduler() -> None:
    """kill -9 and a restart: every token of every choice exactly once, as in an undisturbed run, and no error.

    R25: one choice, which goes on, and the best two of four, which start anew.
    """
    requests = [request(300), request(100, n=2, best_of=4)]
    killed = asyncio.Event()
    async with simulated_worker() as worker:
        scheduler, address = await start_scheduler(worker, "0")

        async def kill_once(num_tokens: int) -> None:
            nonlocal scheduler
            if num_tokens > 50 and not killed.is_set():
                killed.set()
                scheduler.kill()
                await scheduler.wait()
                scheduler, _ = await start_scheduler(worker, address.rpartition(":")[2])

        async def listen(num_tokens: int) -> None:
            pass

        try:
            async with gateway(address) as running, grpc.aio.insecure_channel(running.grpc) as channel:
                stub = inference_pb2_grpc.InferenceServiceStub(channel)
                undisturbed = await asyncio.gather(*(stub.Generate(one, timeout=20) for one in requests))
                listeners = [kill_once, listen]
                calls = [stub.GenerateStream(one, timeout=25) for one in requests]
                found = await asyncio.gather(*map(read, calls, listeners))
        finally:
            if scheduler.returncode is None:
                scheduler.terminate()
            await scheduler.communicate()
    assert killed.is_set()
    expected = [[list(choice.token_ids) for choice in answer.choices] for answer in undisturbed]
    assert [ids for ids, _ in found] == expected
    assert [num_tokens for _, num_tokens in found] == [300, 200]
