"""Ownership over real gRPC: takeover, resuming, fencing, fuzzed steps, storms of cancels."""

import asyncio
import random
from collections.abc import Coroutine
from typing import Any

import grpc.aio
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protos.worker.v1 import worker_pb2
from svc_common.errors import Aborted, FailedPrecondition, InvalidArgument
from svc_common.net import rpc
from svc_common.version import SPOKEN
from tests.support.worker.builders import Change, Owner, Row, ending, identity, run, step, tokens_by_row
from tests.support.worker.running import RunningWorker, fast, running

PROMPT = Row(0, [1, 2, 3], list(range(20)), 3)


def go(test: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(test, 120))


async def lose(owner: Owner) -> None:
    """The stream is gone without a goodbye."""
    owner.call.cancel()
    await asyncio.sleep(0.05)


def test_others_are_refused_with_a_retry_time_while_the_lease_runs() -> None:
    async def test() -> None:
        async with running(fast(owner_lease_s=600)) as worker:
            await worker.make_ready()
            a = await run(worker.stub, "a")
            with pytest.raises(FailedPrecondition, match=r"scheduler a owns .* scheduler b") as caught:
                await run(worker.stub, "b")
            assert caught.value.retry_after_s == pytest.approx(600)
            await lose(a)
            while "its lease runs" not in caught.value.message:  # once the worker has noticed
                with pytest.raises(FailedPrecondition) as caught:
                    await run(worker.stub, "b")
            assert caught.value.retry_after_s is not None
            assert 0 < caught.value.retry_after_s < 600

    go(test())


async def run_once_let(worker: RunningWorker, name: str) -> Owner:
    """Asks again as it is told to, until it owns the worker."""
    while True:
        try:
            return await run(worker.stub, name)
        except FailedPrecondition as error:
            await asyncio.sleep(error.retry_after_s or 0)


def test_the_next_takes_over_when_the_lease_is_over() -> None:
    async def test() -> None:
        async with running(fast(owner_lease_s=0.2)) as worker:
            await worker.make_ready()
            a = await run(worker.stub, "a")
            await lose(a)
            b = await run_once_let(worker, "b")
            assert (b.welcome.epoch, b.welcome.resumed) == (2, False)
            with pytest.raises(Aborted, match="epoch 1 of scheduler a is over"):
                await run(worker.stub, "a", epoch=1, worker_boot_id=a.welcome.identity.boot_id)
            b.call.cancel()

    go(test())


def test_goodbye_hands_the_worker_over_at_once() -> None:
    async def test() -> None:
        async with running() as worker:
            await worker.make_ready()
            a = await run(worker.stub, "a")
            await a.send(worker_pb2.SchedulerOutputs(goodbye=worker_pb2.RunGoodbye()))
            assert await a.call.read() is grpc.aio.EOF
            assert (await run(worker.stub, "b")).welcome.epoch == 2

    go(test())


def test_a_stream_that_ends_without_goodbye_starts_the_lease() -> None:
    """Half-closed is not goodbye: a call that breaks looks half-closed to the worker until the cancellation arrives."""

    async def test() -> None:
        async with running(fast(owner_lease_s=600)) as worker:
            await worker.make_ready()
            a = await run(worker.stub, "a")
            await a.call.done_writing()
            assert await a.call.read() is grpc.aio.EOF
            with pytest.raises(FailedPrecondition, match="its lease runs"):
                await run(worker.stub, "b")

    go(test())


def test_force_takes_over_ends_the_other_stream_and_starts_empty() -> None:
    """The new epoch holds no rows: the same row index and incarnation can be used again."""

    async def test() -> None:
        async with running() as worker:
            await worker.make_ready()
            a = await run(worker.stub, "a")
            first = tokens_by_row(await a.ask(step(1, add=[PROMPT])))
            b = await run(worker.stub, "b", force=True)
            assert (b.welcome.epoch, b.welcome.resumed) == (2, False)
            error = await ending(a.call)
            assert isinstance(error, Aborted)
            assert "scheduler b owns this worker in epoch 2" in str(error)
            assert tokens_by_row(await b.ask(step(1, epoch=2, add=[PROMPT]))) == first

    go(test())


