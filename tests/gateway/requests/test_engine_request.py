"""The inbox of a request and the table of live ones: coalescing, exactly-once, the backlog's bound."""

import asyncio
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway_svc.engine.outbox import MAX_SUBMIT_BYTES, Outbox
from gateway_svc.engine.request_table import MESSAGES_PER_BACKLOG_CHECK, RequestTable
from gateway_svc.requests.engine_request import EngineRequest
from gateway_svc.requests.token_runs import ChoiceTokens
from protos.engine.v1 import engine_pb2
from svc_common import wire_arrays
from svc_common.clock import monotonic_ns
from svc_common.errors import AlreadyExists, Internal, ResourceExhausted
from tests.support.services.scripted_engine import asynchronous, tokens

FAR_NS = 60_000_000_000


def new_request() -> EngineRequest:
    return EngineRequest(engine_pb2.Submit(handle=1, request_id="r"), monotonic_ns() + FAR_NS)


@given(st.lists(st.tuples(st.integers(0, 12), st.integers(0, 6), st.booleans()), max_size=30))
def test_each_token_is_read_exactly_once_in_order(runs: list[tuple[int, int, bool]]) -> None:
    """Runs that overlap, repeat or leave gaps, read at any moment: offsets are dense and token i is i."""

    async def play() -> None:
        request, read, known = new_request(), [], 0
        for offset, count, read_now in runs:
            taken = request.add_tokens(0, ChoiceTokens(offset, list(range(offset, offset + count))))
            assert taken == (offset <= known)
            known = max(known, offset + count) if taken else known
            if read_now and request.num_unread_tokens:
                update = await request.next()
                assert update is not None
                assert update.choices[0].run.token_offset == len(read)
                read += update.choices[0].run.token_ids
        if request.num_unread_tokens:
            read += (await request.next()).choices[0].run.token_ids
        assert read == list(range(known))

    asyncio.run(play())


@asynchronous
async def test_tokens_come_before_the_error_and_the_first_end_wins() -> None:
    """What was made can still be read; then the error, every time."""
    request = new_request()
    request.add_tokens(0, ChoiceTokens(0, [1, 2]))
    request.fail(Internal("first"))
    request.fail(Internal("second"))
    request.finish(engine_pb2.Finished(last=True))
    assert (await request.next()).choices[0].run.token_ids == [1, 2]
    for _ in range(2):
        with pytest.raises(Internal, match="first"):
            await request.next()


@asynchronous
async def test_a_reader_that_is_cancelled_leaves_nothing_behind() -> None:
    """The next reader gets what came meanwhile."""
    request = new_request()
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(request.next(), 0.01)
    request.add_tokens(0, ChoiceTokens(0, [7]))
    assert (await request.next()).choices[0].run.token_ids == [7]
    assert await request.next(0.01) is None


@asynchronous
async def test_the_slowest_reader_ends_when_too_much_is_unread() -> None:
    """RESOURCE_EXHAUSTED for it alone; its tokens are dropped and the scheduler is told."""
    outbox = Outbox()
    table = RequestTable(outbox, max_unread_tokens=1000)
    slow, fast = (table.add(engine_pb2.Submit(request_id=name), monotonic_ns() + FAR_NS) for name in ("slow", "fast"))
    for request in (slow, fast):
        outbox.submit(request)
    outbox.take()
    for i in range(MESSAGES_PER_BACKLOG_CHECK):
        table.receive(tokens(slow.handle, 100 * i, [1] * 100))
        table.receive(tokens(fast.handle, i, [1]))
        await fast.next()
    with pytest.raises(ResourceExhausted):
        await slow.next()
    assert not fast.is_over
    assert [cancel.handle for cancel in outbox.take().cancels] == [slow.handle]
    for request in (slow, fast):
        table.release(request)
    assert len(table) == 0


@asynchronous
async def test_release_cancels_only_what_the_scheduler_may_know() -> None:
    """A request that was never sent is withdrawn; one that was sent is cancelled; one that is over is forgotten."""
    outbox = Outbox()
    table = RequestTable(outbox, max_unread_tokens=1000)
    unsent, sent, over = (table.add(engine_pb2.Submit(request_id=n), monotonic_ns() + FAR_NS) for n in "abc")
    with pytest.raises(AlreadyExists):
        table.add(engine_pb2.Submit(request_id="a"), monotonic_ns() + FAR_NS)
    for request in (sent, over):
        outbox.submit(request)
    assert [submit.handle for submit in outbox.take().submits] == [sent.handle, over.handle]
    outbox.submit(unsent)
    over.finish(engine_pb2.Finished(last=True))
    for request in (unsent, sent, over, sent):
        table.release(request)
    message = outbox.take()
    assert (list(message.submits), [cancel.handle for cancel in message.cancels]) == ([], [sent.handle])


@asynchronous
async def test_many_prompts_go_in_several_messages() -> None:
    """After a loss everything is submitted again, in arrival order, in messages of bounded size."""
    outbox = Outbox()
    prompt = wire_arrays.pack([1] * (MAX_SUBMIT_BYTES // 16))
    for handle in range(1, 11):
        outbox.submit(EngineRequest(engine_pb2.Submit(handle=handle, token_ids=prompt), monotonic_ns() + FAR_NS))
    outbox.say_goodbye()
    messages = []
    while not outbox.said_goodbye:
        await asyncio.wait_for(outbox.filled.wait(), 1)
        messages.append(outbox.take())
    assert [submit.handle for message in messages for submit in message.submits] == list(range(1, 11))
    assert len(messages) > 1
    assert all(message.ByteSize() < 2 * MAX_SUBMIT_BYTES for message in messages)


def test_the_pure_pieces_need_no_grpc() -> None:
    """`quire.LLM` uses them in process: no transport, no event loop, no torch."""
    program = (
        "import sys, gateway_svc.text.text_stream, gateway_svc.checks.validation, gateway_svc.text.text_model\n"
        "assert not {'grpc', 'asyncio', 'torch', 'transformers', 'starlette', 'uvicorn'} & set(sys.modules), sys.modules.keys()"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)
