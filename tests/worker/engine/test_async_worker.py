"""The whole worker over gRPC with a real model on a device that brings results late: threads, streams, epochs and all."""

import asyncio

from tests.support.worker.async_device import FakeStreams
from tests.support.worker.builders import Change, run, step, tokens_by_row
from tests.support.worker.driver import BLOCK_SIZE
from tests.support.worker.running import fast, running
from tests.worker.engine.test_async import TINY, join
from worker_svc.device.queue import DeviceQueue, HostQueue, StreamQueue
from worker_svc.engine import Pending
from worker_svc.executor.model_engine import ModelEngine
from worker_svc.executor.step_runner import StepRunner
from worker_svc.settings import WorkerSettings

NUM_BLOCKS, NUM_STEPS = 64, 24
SETTINGS = WorkerSettings.of(
    model=TINY,
    device="cpu",
    block_size=BLOCK_SIZE,
    max_model_len=512,
    num_gpu_blocks_override=NUM_BLOCKS,
    invariant=False,
)


class QueuedEngine(ModelEngine):
    """With another queue in front of the device."""

    def __init__(self, queue: DeviceQueue) -> None:
        super().__init__(SETTINGS)
        self.queue, self.num_ahead = queue, 0
        self._last: Pending | None = None

    def allocate(self, num_gpu_blocks: int, num_cpu_blocks: int) -> None:
        super().allocate(num_gpu_blocks, num_cpu_blocks)
        self._runner = StepRunner(self._loaded.model, self.cache, self._rows, self.row_rule, queue=self.queue)

    def launch(self, outputs):
        self.num_ahead += self._last is not None and not self._last.is_ready
        self._last = super().launch(outputs)
        return self._last


async def tokens_through_a_worker(engine: QueuedEngine) -> list[dict[int, list[int]]]:
    """Steps sent three ahead of the results."""
    async with running(fast(), lambda _: engine) as worker:
        await worker.make_ready(NUM_BLOCKS, 0)
        owner = await run(worker.stub)
        sampled = join(1, temperature=0.9, seed=3)
        messages = [step(1, add=[join(0), sampled]), step(2, change=[Change(0, 0)]), step(3, change=[Change(0, 1)])]
        messages += [step(i) for i in range(4, NUM_STEPS)] + [step(NUM_STEPS, remove=[1])]
        found = []
        for i, message in enumerate(messages):
            await owner.send(message)
            if i >= 3:
                found.append(tokens_by_row(await owner.read()))
        return found + [tokens_by_row(await owner.read()) for _ in range(3)]


def test_a_worker_whose_results_come_late():
    """R155, R156, R157: steps sent ahead are launched ahead, and every answer is the one of a worker that computes at once."""
    engines = [QueuedEngine(HostQueue()), QueuedEngine(StreamQueue(FakeStreams()))]
    expected, found = (asyncio.run(asyncio.wait_for(tokens_through_a_worker(engine), 60)) for engine in engines)
    assert found == expected
    assert len(found) == NUM_STEPS
    assert len(found[0]) == 2
    assert engines[0].num_ahead == 0
    assert engines[1].num_ahead > 0
