"""LoadAdapter and UnloadAdapter through real gRPC, beside a stream of steps."""

import asyncio
from collections.abc import Coroutine
from typing import Any

import pytest

from protos.worker.v1 import worker_pb2
from svc_common.errors import FailedPrecondition, InvalidArgument, ResourceExhausted
from tests.support.checkpoints import make_checkpoint
from tests.support.worker.adapter_folders import make_adapter
from tests.support.worker.builders import Change, Row, run, step, tokens_by_row, typed
from tests.support.worker.running import RunningWorker, fast, running
from worker_svc.executor.model_engine import ModelEngine
from worker_svc.settings import WorkerSettings

PROMPT = list(range(40, 52))


def go(test: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(test, 60))


async def load(worker: RunningWorker, adapter_id: int, path: object) -> worker_pb2.LoadAdapterResponse:
    async with typed():
        return await worker.stub.LoadAdapter(worker_pb2.LoadAdapterRequest(adapter_id=adapter_id, path=str(path)))
    raise AssertionError("typed() raises")


async def unload(worker: RunningWorker, adapter_id: int) -> None:
    async with typed():
        await worker.stub.UnloadAdapter(worker_pb2.UnloadAdapterRequest(adapter_id=adapter_id))


def adapted(message: worker_pb2.SchedulerOutputs, **adapter_of: int) -> worker_pb2.SchedulerOutputs:
    """The step with `at_<place in added>` = adapter id."""
    for place, adapter_id in adapter_of.items():
        message.added.options.add(at=int(place.removeprefix("at_")), adapter_id=adapter_id)
    return message


def test_adapters_come_after_the_model() -> None:
    """Both calls say what to do while the model is still being loaded."""

    async def test() -> None:
        async with running(fast(load_s=0.2, time_scale=1.0)) as worker:
            for call in (load(worker, 1, "alpha"), unload(worker, 1)):
                with pytest.raises(FailedPrecondition, match="call LoadModel"):
                    await call

    go(test())


def test_adapters_of_a_simulated_worker() -> None:
    """Names only, but the rules of ids, limits and rows are the real ones."""

    async def test() -> None:
        async with running(fast(max_adapters=2)) as worker:
            await worker.make_ready()
            assert await load(worker, 1, "alpha") == worker_pb2.LoadAdapterResponse()
            owner = await run(worker.stub)
            await load(worker, 1, "alpha")
            with pytest.raises(FailedPrecondition, match="use a new id"):
                await load(worker, 1, "beta")
            await load(worker, 2, "beta")
            with pytest.raises(ResourceExhausted, match="its limit is 2"):
                await load(worker, 3, "gamma")
            with pytest.raises(InvalidArgument, match="adapter_id"):
                await load(worker, 0, "gamma")
            rows = [Row(i, PROMPT, [4 * i, 4 * i + 1, 4 * i + 2, 4 * i + 3], len(PROMPT)) for i in range(3)]
            refused = await owner.ask(adapted(step(1, add=rows), at_2=7))
            assert (refused.error.status, refused.error.reason) == ("INVALID_ARGUMENT", "INVALID_FIELD")
            assert refused.error.field_violations[0].field == "added.options.adapter_id"
            first = tokens_by_row(await owner.ask(adapted(step(2, add=rows), at_1=1, at_2=2)))
            with pytest.raises(FailedPrecondition, match="adapter 2 is used by r2/0"):
                await unload(worker, 2)
            second = tokens_by_row(await owner.ask(step(3)))
            assert len({(first[row][0], second[row][0]) for row in range(3)}) == 3, "tokens depend on the adapter"
            await owner.ask(step(4, remove=[2]))
            await unload(worker, 2)
            await unload(worker, 2)
            await unload(worker, 77)

    go(test())


def test_cached_blocks_of_another_adapter_are_not_this_ones() -> None:
    """Same prompt under another adapter: a prefix hit would read wrong keys and values; the simulated cache sees it."""

    async def test() -> None:
        async with running() as worker:
            await worker.make_ready()
            owner = await run(worker.stub)
            await load(worker, 1, "alpha")
            await owner.ask(adapted(step(1, add=[Row(0, PROMPT, [0, 1, 2], 12)]), at_0=1))
            hit = Row(1, PROMPT, [0, 1, 3], 4, num_computed=8)
            lost = await owner.ask(step(2, add=[hit], remove=[0]))
            assert lost.error.reason == "KV_LOST", lost.error.message
            same = Row(2, PROMPT, [0, 1, 4], 4, num_computed=8)
            assert 2 in tokens_by_row(await owner.ask(adapted(step(3, add=[same], remove=[1]), at_0=1)))

    go(test())


def test_a_real_worker_loads_while_it_serves(tmp_path) -> None:
    """Rows go on while adapters come, are refused and leave; each error has its status, reason and field."""
    base = make_checkpoint("llama", tmp_path / "base")
    good = make_adapter(base, tmp_path / "good", 1, r=8, target_modules="all-linear")
    other = make_checkpoint("llama", tmp_path / "other", hidden_size=128, head_dim=16)
    wrong = make_adapter(other, tmp_path / "wrong", 1, r=8, target_modules=["q_proj"])
    settings = WorkerSettings.of(model=base, block_size=16, num_gpu_blocks_override=64, max_model_len=256)

    async def test() -> None:
        async with running(settings, ModelEngine) as worker:
            await worker.make_ready(64, 0)
            owner = await run(worker.stub)
            await owner.ask(step(1, add=[Row(0, PROMPT, [0, 1], len(PROMPT))]))
            steps = asyncio.create_task(many(owner, range(2, 12)))
            loaded = await load(worker, 1, good)
            assert (loaded.rank, loaded.num_bytes > 0) == (8, True)
            with pytest.raises(InvalidArgument, match=r"q_proj needs lora_A of 8x64") as caught:
                await load(worker, 2, wrong)
            assert caught.value.reason == "ADAPTER_MISMATCH"
            assert caught.value.violations[0].field == "path"
            plain = await steps
            adapted_row = Row(1, PROMPT, [2, 3], len(PROMPT))
            got = tokens_by_row(await owner.ask(adapted(step(12, add=[adapted_row]), at_0=1)))
            with pytest.raises(FailedPrecondition, match="used by r1/0"):
                await unload(worker, 1)
            more = await many(owner, range(13, 23))
            assert [got[1][0], *more[1][:9]] != plain[0]
            await owner.ask(step(23, remove=[1]))
            await unload(worker, 1)
            refused = await owner.ask(adapted(step(24, add=[Row(1, PROMPT, [2, 3], 12, incarnation=2)]), at_0=1))
            assert refused.error.status == "INVALID_ARGUMENT"
            assert 0 in tokens_by_row(await owner.ask(step(25, change=[Change(0, 1, [5])])))

    async def many(owner, step_ids) -> dict[int, list[int]]:
        found: dict[int, list[int]] = {}
        for step_id in step_ids:
            message = step(step_id, change=[Change(0, 1, [4])]) if step_id == 18 else step(step_id)
            for row, tokens in tokens_by_row(await owner.ask(message)).items():
                found.setdefault(row, []).extend(tokens)
        return found

    go(test())
