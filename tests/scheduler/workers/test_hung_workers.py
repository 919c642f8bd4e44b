"""What is a hang and what is not: a partition is noticed in seconds, a long step never."""

import asyncio
import ctypes
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from protos.worker.v1 import worker_pb2
from quire_tools.simulated_worker.engine import SimulatedEngine
from quire_tools.simulated_worker.settings import SimulatedWorkerSettings
from tests.support.services.harness import Admin, Gateway, eventually, run_async, scheduler, worker
from tests.support.services.proxy import proxy
from worker_svc.app import serve_engine

pytestmark = pytest.mark.hangs

ROOT = Path(__file__).parents[3]
LONG_STEP_S = 3.0
NOTICED_S = 5.0
"""Half of it is promised; machines that run tests are busy."""


class LongStepEngine(SimulatedEngine):
    """Its sixth step takes long, in a C call that keeps the interpreter to itself: no Python code of the process runs meanwhile."""

    num_steps = 0

    def execute(self, outputs: worker_pb2.SchedulerOutputs) -> worker_pb2.WorkerOutputs:
        self.num_steps += 1
        if self.num_steps == 6:
            ctypes.PyDLL(None).usleep(int(1e6 * LONG_STEP_S))
        return super().execute(outputs)


def serve_long_steps() -> None:
    """A worker process with that engine; prints its address."""
    settings = SimulatedWorkerSettings()
    asyncio.run(
        serve_engine(settings, lambda: LongStepEngine(settings), on_ready=lambda address: print(address, flush=True))
    )


@run_async
async def test_a_long_step_is_no_hang() -> None:
    """Longer than it takes to notice a dead peer, and the engine lets nothing else run: pings are answered all the same."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "tests.scheduler.workers.test_hung_workers"),
        cwd=ROOT,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
    )
    try:
        assert process.stdout is not None
        address = (await process.stdout.readline()).decode().strip()
        async with scheduler(address) as (door, admin_address), Gateway(door) as gateway, Admin(admin_address) as admin:
            await eventually(lambda: gateway.states[-1].serving, "a worker is ready")
            begin = time.monotonic()
            output = await gateway.end_of(await gateway.submit([5, 6, 7], max_tokens=20))
            assert len(output.tokens) == 20 and time.monotonic() - begin > LONG_STEP_S
            assert all(state.serving or "lost" not in state.reason for state in gateway.states)
            steps = await admin.steps()
            assert {step.epoch for step in steps} == {1} and not any(step.error for step in steps)
    finally:
        process.kill()
        await process.communicate()


class SlowEngine(SimulatedEngine):
    """The largest step takes 0.3 s, as its profile finds out, and the sixth 1 s."""

    num_steps = 0

    def profile(self, max_num_batched_tokens: int, max_num_seqs: int) -> worker_pb2.ProfileCacheResponse:
        time.sleep(0.3)
        return super().profile(max_num_batched_tokens, max_num_seqs)

    def execute(self, outputs: worker_pb2.SchedulerOutputs) -> worker_pb2.WorkerOutputs:
        self.num_steps += 1
        time.sleep(self.num_steps == 6)
        return super().execute(outputs)


@run_async
async def test_patience_is_many_times_the_slowest_step() -> None:
    """`step_timeout_s` is the least that is waited; steps that are slow by nature are waited for longer."""
    async with (
        worker(SlowEngine) as (address,),
        scheduler(address, step_timeout_s=0.2) as (door, _),
        Gateway(door) as gateway,
    ):
        await eventually(lambda: gateway.states[-1].serving, "a worker is ready")
        output = await gateway.end_of(await gateway.submit([5, 6, 7], max_tokens=20))
        assert len(output.tokens) == 20
        assert not any("no result" in state.reason for state in gateway.states)


@run_async
async def test_a_partition_is_noticed_and_healed(record_property: Callable[[str, object], None]) -> None:
    """No byte comes through, and no end of the connection either: not serving in seconds; healed, the stream goes on."""
    async with (
        worker(time_scale=1.0, step_base_s=0.004) as (address,),
        proxy(address) as link,
        scheduler(link.address) as (door, admin_address),
        Gateway(door) as gateway,
        Admin(admin_address) as admin,
    ):
        await eventually(lambda: gateway.states[-1].serving, "a worker is ready")
        expected = (await gateway.end_of(await gateway.submit([5, 6, 7], max_tokens=100))).tokens
        handle = await gateway.submit([5, 6, 7], max_tokens=100)
        await gateway.tokens_of(handle, 20)
        link.hold()
        begin = time.monotonic()
        await eventually(lambda: not gateway.states[-1].serving, "not serving")
        noticed_s = time.monotonic() - begin
        await asyncio.sleep(0.5)
        link.release()
        assert (await gateway.end_of(handle)).tokens == expected
        assert noticed_s < NOTICED_S
        await admin.assert_all_free()
    record_property("size", f"a partition was noticed after {noticed_s:.2f} s")


if __name__ == "__main__":
    serve_long_steps()
