"""Start to finish on a CUDA device that checks where tensors are: every kind of step gives what the same code gives on the CPU."""

import gc
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from protos.worker.v1 import worker_pb2
from svc_common import wire_arrays
from tests.support.worker.async_device import FakeStreams
from tests.support.worker.async_life import NUM_BLOCKS, NUM_HOST_BLOCKS, Scheduler
from tests.support.worker.builders import Row, step, tokens_by_row
from tests.support.worker.sampled_rows import ToyMasks
from tests.worker.fake_cuda import everything
from tests.worker.fake_cuda.device import FakeDevices
from tests.worker.fake_cuda.tensors import DEVICE, WAITS, DeviceTensor
from worker_svc.device.queue import DeviceQueue, StreamQueue
from worker_svc.executor.model_engine import ModelEngine
from worker_svc.executor.step_runner import StepRunner
from worker_svc.settings import WorkerSettings

ON_CPU = {"device": "cpu", "backend": "reference", "invariant": False}
ON_CUDA = {"device": "cuda", "backend": "reference"}
WITH_KERNELS = {"device": "cuda", "backend": "cuda"}


def started(path: Path, num_blocks: int, num_host_blocks: int, **settings: Any) -> ModelEngine:
    """Loaded, profiled and allocated."""
    gc.collect()  # Engines of other tests give their memory back.
    given = WorkerSettings.of(model=path, block_size=16, max_model_len=256, swap_space_gib=0.01, **settings)
    engine = ModelEngine(given, FakeDevices())
    engine.load(lambda _stage, _fraction: None)
    found = engine.profile(8, 1)
    assert num_blocks <= found.num_gpu_blocks
    assert num_host_blocks <= found.num_cpu_blocks
    engine.allocate(num_blocks, num_host_blocks)
    return engine


def done(path: Path, adapter: Path, **settings: Any) -> tuple[ModelEngine, list[worker_pb2.WorkerOutputs]]:
    """An engine, and what came of steps of every kind."""
    engine = started(path, everything.NUM_BLOCKS, everything.NUM_HOST_BLOCKS, **settings)
    engine.load_adapter(everything.ADAPTER_ID, str(adapter))
    return engine, everything.done(engine)


@pytest.fixture(scope="module")
def expected(checkpoint: Path, adapter: Path) -> tuple[ModelEngine, list[worker_pb2.WorkerOutputs]]:
    """On the CPU."""
    return done(checkpoint, adapter, **ON_CPU)


def pools(engine: ModelEngine) -> tuple[torch.Tensor, torch.Tensor]:
    """On the host."""
    return engine.cache.device_pool.cpu(), engine.cache.host_pool


def test_steps_of_every_kind(checkpoint, adapter, expected):
    """R8, R157: prefill, chunks, decode, all options, beams, children, drafts, vectors, scored prompts, adapters, moves."""
    engine, results = done(checkpoint, adapter, **ON_CUDA)
    cpu, on_cpu = expected
    everything.check_same(results, on_cpu, 1e-4)
    assert all(torch.allclose(*both, atol=1e-4) for both in zip(pools(engine), pools(cpu), strict=True))
    kinds = Counter(field.name for result in results for field, _ in result.ListFields())
    assert kinds["candidates"] and kinds["embeddings"] == 2, kinds
    assert not any(wire_arrays.unpack(result.flags, "flags", wire_arrays.U8).any() for result in results)


def test_steps_of_every_kind_with_the_kernels(shallow, shallow_adapter):
    """R18, R123, R157: the same with Triton's kernels: the same tokens, and a plain decode step waits for nothing."""
    engine, results = done(shallow, shallow_adapter, **WITH_KERNELS)
    cpu, on_cpu = done(shallow, shallow_adapter, **ON_CPU)
    everything.check_same(results, on_cpu, 1e-3)
    for found, wanted in zip(pools(engine), pools(cpu), strict=True):
        # One writes blocks in another layout: what is compared is what lies in them.
        assert torch.allclose(found.sum((0, 3)), wanted.sum((0, 3)), atol=1e-2)
    engine.reset()
    sampled = {"temperature": 0.9, "top_k": 20, "top_p": 0.9, "logprobs": True}
    joining = [Row(0, [1, 2, 3], range(2), 3), Row(1, [4, 5], range(2, 4), 2, **sampled)]
    first = engine.launch(step(1, add=joining))
    WAITS.seen.clear()
    later = engine.launch(step(2))
    assert not WAITS.seen
    assert not first.is_ready
    assert [set(tokens_by_row(pending.finish())) for pending in (first, later)] == [{0, 1}] * 2


def lived(engine: ModelEngine, queue: DeviceQueue, seed: int) -> Scheduler:
    """A random life: chunks, pauses, preemptions by recompute, swap and copy, rows of all kinds, two or three plans in flight."""
    engine.reset()
    engine.cache.device_pool.zero_()
    engine._runner = StepRunner(
        engine._loaded.model,
        engine.cache,
        engine._rows,
        engine.row_rule,
        queue=queue,
        masks=ToyMasks(),
    )

    def spoil(block: int) -> None:
        engine.cache.device_pool[:, :, block] = float("nan")

    scheduler = Scheduler(engine.launch, spoil, seed, depth=2 + seed % 2)
    scheduler.run()
    return scheduler


@pytest.mark.parametrize("seeds", [[28], pytest.param(range(2, 5), marks=pytest.mark.long)], ids=["one", "many"])
def test_random_lives(shallow, seeds, record_property):
    """R148, R157, R158: every message is that of the same life on the CPU, whatever is in flight meanwhile."""
    on_cpu = started(shallow, NUM_BLOCKS, NUM_HOST_BLOCKS, **ON_CPU)
    on_cuda = started(shallow, NUM_BLOCKS, NUM_HOST_BLOCKS, **ON_CUDA)
    events: Counter[str] = Counter()
    for seed in seeds:
        expected = lived(on_cpu, StreamQueue(FakeStreams()), seed)
        found = lived(on_cuda, on_cuda._loaded.device.queue(), seed)
        everything.check_same(found.results, expected.results, 1e-4)
        assert found.events["launched ahead"] > 20
        events += found.events
    assert events.keys() >= {"swap", "copy", "recompute", "spoilt", "beam", "children", "guess", "chunk"}
    record_property("size", f"fake CUDA: {len(seeds)} lives, {events['launched ahead']} steps launched ahead")


def test_all_of_the_model_is_there(checkpoint):
    """No parameter, buffer or pool of keys and values is left on the host."""
    engine = started(checkpoint, 8, 1, **ON_CUDA)
    model = engine._loaded.model._model
    found = [*model.parameters(), *model.buffers(), engine.cache.device_pool]
    assert len(found) > 10
    assert all(isinstance(tensor, DeviceTensor) and tensor.device == DEVICE for tensor in found)
