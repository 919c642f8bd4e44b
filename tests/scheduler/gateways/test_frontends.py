"""Gateways come, go, read slowly and talk nonsense: what each request and each stream then gets."""

import asyncio
import os
import random
from collections.abc import Callable

import grpc
import numpy as np
import pytest

from protos.common.v1 import common_pb2
from protos.engine.v1 import engine_pb2
from scheduler_svc.core.plan import SequenceTokens
from scheduler_svc.gateways.gateway_table import GatewayTable
from scheduler_svc.observe.spans import RequestSpans
from scheduler_svc.readiness import Readiness
from scheduler_svc.requests.request_book import RequestBook
from scheduler_svc.settings import SchedulerSettings
from svc_common import wire_arrays
from svc_common.clock import monotonic_ns
from svc_common.errors import QuireError
from svc_common.net import rpc
from svc_common.observability import telemetry
from svc_common.version import SPOKEN
from tests.support.services.harness import TIMEOUT_S, Gateway, Stack, eventually, run_async, stack

PROMPT = list(range(32, 72))
SLOW = {"time_scale": 1.0, "step_base_s": 0.01, "num_gpu_blocks": 512}


async def refusal(s: Stack, *messages: engine_pb2.FrontendMessage | bytes) -> QuireError:
    """What ends a stream that says `messages`."""
    channel = rpc.channel(s.address)
    call = channel.stream_stream(
        "/quire.engine.v1.EngineService/Attach",
        request_serializer=lambda m: m if isinstance(m, bytes) else m.SerializeToString(),
        response_deserializer=engine_pb2.EngineMessage.FromString,
    )()
    try:
        with pytest.raises(grpc.RpcError) as error:
            for message in messages:
                await call.write(message)
            while await call.read() is not grpc.aio.EOF:
                continue
        return rpc.from_rpc_error(error.value)
    finally:
        call.cancel()
        await channel.close()


def hello(revision: int = SPOKEN.newest, frontend_id: str = "other") -> engine_pb2.FrontendMessage:
    identity = common_pb2.PeerIdentity(protocol_revision=revision, build="9.9", boot_id="b")
    return engine_pb2.FrontendMessage(hello=engine_pb2.FrontendHello(identity=identity, frontend_id=frontend_id))


@run_async
async def test_malformed_streams_are_refused_and_disturb_no_other() -> None:
    """No hello, a wrong revision (both values named), no id, a second hello, bytes that are no message."""
    async with stack(SLOW) as s:
        handle = await s.gateway.submit(PROMPT, max_tokens=60)
        assert (await refusal(s, engine_pb2.FrontendMessage())).violations[0].field == "hello"
        other = await refusal(s, hello(revision=SPOKEN.newest + 1))
        assert other.status == "FAILED_PRECONDITION"
        assert other.metadata == {"theirs": str(SPOKEN.newest + 1), "ours": str(SPOKEN.newest)}
        assert (await refusal(s, hello(frontend_id=""))).violations[0].field == "hello.frontend_id"
        assert (await refusal(s, hello(), hello())).status == "INVALID_ARGUMENT"
        for bad in ((hello(), b"\xff\xff\xff"), (b"\xff\xff\xff",)):
            assert (await refusal(s, *bad)).reason == "MALFORMED_MESSAGE"
        assert len((await s.gateway.end_of(handle)).tokens) == 60


