"""P2 on a real stack: the scheduler is killed in the middle of a stream and started again; the stream goes on (design.md 8)."""

import asyncio
import contextlib
import sys
from collections.abc import AsyncIterator

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


@asynchronous
async def test_a_stream_survives_the_death_of_the_scheduler() -> None:
    """kill -9 and a restart: every token exactly once, the same as in an undisturbed run, and no error."""
    request = pb.GenerateRequest(
        text="hello", sampling=pb.SamplingParams(seed=11), stop=pb.StopConditions(max_tokens=300)
    )
    async with simulated_worker() as worker:
        scheduler, address = await start_scheduler(worker, "0")
        try:
            async with gateway(address) as running, grpc.aio.insecure_channel(running.grpc) as channel:
                stub = inference_pb2_grpc.InferenceServiceStub(channel)
                undisturbed = await stub.Generate(request, timeout=20)
                ids: list[int] = []
                killed = False
                async for event in stub.GenerateStream(request, timeout=25):
                    if event.HasField("delta"):
                        assert event.delta.token_offset == len(ids)
                        ids += event.delta.token_ids
                    if len(ids) > 50 and not killed:
                        killed = True
                        scheduler.kill()
                        await scheduler.wait()
                        scheduler, _ = await start_scheduler(worker, address.rpartition(":")[2])
        finally:
            if scheduler.returncode is None:
                scheduler.terminate()
            await scheduler.communicate()
    assert killed
    assert ids == list(undisturbed.choices[0].token_ids)
    assert event.usage.completion_tokens == 300
