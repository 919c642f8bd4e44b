"""One stream's outgoing side: bounded, ordered, and ended once."""

import asyncio
from collections.abc import Coroutine
from typing import Any

import pytest

from protos.worker.v1 import worker_pb2
from svc_common.errors import Aborted, Unavailable
from worker_svc.shell.step_stream import StepStream


def go(test: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(test, 60))


def result(step_id: int) -> worker_pb2.WorkerOutputs:
    return worker_pb2.WorkerOutputs(step_id=step_id)


async def has_room(stream: StepStream) -> bool:
    try:
        await asyncio.wait_for(stream.room(), 0.01)
    except TimeoutError:
        return False
    return True


def test_nothing_more_is_read_while_four_steps_are_in_hand_or_unsent() -> None:
    """Results cannot pile up for a scheduler that sends and never reads."""

    async def test() -> None:
        stream = StepStream(1, max_open=4)
        stream.expect(2)
        stream.send(result(1))
        assert await has_room(stream)
        stream.send(result(2))
        assert not await has_room(stream)
        stream.answer(result(3))
        assert not await has_room(stream), "answered, but not sent yet"
        messages = stream.messages()
        assert (await anext(messages)).step_id == 1
        assert await has_room(stream)

    go(test())


def test_finish_waits_for_expected_results() -> None:
    async def test() -> None:
        stream = StepStream(1, max_open=4)
        stream.expect(1)
        stream.finish()
        asyncio.get_running_loop().call_later(0.02, stream.answer, result(1))
        assert [message.step_id async for message in stream.messages()] == [1]

    go(test())


def test_first_error_stands_and_comes_after_what_is_unsent() -> None:
    async def test() -> None:
        stream = StepStream(1, max_open=4)
        stream.send(result(1))
        stream.fail(Aborted("first"))
        stream.fail(Unavailable("second"))
        stream.send(result(2))
        messages = stream.messages()
        assert (await anext(messages)).step_id == 1
        with pytest.raises(Aborted, match="first"):
            await anext(messages)

    go(test())


def test_replaced_stream_drops_what_is_unsent() -> None:
    async def test() -> None:
        stream = StepStream(1, max_open=4)
        stream.expect(1)
        stream.send(result(1))
        stream.fail(Aborted("replaced"), drop_unsent=True)
        assert await has_room(stream), "its reader wakes up and ends"
        with pytest.raises(Aborted):
            await anext(stream.messages())

    go(test())