@run_async
async def test_random_messages_never_disturb_the_others() -> None:
    """Fields of every kind with random content: typed failures or nothing, a neighbour's tokens come, no block is left."""
    rng = random.Random(3)

    def junk() -> engine_pb2.Submit:
        handle = rng.choice([0, 1, 1, rng.randrange(2**32)])
        message = engine_pb2.Submit(
            handle=handle,
            request_id="".join(rng.choice("ab/~:\0é") for _ in range(rng.randrange(4))),
            tenant=rng.choice(["", "t", "x" * 600]),
            token_ids=rng.choice([b"", rng.randbytes(7), rng.randbytes(8), wire_arrays.pack([1, 2, 3])]),
            num_choices=rng.choice([0, 1, 2**31]),
            remaining_ns=rng.choice([0, 1, 2**63]),
            priority=rng.choice([-(2**31), 0, 2**31 - 1]),
            arrival_age_ns=rng.choice([0, 2**62]),
            frontend_state=rng.randbytes(3),
            resumable=rng.random() < 0.5,
            resubmitted=rng.random() < 0.5,
        )
        if rng.random() < 0.8:
            temperature = rng.choice([0.0, 1.0, float("inf"), float("nan")])
            message.sampling.CopyFrom(common_pb2.ResolvedSampling(temperature=temperature, top_p=rng.random(), top_k=9))
            message.stop.CopyFrom(common_pb2.StopRules(max_tokens=rng.choice([0, 1, 5]), stop_token_ids=[2**32 - 1]))
        if rng.random() < 0.3:
            message.committed.add(choice=rng.choice([0, 3]), token_ids=rng.choice([b"\1", wire_arrays.pack([5])]))
        return message

    async with stack(SLOW, frontend_grace_s=0.1) as s:
        handle = await s.gateway.submit(PROMPT, max_tokens=100)
        async with Gateway(s.address, "junk") as other:
            for _ in range(75):
                submits = [junk() for _ in range(rng.randrange(3))]
                for submit in submits:
                    other.outputs.setdefault(submit.handle, type(s.gateway.outputs[handle])())
                stop = engine_pb2.Stopped(
                    handle=rng.randrange(3), choice=rng.randrange(2), token_offset=rng.randrange(9)
                )
                cancel = engine_pb2.Cancel(handle=rng.randrange(3), request_id=rng.choice(["", "a", "b"]))
                await other.send(submits=submits, stops=[stop], cancels=[cancel])
        assert len((await s.gateway.end_of(handle)).tokens) == 100
        await eventually_free(s)


@run_async
async def test_a_gateway_that_does_not_read_delays_no_other() -> None:
    """Generation goes on, other gateways get their tokens, and everything is there once it reads again."""
    async with stack({"num_gpu_blocks": 512}) as s, Gateway(s.address, "slow") as slow:
        handles = [await slow.submit([40 + i, *PROMPT], max_tokens=60, logprobs=True) for i in range(8)]
        await eventually(lambda: slow.num_messages > 1, "first message")
        slow.paused.clear()
        fast = await s.gateway.submit(PROMPT, max_tokens=120)
        assert len((await s.gateway.end_of(fast)).tokens) == 120
        await s.admin.assert_all_free()
        slow.paused.set()
        for handle in handles:
            assert len((await slow.end_of(handle)).tokens) == 60


@run_async
async def test_one_message_carries_everything_new() -> None:
    """Cursor, not queue: however many steps passed since the last write, the next message has one run per request."""
    readiness = Readiness()
    book = RequestBook(SchedulerSettings(), RequestSpans(telemetry.setup("scheduler")), monotonic_ns)
    frontend, attachment = GatewayTable(book, readiness, 1.0, lambda delay, call: None).attach("f")
    message = engine_pb2.Submit(handle=1, request_id="r", token_ids=wire_arrays.pack(PROMPT))
    message.sampling.top_p, message.stop.max_tokens = 1.0, 10**6
    frontend.receive(engine_pb2.FrontendMessage(submits=[message]))
    [live] = book.inputs.take_pending()
    book.entered(live)
    book.scheduled("r", 1, 0, "worker-1")
    for step in range(1_000):
        book.put_tokens(SequenceTokens("r/0", "r", 0, step, [step]), step, None)
    assert attachment.wake.is_set()
    written = frontend.collect()
    assert written is not None
    assert wire_arrays.unpack(written.tokens.token_ids, "").tolist() == list(range(1_000))
    assert wire_arrays.unpack(written.tokens.counts, "").tolist() == [1_000]
    assert len(written.started) == 1 and frontend.collect() is None
    book.put_tokens(SequenceTokens("r/0", "r", 0, 1_000, [7]), 1_001, None)
    written = frontend.collect()
    assert written is not None and wire_arrays.unpack(written.tokens.token_offsets, "").tolist() == [1_000]


@run_async
async def test_losing_the_stream_cancels_what_cannot_be_resumed() -> None:
    """Disconnect: non-resumable requests are cancelled at once, resumable ones go on and are named in Welcome.held."""
    async with stack(SLOW) as s, Gateway(s.address, "second") as second:
        goes = await second.submit(PROMPT, max_tokens=3000, request_id="goes")
        await second.tokens_of(goes, 1)
        stays = await second.submit(PROMPT, max_tokens=80, request_id="stays", resumable=True, frontend_state=b"mine")
        await second.tokens_of(stays, 3)
        await second.lose_stream()
        await eventually_tables(s, "stays/0")
        known = len(second.outputs[stays].tokens)
        welcome = await second.attach()
        [held] = welcome.held
        assert (held.handle, held.request_id, held.frontend_state) == (stays, "stays", b"mine")
        assert int(np.frombuffer(held.token_offsets, "<u4")[0]) >= known
        submit = second.make_submit(
            PROMPT, handle=stays, max_tokens=80, request_id="stays", resumable=True, resubmitted=True
        )
        submit.committed.add(token_ids=wire_arrays.pack(second.outputs[stays].tokens))
        await second.send(submits=[submit])
        output = await second.end_of(stays)
        assert len(output.tokens) == 80 and output.finished.account.completion_tokens == 80
        assert output.finished.account.num_preemptions == 0
        await s.admin.assert_all_free()