def test_resuming_sends_unread_results_again_and_recomputes_nothing() -> None:
    async def test() -> None:
        async with running() as worker:
            await worker.make_ready()
            undisturbed = await run(worker.stub, "x")
            expected = [tokens_by_row(await undisturbed.ask(step(1, add=[PROMPT])))]
            expected += [tokens_by_row(await undisturbed.ask(step(i))) for i in range(2, 7)]
            a = await run(worker.stub, "a", force=True)
            seen = [tokens_by_row(await a.ask(step(1, epoch=2, add=[PROMPT])))]
            for step_id in (2, 3, 4):
                await a.send(step(step_id, epoch=2))
            await asyncio.sleep(0.5)
            await lose(a)
            again = await run(worker.stub, "a", epoch=2, worker_boot_id=a.welcome.identity.boot_id, last_step_id=1)
            assert (again.welcome.epoch, again.welcome.resumed) == (2, True)
            resent = [await again.read() for _ in range(3)]
            assert [result.step_id for result in resent] == [2, 3, 4]
            seen += [tokens_by_row(result) for result in resent]
            seen += [tokens_by_row(await again.ask(step(i, epoch=2))) for i in (5, 6)]
            assert seen == expected

    go(test())


def test_result_of_a_step_in_flight_goes_to_the_resumed_stream() -> None:
    async def test() -> None:
        async with running(fast(time_scale=1.0, step_base_s=0.2)) as worker:
            await worker.make_ready()
            a = await run(worker.stub, "a")
            await a.send(step(1, add=[PROMPT]))
            await asyncio.sleep(0.05)
            again = await run(worker.stub, "a", epoch=1, worker_boot_id=a.welcome.identity.boot_id)
            assert again.welcome.resumed
            await again.send(step(1, add=[PROMPT]))
            assert (await again.read()).step_id == 1
            assert (await again.ask(step(2))).step_id == 2, "the repeated step was answered once"
            assert isinstance(await ending(a.call), Aborted)

    go(test())


def test_duplicate_step_is_answered_from_the_ring() -> None:
    async def test() -> None:
        async with running() as worker:
            await worker.make_ready()
            owner = await run(worker.stub)
            results = [await owner.ask(step(1, add=[PROMPT]))] + [await owner.ask(step(i)) for i in (2, 3)]
            assert await owner.ask(step(2)) == results[1]
            assert await owner.ask(step(3)) == results[2]
            assert (await owner.ask(step(4))).step_id == 4

    go(test())


@pytest.mark.parametrize(
    ("message", "kind", "words"),
    [
        (step(3), FailedPrecondition, "step 2 is next"),
        (step(0), FailedPrecondition, "no longer held"),
        (step(2, epoch=7), Aborted, "epoch 7, the worker is in epoch 1"),
        (
            worker_pb2.SchedulerOutputs(hello=worker_pb2.RunHello(identity=identity())),
            InvalidArgument,
            "first message",
        ),
    ],
    ids=["gap", "too-old", "stale-epoch", "second-hello"],
)
def test_step_out_of_order_ends_the_stream_but_not_the_epoch(message, kind, words) -> None:
    async def test() -> None:
        async with running() as worker:
            await worker.make_ready()
            owner = await run(worker.stub)
            await owner.ask(step(1, add=[PROMPT]))
            await owner.send(message)
            error = await ending(owner.call)
            assert isinstance(error, kind)
            assert words in str(error)
            boot = owner.welcome.identity.boot_id
            again = await run(worker.stub, epoch=1, worker_boot_id=boot, last_step_id=1)
            assert again.welcome.resumed
            assert tokens_by_row(await again.ask(step(2)))[0]

    go(test())


def test_hello_that_does_not_fit_is_refused() -> None:
    """Both sides say hello first; what does not fit is refused with both values named."""

    async def first_answer(worker: RunningWorker, message: worker_pb2.SchedulerOutputs | None) -> Exception:
        call = worker.stub.Run()
        if message is not None:
            await call.write(message)
        await call.done_writing()
        return await ending(call)

    async def test() -> None:
        async with running() as worker:
            await worker.make_ready()
            other = worker_pb2.RunHello(identity=identity(revision=99))
            error = await first_answer(worker, worker_pb2.SchedulerOutputs(hello=other))
            assert isinstance(error, FailedPrecondition)
            assert error.metadata == {"theirs": "99", "ours": str(SPOKEN.newest)}
            nameless = worker_pb2.RunHello(identity=identity(""))
            for message in (step(1), worker_pb2.SchedulerOutputs(hello=nameless), None):
                assert isinstance(await first_answer(worker, message), InvalidArgument)
            assert (await worker.stub.Describe(worker_pb2.DescribeRequest())).epoch == 0

    go(test())


# --- hostile steps ---------------------------------------------------------------------------------------------------

_COLUMNS = [f.name for f in worker_pb2.AddedRows.DESCRIPTOR.fields if f.type == f.TYPE_BYTES]
_CHANGED = [f.name for f in worker_pb2.ChangedRows.DESCRIPTOR.fields]
_PLAIN = ["removed_rows", "blocks_to_swap_in", "blocks_to_swap_out", "blocks_to_copy"]


