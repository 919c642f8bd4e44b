"""Several stages with steps in flight: each message is the one of a worker in one process, and all stages have the same rows."""

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from quire.built_in_model import default_model
from tests.support.worker.async_life import NUM_BLOCKS, NUM_HOST_BLOCKS, Scheduler
from tests.support.worker.driver import make_engine
from tests.support.worker.rank_group import RunningGroup
from tests.support.worker.sampled_rows import ToyMasks
from tests.support.worker.toy_ranks import toy_group
from worker_svc.device.queue import HostQueue
from worker_svc.executor.model_engine import ModelEngine
from worker_svc.executor.step_runner import StepRunner

TINY = Path(default_model())
QUICK_SEED = 2
LONG_SEEDS = range(100, 106)
EVENTS = {
    "beam", "children", "chunk", "copy", "draft accepted", "failed", "guess", "late token dropped", "late token kept",
    "launched ahead", "multi-step", "recompute", "spoilt", "swap",
}  # fmt: skip


def dtype_of(tensor: int) -> str:
    """With several ranks of a stage sums are rounded otherwise; in float32 that does not change a token."""
    return "auto" if tensor == 1 else "float32"


@pytest.fixture(scope="module")
def single(group: RunningGroup) -> ModelEngine:
    dtype = dtype_of(group.settings.tensor_parallel)
    sizes = {"num_blocks": NUM_BLOCKS, "num_cpu_blocks": NUM_HOST_BLOCKS, "max_model_len": 512}
    engine = make_engine(TINY, **sizes, device="cpu", dtype=dtype)
    engine.profile(192, 8)
    engine.allocate(NUM_BLOCKS, NUM_HOST_BLOCKS)
    return engine


@pytest.fixture(
    scope="module",
    params=[(1, 2), *(pytest.param(sizes, marks=pytest.mark.long) for sizes in ((1, 3), (2, 2)))],
    ids=["two stages", "three stages", "two of two"],
)
def group(request: pytest.FixtureRequest) -> Iterator[RunningGroup]:
    tensor, stages = request.param
    sizes = {"num_blocks": NUM_BLOCKS, "num_cpu_blocks": NUM_HOST_BLOCKS, "max_model_len": 512}
    with toy_group(TINY, tensor, stages, dtype=dtype_of(tensor), **sizes) as found:
        yield found


def spoil(engine: ModelEngine, block: int) -> None:
    engine.cache.device_pool[:, :, block] = float("nan")


def life_of_one(engine: ModelEngine, seed: int, depth: int) -> Scheduler:
    engine.reset()
    engine.cache.device_pool.zero_()
    engine._runner = StepRunner(
        engine._loaded.model, engine.cache, engine._rows, engine.row_rule, masks=ToyMasks(), queue=HostQueue()
    )
    scheduler = Scheduler(engine.launch, lambda block: spoil(engine, block), seed, depth=depth)
    scheduler.run()
    return scheduler


def life_of_group(group: RunningGroup, seed: int, depth: int) -> Scheduler:
    group.reset()
    scheduler = Scheduler(group.launch, lambda block: spoil(group.own, block), seed, depth=depth)
    scheduler.run()
    return scheduler


@pytest.mark.parametrize("seeds", [[QUICK_SEED], pytest.param(LONG_SEEDS, marks=pytest.mark.long)], ids=["one", "many"])
def test_messages_are_those_of_one_process(single, group, seeds, record_property) -> None:
    """Chunks, preemption, swaps, copies, drafts, beams, children, grammars, penalties, vectors, scored prompts, spoilt rows."""
    events: Counter[str] = Counter()
    for seed in seeds:
        depth = 2 + seed % 2
        expected, found = life_of_one(single, seed, depth), life_of_group(group, seed, depth)
        if group.settings.tensor_parallel == 1:
            assert found.results == expected.results, seed
        assert found.tokens == expected.tokens
        events += found.events
    assert events.keys() >= EVENTS and not group.losses
    size = f"{group.settings.pipeline_parallel} stages of {group.settings.tensor_parallel} ranks"
    record_property("size", f"{size}: {len(seeds)} lives, {events['launched ahead']} steps launched ahead")