@run_async
async def test_no_reader_returns_within_the_grace_time() -> None:
    """Held requests are cancelled when the grace time is over, also when the gateway came back without asking for them."""
    async with stack({**SLOW, "step_base_s": 0.03}, frontend_grace_s=1.0) as s:
        for comes_back in (False, True):
            async with Gateway(s.address, "second") as second:
                handle = await second.submit(PROMPT, max_tokens=3000, request_id=f"r{comes_back}", resumable=True)
                await second.tokens_of(handle, 1)
                await second.lose_stream()
                if comes_back:
                    assert len((await second.attach()).held) == 1
                assert len((await s.admin.blocks()).tables) == 1
                await eventually_free(s)


@run_async
async def test_an_ended_resumable_request_can_be_read_again() -> None:
    """It ended while its reader was away: submitting it again gives the rest and the same end, without a new computation."""
    async with stack({"num_gpu_blocks": 512}) as s:
        async with Gateway(s.address, "second") as second:
            handle = await second.submit(PROMPT, max_tokens=20, request_id="r", resumable=True)
            whole = (await second.end_of(handle)).tokens
        num_steps = len(await s.admin.steps())
        again = await s.gateway.submit(PROMPT, max_tokens=20, request_id="r", resumable=True, committed=whole[:5])
        s.gateway.outputs[again].tokens += whole[:5]
        output = await s.gateway.end_of(again)
        assert output.tokens == whole and output.finished is not None
        assert len(await s.admin.steps()) == num_steps


@run_async
async def test_a_second_reader_takes_a_request_over() -> None:
    """Attach from another gateway: it is told what the request is and reads it from its beginning, the first reader gets ABORTED.

    A Submit of the same id once more does the same, also when it has ended; one of another prompt is refused.
    """
    async with stack(SLOW) as s, Gateway(s.address, "second") as second:
        state = {"resumable": True, "frontend_state": b"state"}
        first = await s.gateway.submit(PROMPT, max_tokens=60, request_id="r", **state)
        await s.gateway.tokens_of(first, 10)
        handle = await second.attach_to("r")
        output = await second.end_of(handle)
        assert len(output.tokens) == 60 and second.attached[handle].frontend_state == b"state"
        submit = second.attached[handle].submit
        assert wire_arrays.unpack(submit.token_ids, "").tolist() == PROMPT and submit.stop.max_tokens == 60
        assert (submit.handle, submit.frontend_state, submit.arrival_age_ns > 0) == (0, b"", True)
        lost = s.gateway.outputs[first]
        assert lost.failed is not None and lost.failed.error.reason == "ATTACHED_ELSEWHERE" and lost.num_ends == 1
        for values in (state, {"resubmitted": True}):
            again = await s.gateway.submit(PROMPT, max_tokens=60, request_id="r", **values)
            assert (await s.gateway.end_of(again)).tokens == output.tokens
        assert s.gateway.attached[first].submit.ByteSize() == 0, "it was new"
        other = await second.submit([1, 2, 3], request_id="r", resumable=True)
        assert (await second.end_of(other)).failed.error.reason == "REQUEST_ID_IN_USE"


@run_async
async def test_a_gateway_that_was_away_does_not_take_a_request_back() -> None:
    """Its reader resumed elsewhere meanwhile: submitted again, it gets ABORTED, and the new reader goes on."""
    async with stack(SLOW) as s, Gateway(s.address, "second") as second:
        old = await second.submit(PROMPT, max_tokens=90, request_id="r", resumable=True)
        tokens = list((await second.tokens_of(old, 5)).tokens)
        await second.lose_stream()
        handle = await s.gateway.attach_to("r")
        await s.gateway.tokens_of(handle, 10)
        assert len((await second.attach()).held) == 0
        submit = second.make_submit(PROMPT, handle=old, max_tokens=90, request_id="r", resumable=True, resubmitted=True)
        submit.committed.add(token_ids=wire_arrays.pack(tokens))
        await second.send(submits=[submit])
        lost = await second.end_of(old)
        assert lost.failed is not None and lost.failed.error.reason == "ATTACHED_ELSEWHERE"
        assert len((await s.gateway.end_of(handle)).tokens) == 90


