"""Steps whose results come later: launched while the device computes those before, answered in step order, waited for elsewhere."""

import asyncio
import threading
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any

import pytest

from protos.worker.v1 import worker_pb2
from quire_tools.simulated_worker.engine import SimulatedEngine
from svc_common.errors import Unavailable
from tests.support.worker.builders import Change, Row, ending, run, step, tokens_by_row
from tests.support.worker.running import running
from worker_svc.engine import DeviceLost
from worker_svc.shell.engine_thread import EngineThread

STARTED = [Row(0, [1, 2], list(range(8)), 2)]


def go(test: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(test, 60))


@dataclass
class Device:
    """Lets results go when told. `log`: what happened, of which step, in which thread."""

    log: list[tuple[str, int, str]] = field(default_factory=list)
    gates: dict[int, threading.Event] = field(default_factory=dict)
    loss: Exception | None = None

    def note(self, what: str, step_id: int) -> None:
        self.log.append((what, step_id, threading.current_thread().name))

    def gate(self, step_id: int) -> threading.Event:
        return self.gates.setdefault(step_id, threading.Event())

    def seen(self, what: str) -> list[int]:
        return [step_id for name, step_id, _ in self.log if name == what]


@dataclass
class Held:
    device: Device
    outputs: worker_pb2.WorkerOutputs
    step_id: int
    is_ready: bool = False

    def wait(self) -> None:
        self.device.gate(self.step_id).wait(40)
        self.device.note("wait", self.step_id)
        if self.device.loss is not None:
            raise self.device.loss

    def finish(self) -> worker_pb2.WorkerOutputs:
        self.device.note("finish", self.step_id)
        return self.outputs


def late_engine(device: Device) -> Callable[[Any], SimulatedEngine]:
    class Late(SimulatedEngine):
        def launch(self, outputs):
            result = self.execute(outputs)
            device.note("launch", outputs.step_id)
            return Held(device, result, outputs.step_id)

        def reset(self):
            super().reset()
            device.note("reset", 0)

    return Late


async def until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0.005)


def test_the_next_step_is_launched_while_one_is_computed() -> None:
    """R155: launches and finishes on the engine's thread in step order, waiting on another one, results in step order."""

    async def test() -> None:
        device = Device()
        async with running(make_engine=late_engine(device)) as worker:
            await worker.make_ready()
            owner = await run(worker.stub)
            await owner.send(step(1, add=STARTED))
            await owner.send(step(2))
            await until(lambda: device.seen("launch") == [1, 2])
            assert not device.seen("finish")
            device.gate(2).set()
            await asyncio.sleep(0.05)
            assert not device.seen("finish"), "the second waits for the first"
            await owner.send(step(3))
            device.gate(1).set()
            device.gate(3).set()
            answers = [await owner.read() for _ in range(3)]
            assert [answer.step_id for answer in answers] == [1, 2, 3]
            assert all(len(tokens_by_row(answer)[0]) == 1 for answer in answers)
            assert device.seen("finish") == device.seen("wait") == [1, 2, 3]
            threads = {
                what: {name for seen, _, name in device.log if seen == what} for what in ("launch", "wait", "finish")
            }
            assert threads == {"launch": {"engine"}, "wait": {"engine-results"}, "finish": {"engine"}}

    go(test())


def test_a_refused_step_is_answered_in_its_turn() -> None:
    """An error known at once does not overtake the results on their way."""

    async def test() -> None:
        device = Device()
        async with running(make_engine=late_engine(device)) as worker:
            await worker.make_ready()
            owner = await run(worker.stub)
            await owner.send(step(1, add=STARTED))
            await owner.send(step(2, change=[Change(9, 1)]))
            await owner.send(step(3))
            await until(lambda: device.seen("launch") == [1, 3])
            for step_id in (1, 3):
                device.gate(step_id).set()
            answers = [await owner.read() for _ in range(3)]
            assert [(answer.step_id, answer.error.status) for answer in answers] == [
                (1, ""), (2, "INVALID_ARGUMENT"), (3, ""),
            ]  # fmt: skip

    go(test())


