"""What a gateway tells its scheduler about resumable requests, and makes of its answers, word by word."""

from typing import Any

import grpc.aio
import pytest

from protos.common.v1 import common_pb2
from protos.engine.v1 import engine_pb2
from protos.inference.v1 import inference_pb2 as pb
from svc_common import wire_arrays
from svc_common.net import rpc
from tests.support.services.reading import Read
from tests.support.services.scripted_engine import (
    Attachment,
    Gateway,
    ScriptedEngine,
    asynchronous,
    finished,
    pair,
    tokens,
)

STATE = engine_pb2.FrontendState(model="tiny")
PROMPT = [5, 6, 7]


def held(handle: int, num_made: int = 0) -> engine_pb2.EngineMessage:
    """Another client's request, with log probabilities, that arrived a second ago and has a minute left."""
    submit = engine_pb2.Submit(
        request_id="r",
        token_ids=wire_arrays.pack(PROMPT),
        sampling=common_pb2.ResolvedSampling(top_p=1.0, seed=42, logprobs=True),
        stop=common_pb2.StopRules(max_tokens=9),
        resumable=True,
        arrival_age_ns=10**9,
        remaining_ns=60 * 10**9,
    )
    made = engine_pb2.HeldRequest(
        handle=handle,
        request_id="r",
        token_offsets=wire_arrays.pack([num_made], wire_arrays.U32),
        frontend_state=STATE.SerializeToString(),
        submit=submit,
    )
    return engine_pb2.EngineMessage(attached=[made])


def resume(running: Gateway) -> Any:
    return running.stub.Resume(pb.ResumeRequest(request_id="r"), timeout=20)


async def read_tokens(call: Any, read: Read, num_tokens: int) -> None:
    async for event in call:
        read.take(event)
        if read.num_tokens >= num_tokens:
            return


async def reattached(scheduler: ScriptedEngine, attachment: Attachment) -> Attachment:
    """The gateway's next stream, after this one broke."""
    attachment.break_off()
    return await scheduler.attached()


@asynchronous
async def test_a_resumed_request_survives_its_scheduler() -> None:
    """A reader that came later submits it after a loss as if it were its own: prompt, age, tokens, what came beside them."""
    async with pair() as (scheduler, stream, running):
        attachment = stream
        call, read = resume(running), Read()
        [attach] = (await attachment.next()).attaches
        assert (attach.request_id, attach.tenant) == ("r", "")
        attachment.send(held(attach.handle, 3), tokens(attach.handle, 0, [20, 21, 22], [-1.0, -2.0, -3.0]))
        await read_tokens(call, read, 3)
        assert (read.started[0].effective_seed, read.started[0].max_tokens, read.started[0].model) == (42, 9, "tiny")
        attachment = await reattached(scheduler, attachment)
        submit = await attachment.next_submit()
        assert (submit.handle, submit.request_id, submit.resubmitted) == (attach.handle, "r", True)
        assert wire_arrays.unpack(submit.token_ids, "").tolist() == PROMPT and submit.sampling.seed == 42
        assert submit.arrival_age_ns > 10**9 and submit.remaining_ns < 60 * 10**9
        assert engine_pb2.FrontendState.FromString(submit.frontend_state) == STATE
        [committed] = submit.committed
        assert wire_arrays.unpack(committed.token_ids, "").tolist() == [20, 21, 22]
        assert wire_arrays.unpack(committed.logprobs, "", wire_arrays.F32).tolist() == [-1.0, -2.0, -3.0]
        attachment.send(tokens(submit.handle, 3, [23], [-4.0]), finished(submit.handle, 4))
        await read_tokens(call, read, 10)
        assert read.ids == {0: [20, 21, 22, 23]} and read.logprobs == {0: [-1.0, -2.0, -3.0, -4.0]}


@asynchronous
async def test_a_client_that_cancels_while_the_scheduler_is_away() -> None:
    """Detached, not cancelled; a further reader at this gateway goes on with the request as it is known here, its seed too."""
    async with pair() as (scheduler, stream, running):
        attachment = stream
        asked = pb.GenerateRequest(token_ids=pb.TokenIds(ids=PROMPT), resumable=True)
        first = running.stub.GenerateStream(asked, timeout=20, metadata=(("x-request-id", "r"),))
        submit = await attachment.next_submit()
        assert submit.resumable and engine_pb2.FrontendState.FromString(submit.frontend_state) == STATE
        attachment.send(
            engine_pb2.EngineMessage(attached=[engine_pb2.HeldRequest(handle=submit.handle)]),
            tokens(submit.handle, 0, [20, 21]),
        )
        await read_tokens(first, Read(), 2)
        scheduler.welcome.held.add(
            handle=submit.handle, request_id="r", token_offsets=wire_arrays.pack([2], wire_arrays.U32)
        )
        attachment.break_off()
        second, read = resume(running), Read()
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await read_tokens(first, Read(_sequence=3), 9)
        assert rpc.from_rpc_error(error.value).reason == "ATTACHED_ELSEWHERE"
        attachment = await scheduler.attached()
        message = await attachment.next()
        [again] = message.submits
        assert not message.cancels
        assert again.handle != submit.handle and not again.resubmitted and again.sampling.seed == submit.sampling.seed
        assert again.arrival_age_ns > 0 and not again.committed
        attachment.send(held(again.handle, 2), tokens(again.handle, 0, [20, 21]))
        await read_tokens(second, read, 2)
        second.cancel()
        message = await attachment.next()
        assert [detach.handle for detach in message.detaches] == [again.handle] and not message.cancels


@asynchronous
async def test_only_what_is_resumable_is_detached() -> None:
    """A dropped stream cancels what is not; Cancel ends what is; before an answer came, a request is not submitted *again*."""
    async with pair() as (scheduler, stream, running):
        attachment = stream
        asked = pb.GenerateRequest(token_ids=pb.TokenIds(ids=PROMPT))
        plain = running.stub.GenerateStream(asked, timeout=20)
        handle = (await attachment.next_submit()).handle
        plain.cancel()
        message = await attachment.next()
        assert [cancel.handle for cancel in message.cancels] == [handle] and not message.detaches
        asked.resumable = True
        kept = running.stub.GenerateStream(asked, timeout=20, metadata=(("x-request-id", "kept"),))
        await attachment.next_submit()
        attachment = await reattached(scheduler, attachment)
        submit = await attachment.next_submit()
        assert not submit.resubmitted, "it may be another client's; the scheduler decides"
        await running.stub.Cancel(pb.CancelRequest(request_id="kept"), timeout=20)
        assert [cancel.handle for cancel in (await attachment.next()).cancels] == [submit.handle]
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await read_tokens(kept, Read(), 1)
        assert error.value.code() is grpc.StatusCode.CANCELLED