@run_async
async def test_a_request_whose_reader_went_alone_is_held() -> None:
    """Detach: it goes on, from whichever gateway it is read; goodbye does not end it, the end of the grace time does."""
    async with stack({**SLOW, "step_base_s": 0.03}, frontend_grace_s=1.0) as s:
        async with Gateway(s.address, "second") as second:
            handle = await second.submit(PROMPT, max_tokens=3000, request_id="r", resumable=True)
            await second.tokens_of(handle, 3)
            await second.send(detaches=[engine_pb2.Detach(handle=handle)])
            await second.send(goodbye={})
        reader = await s.gateway.attach_to("r")
        await s.gateway.tokens_of(reader, 20)
        await asyncio.sleep(1.1)
        assert [table.sequence for table in (await s.admin.blocks()).tables] == ["r/0"]
        await s.gateway.send(detaches=[engine_pb2.Detach(handle=reader)])
        await eventually_free(s)
        late = await s.gateway.attach_to("r")
        failed = (await s.gateway.end_of(late)).failed
        assert failed is not None and (failed.error.status, failed.error.reason) == ("NOT_FOUND", "RESUME_EXPIRED")


@run_async
async def test_which_gateways_may_not_attach() -> None:
    """Another tenant, requests that are not resumable, handles in use: refused alone."""
    async with stack(SLOW) as s:
        plain = await s.gateway.submit(PROMPT, max_tokens=40, request_id="plain")
        await s.gateway.submit(PROMPT, max_tokens=40, request_id="r", tenant="ada", resumable=True)
        for values, reason in (
            ({"request_id": "plain"}, "RESUME_EXPIRED"),
            ({"request_id": "r"}, "RESUME_EXPIRED"),
            ({"request_id": "r", "tenant": "ada", "handle": 0}, "INVALID_FIELD"),
        ):
            handle = await s.gateway.attach_to(**values)
            failed = (await s.gateway.end_of(handle)).failed
            assert failed is not None and failed.error.reason == reason
        mine = await s.gateway.attach_to("r", tenant="ada")
        assert len((await s.gateway.end_of(mine)).tokens) == len((await s.gateway.end_of(plain)).tokens) == 40


@run_async
async def test_committed_tokens_keep_what_came_beside_them() -> None:
    """After a scheduler's loss a later reader, which begins anew, gets the log probabilities of tokens of before too."""
    sampling = common_pb2.ResolvedSampling(top_p=1.0, seed=7, logprobs=True, num_top_logprobs=1)
    async with stack({"num_gpu_blocks": 512}) as s:
        submit = s.gateway.make_submit(
            PROMPT, sampling=sampling, max_tokens=6, request_id="r", resumable=True, resubmitted=True
        )
        submit.committed.add(
            token_ids=wire_arrays.pack([5, 6]),
            logprobs=wire_arrays.pack([-0.25, -0.5], wire_arrays.F32),
            top_counts=wire_arrays.pack([1, 1], wire_arrays.U32),
            top_token_ids=wire_arrays.pack([5, 9]),
            top_logprobs=wire_arrays.pack([-0.25, -0.125], wire_arrays.F32),
        )
        s.gateway.outputs[submit.handle].tokens += [5, 6]
        await s.gateway.send(submits=[submit])
        await s.gateway.end_of(submit.handle)
        reader = await s.gateway.attach_to("r")
        output = await s.gateway.end_of(reader)
        assert output.tokens[:2] == [5, 6] and output.logprobs[:2] == [-0.25, -0.5] and len(output.logprobs) == 6
        submit.committed[0].logprobs += b"0000"
        submit.handle, submit.request_id = 1_000, "other"
        await s.gateway.send(submits=[submit])
        failed = (await s.gateway.end_of(s.gateway.expect(1_000))).failed
        assert failed is not None and failed.error.field_violations[0].field == "committed.logprobs"


@run_async
async def test_goodbye_cancels_everything_at_once() -> None:
    """Resumable or not, all of it ends and the stream is closed."""
    async with stack(SLOW) as s, Gateway(s.address, "second") as second:
        handle = await second.submit(PROMPT, max_tokens=3000, resumable=True)
        await second.tokens_of(handle, 1)
        reader = second._reader
        await second.send(goodbye={})
        await asyncio.wait_for(reader, TIMEOUT_S)
        await eventually_free(s)