@st.composite
def hostile_steps(draw: st.DrawFn) -> worker_pb2.SchedulerOutputs:
    message = step(1, add=[Row(1, [5, 6], [30, 31], 2)], change=[Change(0, 1)], copy=[(1, 2)])
    data = st.binary(max_size=24) | st.lists(st.integers(-(2**31), 2**31 - 1), max_size=4).map(
        lambda numbers: b"".join(n.to_bytes(4, "little", signed=True) for n in numbers)
    )
    for _ in range(draw(st.integers(1, 3))):
        part, names = draw(st.sampled_from([(message.added, _COLUMNS), (message.changed, _CHANGED), (message, _PLAIN)]))
        setattr(part, draw(st.sampled_from(names)), draw(data))
    message.num_decode_steps = draw(st.sampled_from([0, 1, 1, 1, 2, 2**32 - 1]))
    return message


@settings(max_examples=15, deadline=None)
@given(messages=st.lists(hostile_steps(), min_size=1, max_size=15))
def test_malformed_columns_never_end_the_process_or_the_stream(messages) -> None:
    async def test() -> None:
        async with running() as worker:
            await worker.make_ready()
            owner = await run(worker.stub)
            await owner.ask(step(1, add=[PROMPT]))
            for step_id, message in enumerate(messages, start=2):
                message.step_id = step_id
                result = await owner.ask(message)
                assert result.step_id == step_id
                if result.HasField("error"):
                    assert result.error.status in {"INVALID_ARGUMENT", "FAILED_PRECONDITION"}, result.error
            last = len(messages) + 2
            assert (await owner.ask(step(last))).step_id == last
            fresh = await run(worker.stub, "other", force=True)
            assert tokens_by_row(await fresh.ask(step(1, epoch=2, add=[PROMPT])))[0]

    go(test())


def worker_tasks(prefix: str) -> int:
    return sum(task.get_name().startswith(prefix) and not task.done() for task in asyncio.all_tasks())


def test_storm_of_cancels_leaves_no_task_and_a_worker_that_works() -> None:
    """Streams that end at any moment leave nothing behind."""

    async def test() -> None:
        rng = random.Random(7)
        async with running() as worker:
            await worker.make_ready()
            await asyncio.sleep(0.1)
            before = len(asyncio.all_tasks())

            async def storm(number: int) -> None:
                call = worker.stub.Run()
                hello = worker_pb2.RunHello(identity=identity(f"s{number}"), force=True)
                try:
                    greets = rng.random() < 0.9
                    if greets:
                        await call.write(worker_pb2.SchedulerOutputs(hello=hello))
                    if greets and rng.random() < 0.7:
                        first = await call.read()
                        for step_id in range(1, rng.randint(1, 4)):
                            await call.write(step(step_id, epoch=first.welcome.epoch))
                    await asyncio.sleep(rng.random() * 0.01)
                except (grpc.aio.AioRpcError, asyncio.InvalidStateError, AttributeError):
                    pass  # taken over by another of the storm
                call.cancel()

            for wave in range(10):
                await asyncio.gather(*(storm(20 * wave + i) for i in range(20)))
            for _ in range(1_000):
                if worker_tasks("run-") == 0 and len(asyncio.all_tasks()) <= before:
                    break
                await asyncio.sleep(0.02)
            assert worker_tasks("run-") == 0
            assert len(asyncio.all_tasks()) <= before
            owner = await run(worker.stub, "calm", force=True)
            epoch = owner.welcome.epoch
            assert epoch > 50
            assert tokens_by_row(await owner.ask(step(1, epoch=epoch, add=[PROMPT])))[0]

    go(test())


def test_cancelled_loads_and_bundles_leave_no_task() -> None:
    async def test() -> None:
        async with running(fast(load_s=0.5, time_scale=1.0)) as worker:
            calls = [worker.stub.LoadModel(worker_pb2.LoadModelRequest()) for _ in range(50)]
            await asyncio.gather(*(call.read() for call in calls))
            before = len(asyncio.all_tasks())
            for call in calls:
                call.cancel()
            while len(asyncio.all_tasks()) >= before:
                await asyncio.sleep(0.02)
            assert (await worker.make_ready()).HasField("loaded"), "others' cancels do not end the load"

    go(test())


def test_typed_error_has_retry_info_on_the_wire() -> None:
    """A refusal carries RetryInfo, so any client can wait the right time."""

    async def test() -> None:
        async with running(fast(owner_lease_s=3.0)) as worker:
            await worker.make_ready()
            await run(worker.stub, "a")
            call = worker.stub.Run()
            await call.write(worker_pb2.SchedulerOutputs(hello=worker_pb2.RunHello(identity=identity("b"))))
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await call.read()
            assert rpc.from_rpc_error(caught.value).retry_after_s == 3.0

    go(test())
