"""Granted steps over real gRPC: what a worker repeats, what ends it, and how an epoch with grants is resumed."""

import asyncio
from collections.abc import Coroutine
from typing import Any

import pytest

from protos.worker.v1 import worker_pb2
from svc_common import wire_arrays
from svc_common.errors import FailedPrecondition, InvalidArgument
from tests.support.worker.builders import Owner, Row, ending, run, step, tokens_by_row
from tests.support.worker.running import RunningWorker, fast, running

PROMPT = Row(0, [1, 2, 3], list(range(20)), 3)
OTHER = Row(1, [4, 5], list(range(20, 40)), 2)


def go(test: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(test, 120))


def granting(step_id: int, num_steps: int, stops: tuple[int, ...] = (), **more: Any) -> worker_pb2.SchedulerOutputs:
    message = step(step_id, **more)
    message.grant.num_steps, message.grant.stop_token_ids = num_steps, wire_arrays.pack(stops)
    return message


def revocation() -> worker_pb2.SchedulerOutputs:
    return worker_pb2.SchedulerOutputs(revocation=worker_pb2.GrantRevocation())


async def answers(owner: Owner) -> list[worker_pb2.WorkerOutputs]:
    """Results up to the one that the worker does not continue after."""
    found = [await owner.read()]
    while found[-1].continues:
        found.append(await owner.read())
    return found


async def tokens_without_grants(worker: RunningWorker, num_steps: int) -> list[dict[int, list[int]]]:
    """Tokens of the two rows, step by step."""
    owner = await run(worker.stub, "plain", force=True)
    epoch = owner.welcome.epoch
    messages = [step(1, epoch=epoch, add=[PROMPT, OTHER]), *(step(i, epoch=epoch) for i in range(2, num_steps + 1))]
    return [tokens_by_row(await owner.ask(message)) for message in messages]


def test_granted_steps_are_those_of_empty_messages() -> None:
    """As many as granted, each with its own result; then the worker waits for a plan."""

    async def test() -> None:
        async with running() as worker:
            await worker.make_ready()
            expected = await tokens_without_grants(worker, 8)
            owner = await run(worker.stub, "a", force=True)
            found = [await owner.ask(step(1, epoch=2, add=[PROMPT, OTHER]))]
            await owner.send(granting(2, 5, epoch=2))
            found += await answers(owner)
            assert [result.step_id for result in found] == list(range(1, 8))
            assert [result.continues for result in found] == [False] + [True] * 5 + [False]
            found.append(await owner.ask(step(8, epoch=2)))
            assert [tokens_by_row(result) for result in found] == expected

    go(test())


def test_a_stop_token_ends_the_grant() -> None:
    """Whichever row draws it."""

    async def test() -> None:
        async with running() as worker:
            await worker.make_ready()
            expected = await tokens_without_grants(worker, 6)
            stop = expected[3][1][0]
            first = next(i for i, found in enumerate(expected[1:], 2) if [stop] in found.values())
            owner = await run(worker.stub, "a", force=True)
            await owner.ask(step(1, epoch=2, add=[PROMPT, OTHER]))
            await owner.send(granting(2, 9, (stop,), epoch=2))
            assert (await answers(owner))[-1].step_id == first

    go(test())


def test_a_revocation_ends_the_grant_after_the_step_that_runs() -> None:
    """The owner's next plan is for the step after the last that was begun."""

    async def test() -> None:
        async with running(fast(time_scale=1.0, step_base_s=0.2)) as worker:
            await worker.make_ready()
            owner = await run(worker.stub)
            await owner.ask(step(1, add=[PROMPT]))
            await owner.send(granting(2, 15))
            await owner.read()
            await owner.send(revocation())
            last = (await answers(owner))[-1].step_id
            assert last < 6
            assert (await owner.ask(step(last + 1))).step_id == last + 1

    go(test())


def test_a_plan_for_a_step_that_was_begun_by_a_grant_is_refused() -> None:
    """Two plans for one step would leave the owner's rows unlike the worker's."""

    async def test() -> None:
        async with running(fast(time_scale=1.0, step_base_s=0.3)) as worker:
            await worker.make_ready()
            owner = await run(worker.stub)
            await owner.ask(step(1, add=[PROMPT]))
            await owner.send(granting(2, 15))
            result = await owner.read()
            assert result.continues
            await owner.send(step(5))
            assert isinstance(await ending(owner.call), FailedPrecondition)

    go(test())


@pytest.mark.parametrize("num_steps", [0, 3])
def test_a_grant_that_cannot_be_run_ends_the_stream(num_steps: int) -> None:
    """No steps, or several decode steps in one plan."""

    async def test() -> None:
        async with running() as worker:
            await worker.make_ready()
            owner = await run(worker.stub)
            await owner.ask(step(1, add=[PROMPT]))
            message = granting(2, num_steps)
            message.num_decode_steps = 2 if num_steps else 1
            await owner.send(message)
            error = await ending(owner.call)
            assert isinstance(error, InvalidArgument) and "grant.num_steps" in str(error)

    go(test())


def test_a_lost_stream_revokes_and_the_epoch_is_resumed_with_every_result() -> None:
    """More results than a pipeline holds: the owner has read none of them, so all are kept."""

    async def test() -> None:
        async with running(fast(time_scale=1.0, step_base_s=0.05)) as worker:
            await worker.make_ready()
            expected = await tokens_without_grants(worker, 12)
            owner = await run(worker.stub, "a", force=True)
            found = [tokens_by_row(await owner.ask(step(1, epoch=2, add=[PROMPT, OTHER])))]
            await owner.send(granting(2, 15, epoch=2))
            await asyncio.sleep(0.45)
            owner.call.cancel()
            await asyncio.sleep(0.4)
            boot = owner.welcome.identity.boot_id
            again = await run(worker.stub, "a", epoch=2, worker_boot_id=boot, last_step_id=1)
            assert again.welcome.resumed
            results = await answers(again)
            assert 4 < len(results) < 15
            assert [result.step_id for result in results] == list(range(2, 2 + len(results)))
            found += [tokens_by_row(result) for result in results]
            found.append(tokens_by_row(await again.ask(step(2 + len(results), epoch=2))))
            assert found[:12] == expected[: len(found)]

    go(test())