@run_async
async def test_a_second_stream_of_a_frontend_replaces_the_first() -> None:
    """A half-dead connection cannot block its gateway: the newer stream wins."""
    async with (
        stack({"num_gpu_blocks": 512}) as s,
        Gateway(s.address, "same") as old,
        Gateway(s.address, "same") as new,
    ):
        with pytest.raises(grpc.RpcError) as error:
            await old._reader
        assert rpc.from_rpc_error(error.value).reason == "FRONTEND_REPLACED"
        assert len((await new.end_of(await new.submit(PROMPT))).tokens) == 8
        assert s.gateway.welcome.identity.boot_id == new.welcome.identity.boot_id


@run_async
async def test_what_cannot_be_resumed_goes_on_over_a_second_stream() -> None:
    """A gateway that is back before its loss was noticed asks at once for all that it had, under the same ids."""
    async with stack(SLOW) as s, Gateway(s.address, "same") as old:
        handle = await old.submit(PROMPT, max_tokens=60, request_id="r")
        await old.tokens_of(handle, 3)
        async with Gateway(s.address, "same") as new:
            tokens = list(old.outputs[handle].tokens)
            submit = new.make_submit(PROMPT, handle=handle, max_tokens=60, request_id="r", resubmitted=True)
            submit.committed.add(token_ids=wire_arrays.pack(tokens))
            new.outputs[handle].tokens.extend(tokens)
            await new.send(submits=[submit])
            output = await new.end_of(handle)
            assert output.failed is None and output.finished.reason == common_pb2.FINISH_REASON_LENGTH
            assert len(output.tokens) == 60
            await s.admin.assert_all_free()
            with pytest.raises(grpc.RpcError):
                await old._reader


def num_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


@pytest.mark.parametrize("num_gateways", [2, pytest.param(20, marks=pytest.mark.long)])
@run_async
async def test_a_storm_of_cancels_leaks_nothing(
    num_gateways: int, record_property: Callable[[str, object], None]
) -> None:
    """Fifty requests of each gateway, ended at random by handle, id, stop or disconnect: no block, task or descriptor is left."""
    rng = random.Random(11)
    async with stack({"num_gpu_blocks": 200}, max_num_seqs=64) as s:
        await s.gateway.end_of(await s.gateway.submit(PROMPT))
        await s.admin.assert_all_free()
        tasks, descriptors = len(asyncio.all_tasks()), num_descriptors()
        for _ in range(num_gateways):
            async with Gateway(s.address, "storm") as storm:
                handles = []
                for _ in range(50):
                    prompt = [rng.randrange(32, 120) for _ in range(rng.randrange(1, 60))]
                    request_id = f"r{rng.randrange(10**9)}"
                    handles.append((await storm.submit(prompt, max_tokens=500, request_id=request_id), request_id))
                    if rng.random() < 0.8:
                        await cancel_one(storm, *rng.choice(handles), rng)
                    if rng.random() < 0.3:
                        await asyncio.sleep(rng.random() * 0.005)
        await eventually_free(s)
        assert len((await s.gateway.end_of(await s.gateway.submit(PROMPT))).tokens) == 8
        await eventually(lambda: len(asyncio.all_tasks()) <= tasks, "tasks are gone")
        await eventually(lambda: num_descriptors() <= descriptors, "descriptors are closed")
    record_property("size", f"storm of cancels: {50 * num_gateways} requests of {num_gateways} gateways")


async def cancel_one(gateway: Gateway, handle: int, request_id: str, rng: random.Random) -> None:
    match rng.randrange(3):
        case 0:
            await gateway.send(cancels=[engine_pb2.Cancel(handle=handle)])
        case 1:
            await gateway.send(cancels=[engine_pb2.Cancel(request_id=request_id)])
        case 2:
            await gateway.send(stops=[engine_pb2.Stopped(handle=handle, token_offset=rng.randrange(5))])


async def eventually_tables(s: Stack, *sequences: str) -> None:
    """Waits until these hold blocks, and only these."""
    async with asyncio.timeout(TIMEOUT_S):
        while [table.sequence for table in (await s.admin.blocks()).tables] != [*sequences]:
            await asyncio.sleep(0.01)


async def eventually_free(s: Stack) -> None:
    await eventually_tables(s)
    await s.admin.assert_all_free()