def test_a_device_lost_while_waiting_fails_the_worker() -> None:
    async def test() -> None:
        device = Device(loss=DeviceLost("CUDA error: illegal address"))
        async with running(make_engine=late_engine(device)) as worker:
            await worker.make_ready()
            owner = await run(worker.stub)
            await owner.send(step(1, add=STARTED))
            await until(lambda: device.seen("launch") == [1])
            device.gate(1).set()
            error = await ending(owner.call)
            assert isinstance(error, Unavailable)
            assert "illegal address" in str(error)
            await asyncio.wait([worker.task], timeout=40)
            with pytest.raises(Unavailable, match="illegal address"):
                worker.task.result()

    go(test())


def test_a_new_owner_does_not_wait_for_the_old_ones_results() -> None:
    """A new epoch drops what is in flight: it is not finished, and the new owner's steps begin at once."""

    async def test() -> None:
        device = Device()
        async with running(make_engine=late_engine(device)) as worker:
            await worker.make_ready()
            old = await run(worker.stub)
            await old.send(step(1, add=STARTED))
            await until(lambda: device.seen("launch") == [1])
            new = await run(worker.stub, "scheduler-b", force=True)
            await new.send(step(1, epoch=2, add=STARTED))
            await until(lambda: device.seen("launch") == [1, 1])
            device.gate(1).set()
            answer = await new.read()
            assert (answer.epoch, answer.step_id, len(tokens_by_row(answer)[0])) == (2, 1, 1)
            assert device.seen("finish") == [1]

    go(test())


def test_stopping_waits_for_the_results_on_their_way() -> None:
    async def test() -> None:
        device = Device()
        async with running(make_engine=late_engine(device)) as worker:
            await worker.make_ready()
            owner = await run(worker.stub)
            await owner.send(step(1, add=STARTED))
            await owner.send(step(2))
            await until(lambda: device.seen("launch") == [1, 2])
            worker.stop.set()
            await asyncio.sleep(0.05)
            device.gate(1).set()
            device.gate(2).set()
            assert [(await owner.read()).step_id for _ in range(2)] == [1, 2]
            error = await ending(owner.call)
            assert isinstance(error, Unavailable)
            await asyncio.wait_for(worker.task, 40)

    go(test())


# --- the thread ------------------------------------------------------------------------------------------------------


def test_without_later_results_there_is_one_thread() -> None:
    """R155: where results are there at once nothing is handed to another thread."""

    async def test() -> None:
        thread = EngineThread(asyncio.get_running_loop())
        assert await asyncio.gather(*(thread.submit(lambda i=i: i) for i in range(20))) == list(range(20))
        assert "engine-results" not in {one.name for one in threading.enumerate()}
        assert await thread.stop(40)

    go(test())


def test_results_keep_the_order_of_the_jobs() -> None:
    """Jobs that are over wait for those before them that are not; errors of all three stages reach the caller."""

    async def test() -> None:
        thread, device = EngineThread(asyncio.get_running_loop()), Device()
        order: list[str] = []

        def submit(name: str, job: Callable[[], Any]) -> asyncio.Future[Any]:
            future = thread.submit(job)
            future.add_done_callback(lambda _: order.append(name))
            return future

        held = [Held(device, worker_pb2.WorkerOutputs(step_id=i), i) for i in (1, 2)]
        held[1].finish = lambda: 1 / 0
        jobs = [
            submit("first", lambda: held[0]), submit("over", lambda: 5), submit("fails", lambda: 1 / 0),
            submit("second", lambda: held[1]),
        ]  # fmt: skip
        await asyncio.sleep(0.05)
        assert order == []
        device.gate(2).set()
        device.gate(1).set()
        results = await asyncio.gather(*jobs, return_exceptions=True)
        assert order == ["first", "over", "fails", "second"]
        assert (results[0].step_id, results[1]) == (1, 5)
        assert [type(result) for result in results[2:]] == [ZeroDivisionError] * 2
        last = submit("last", lambda: Held(device, worker_pb2.WorkerOutputs(), 3))
        stopping = asyncio.ensure_future(thread.stop(40))
        await asyncio.sleep(0.05)
        assert not last.done()
        device.gate(3).set()
        assert await stopping
        await last

    go(test())
