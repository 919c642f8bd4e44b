"""Order of one step in the running scheduler without overlap: plan, execute, what ended meanwhile, result; one after the other."""

import asyncio
import threading

import pytest

from protos.engine.v1 import engine_pb2
from quire_tools.simulated_worker.engine import SimulatedEngine
from scheduler_svc.core.scheduler import Scheduler
from tests.support.services.harness import Gateway, eventually, run_async, scheduler, worker

PROMPT = [5, 6, 7, 8]


class Held(SimulatedEngine):
    """Executes a step when it is let. One of them at a time: class attributes are made anew for each test."""

    log: list[str]
    gate: threading.Semaphore

    def execute(self, outputs):
        self.log.append("execute")
        assert self.gate.acquire(timeout=20)
        result = super().execute(outputs)
        self.log.append("executed")
        return result


@pytest.fixture
def held(monkeypatch):
    made = type("HeldHere", (Held,), {"log": [], "gate": threading.Semaphore(0)})
    for name in ("schedule", "update", "abort"):
        call = getattr(Scheduler, name)

        def noted(core, *args, call=call, name=name):
            if name != "abort" or list(args[0]):
                made.log.append(name)
            return call(core, *args)

        monkeypatch.setattr(Scheduler, name, noted)
    return made


@run_async
async def test_the_plain_loop_takes_one_thing_after_the_other(held) -> None:
    """R145: nothing without requests; schedule, execute, wait, aborts, update; only then the next plan, with new requests."""
    async with worker(held) as (at,), scheduler(at, overlap=False) as (address, _), Gateway(address) as gateway:
        await asyncio.sleep(0.1)
        assert held.log == []
        submits = [gateway.make_submit(PROMPT, max_tokens=3) for _ in range(2)]
        first, second = (submit.handle for submit in submits)
        await gateway.send(submits=submits)
        await eventually(lambda: held.log == ["schedule", "execute"], "the first step")
        third = await gateway.submit(PROMPT, max_tokens=1)
        await gateway.send(cancels=[engine_pb2.Cancel(handle=second)])
        await asyncio.sleep(0.1)
        assert held.log == ["schedule", "execute"], "nothing is planned while a step runs"
        held.gate.release()
        await eventually(lambda: held.log.count("execute") == 2, "the second step")
        assert held.log == ["schedule", "execute", "executed", "abort", "update", "schedule", "execute"]
        assert gateway.outputs[second].tokens == []
        for _ in range(8):
            held.gate.release()
        assert len((await gateway.end_of(first)).tokens) == 3
        assert len((await gateway.end_of(third)).tokens) == 1
        assert (await gateway.end_of(second)).tokens == []
        await eventually(lambda: held.log.count("executed") == 4, "the plan by which the worker forgets the last row")
        await asyncio.sleep(0.1)
        assert held.log.count("executed") == 4, "nothing more is executed when all is over"


@run_async
@pytest.mark.parametrize(
    ("device", "overlap", "most"), [("cpu", None, 1), ("cuda", None, 2), ("cpu", True, 2), ("cuda", False, 1)]
)
async def test_steps_overlap_where_the_worker_has_a_device_of_its_own(held, device, overlap, most) -> None:
    """Decision 0015: a CPU's worker gets its next plan after the result, others before; what the operator says counts more."""
    made = type("OnDevice", (held,), {"device": device, "__setattr__": _keep_device})
    async with worker(made) as (at,), scheduler(at, overlap=overlap) as (address, _), Gateway(address) as gateway:
        handle = await gateway.submit(PROMPT, max_tokens=4)
        await eventually(lambda: made.log.count("execute") == 1, "the first step runs")
        if most == 2:
            await eventually(lambda: made.log.count("schedule") == 2, "the second is planned meanwhile")
        else:
            await asyncio.sleep(0.1)
        assert made.log.count("schedule") == most
        for _ in range(8):
            made.gate.release()
        assert len((await gateway.end_of(handle)).tokens) == 4


def _keep_device(engine, name, value) -> None:
    """The simulated engine says "simulated" of itself; here it is what the class says."""
    if name != "device":
        object.__setattr__(engine, name, value)
