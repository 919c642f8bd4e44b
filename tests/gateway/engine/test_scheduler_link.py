"""The stream to the scheduler: losses, gaps, refusals, cancels. Real gateway, scripted scheduler."""

import asyncio
from typing import Any

import grpc
import grpc.aio
import httpx
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from gateway_svc.engine.scheduler_link import SchedulerLink
from gateway_svc.settings import GatewaySettings
from protos.common.v1 import common_pb2
from protos.engine.v1 import engine_pb2
from protos.inference.v1 import inference_pb2 as pb
from protos.inference.v1 import inference_pb2_grpc
from quire.local_stack import ports
from svc_common import wire_arrays
from svc_common.errors import QuireError, ResourceExhausted
from svc_common.net import rpc
from svc_common.tenant_load import TenantLoad
from tests.support.services.models import tiny
from tests.support.services.scripted_engine import (
    PATIENCE_S,
    Gateway,
    asynchronous,
    engine,
    finished,
    gateway,
    limits,
    pair,
    tokens,
)

pytestmark = pytest.mark.processes

HELLO = pb.GenerateRequest(text="hello", sampling=pb.SamplingParams(temperature=0))
IDS = tiny().encode("one two three four")


async def read_events(call: Any) -> list[pb.GenerateEvent]:
    return [event async for event in call]


def output(events: list[pb.GenerateEvent]) -> tuple[str, list[int]]:
    """Text and tokens; checks that each token came exactly once and events are numbered densely."""
    assert [event.sequence for event in events] == list(range(len(events)))
    text, ids = "", []
    for event in events:
        if event.HasField("delta"):
            assert event.delta.token_offset == len(ids)
            text += event.delta.text
            ids += event.delta.token_ids
    return text, ids


async def error_of(call: Any) -> QuireError:
    with pytest.raises(grpc.RpcError) as caught:
        await asyncio.wait_for(call if hasattr(call, "__await__") else read_events(call), PATIENCE_S)
    return rpc.from_rpc_error(caught.value)


async def health_of(running: Gateway, service: str = "") -> int:
    answer = await health_pb2_grpc.HealthStub(running.channel).Check(health_pb2.HealthCheckRequest(service=service))
    return answer.status


async def wait_for_health(running: Gateway, status: int) -> None:
    while await health_of(running) != status:
        await asyncio.sleep(0.02)


# --- a request's life ------------------------------------------------------------------------------------------------


@asynchronous
async def test_what_is_submitted() -> None:
    """Everything resolved: prompt, sampling, rules, priority in the core's polarity, deadline, seed."""
    async with pair() as (_, attachment, running):
        request = pb.GenerateRequest(
            token_ids=pb.TokenIds(ids=[5, 6, 7]),
            sampling=pb.SamplingParams(temperature=0.5, top_p=0.9, top_k=7, seed=2**64 - 1),
            stop=pb.StopConditions(max_tokens=9, min_tokens=2, stop_token_ids=[3], ignore_eos=True),
            scheduling=pb.Scheduling(priority=5),
            cache=pb.CacheOptions(cache_salt="s", no_reuse=True),
            response=pb.ResponseOptions(logprobs=True),
        )
        call = running.stub.GenerateStream(request, timeout=8, metadata=(("x-request-id", "mine"),))
        submit = await attachment.next_submit()
        assert submit.request_id == "mine"
        assert wire_arrays.unpack(submit.token_ids, "x").tolist() == [5, 6, 7]
        assert submit.sampling == common_pb2.ResolvedSampling(
            temperature=0.5, top_p=0.9, top_k=7, seed=2**64 - 1, logprobs=True, repetition_penalty=1
        )
        assert submit.stop == common_pb2.StopRules(max_tokens=9, min_tokens=2, ignore_eos=True, stop_token_ids=[3])
        assert (submit.priority, submit.cache_salt, submit.no_cache_reuse) == (-5, "s", True)
        assert (submit.num_choices, submit.resubmitted, list(submit.committed)) == (1, False, [])
        assert 6e9 < submit.remaining_ns < 8e9
        attachment.send(tokens(submit.handle, 0, IDS, [-0.5] * len(IDS)), finished(submit.handle, len(IDS)))
        events = await read_events(call)
        assert output(events) == ("one two three four", IDS)
        kinds = [event.WhichOneof("event") for event in events]
        assert (kinds[0], kinds[-2:]) == ("started", ["finished", "usage"])
        assert events[0].started == pb.Started(request_id="mine", effective_seed=2**64 - 1, model="tiny", max_tokens=9)
        assert [p for e in events for p in e.delta.logprobs] == [-0.5] * len(IDS)
        assert events[-1].usage.completion_tokens == len(IDS)
        assert (events[-1].usage.cached_prompt_tokens, events[-1].usage.timing.queue_ms) == (1, 5.0)
        assert dict(await call.trailing_metadata()) == {
            "x-queue-ms": "5.000",
            "x-preemptions": "2",
            "x-migrations": "0",
        }
        assert dict(await call.initial_metadata())["x-request-id"] == "mine"


@asynchronous
async def test_a_lost_stream_is_resumed_without_losing_or_repeating_a_token() -> None:
    """Re-attached under the same frontend id, resubmitted with what the client has, overlap dropped."""
    async with pair() as (scheduler, first, running):
        call = running.stub.GenerateStream(HELLO, timeout=20)
        submit = await first.next_submit()
        first.send(tokens(submit.handle, 0, IDS[:2]))
        stream = aiter(call)
        while not (await anext(stream)).HasField("delta"):
            pass
        first.break_off()
        second = await scheduler.attached()
        assert second.hello.frontend_id == first.hello.frontend_id
        again = await second.next_submit()
        assert (again.handle, again.request_id, again.resubmitted) == (submit.handle, submit.request_id, True)
        assert wire_arrays.unpack(again.committed[0].token_ids, "x").tolist() == IDS[:2]
        assert again.arrival_age_ns > 0
        assert (again.sampling.seed, again.token_ids) == (submit.sampling.seed, submit.token_ids)
        second.send(tokens(again.handle, 1, IDS[1:4]), finished(again.handle, 4))
        rest = await read_events(stream)
        assert [i for event in rest for i in event.delta.token_ids] == IDS[2:4]
        assert rest[-1].HasField("usage")


@asynchronous
async def test_missing_tokens_are_asked_for_again() -> None:
    """A run that begins beyond what is known is not shown; submitting again attaches from where the known ones end."""
    async with pair() as (_, attachment, running):
        call = running.stub.Generate(HELLO, timeout=20)
        submit = await attachment.next_submit()
        attachment.send(tokens(submit.handle, 0, IDS[:1]), tokens(submit.handle, 3, IDS[3:4]))
        again = await attachment.next_submit()
        assert again.handle == submit.handle
        assert wire_arrays.unpack(again.committed[0].token_ids, "x").tolist() == IDS[:1]
        attachment.send(tokens(submit.handle, 1, IDS[1:4]), finished(submit.handle, 4))
        assert list((await call).choices[0].token_ids) == IDS[:4]


@asynchronous
async def test_a_stop_string_ends_the_choice_at_its_offset() -> None:
    """Told to the scheduler as Stopped; the account comes with its answer; what it makes meanwhile is dropped."""
    async with pair() as (_, attachment, running):
        request = pb.GenerateRequest(text="x", stop=pb.StopConditions(stop_strings=[" three"]))
        call = running.stub.Generate(request, timeout=20)
        submit = await attachment.next_submit()
        attachment.send(tokens(submit.handle, 0, IDS))
        stopped = (await attachment.next()).stops[0]
        kept = tiny().encode("one two")
        assert (stopped.handle, stopped.token_offset) == (submit.handle, len(kept))
        attachment.send(tokens(submit.handle, len(IDS), [7, 7]), finished(submit.handle, len(kept)))
        answer = await call
        assert (answer.choices[0].text, list(answer.choices[0].token_ids)) == ("one two", kept)
        assert answer.choices[0].finished.stop_string == " three"
        assert answer.choices[0].finished.reason == common_pb2.FINISH_REASON_STOP
        assert (answer.usage.completion_tokens, answer.usage.cached_prompt_tokens) == (len(kept), 1)


@asynchronous
async def test_a_choice_stopped_before_a_loss_ends_without_being_run_again() -> None:
    """Its result is complete; only the account is lost."""
    async with pair() as (scheduler, attachment, running):
        request = pb.GenerateRequest(text="x", stop=pb.StopConditions(stop_strings=[" three"]))
        call = running.stub.Generate(request, timeout=20)
        submit = await attachment.next_submit()
        attachment.send(tokens(submit.handle, 0, IDS))
        await attachment.next()
        attachment.break_off()
        second = await scheduler.attached()
        message = await second.next()
        assert not message.submits
        assert [cancel.handle for cancel in message.cancels] == [submit.handle]
        assert (await call).choices[0].text == "one two"


@asynchronous
async def test_a_slow_reader_gets_fewer_messages_and_every_token() -> None:
    """Per stream one message is in flight; everything new is in the next. Nothing is generated slower, nothing is lost."""
    ids, num_runs = [5 + i % 90 for i in range(100)], 400
    window = [("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 16_384)]
    async with pair() as (_, attachment, running), grpc.aio.insecure_channel(running.grpc, options=window) as channel:
        call = inference_pb2_grpc.InferenceServiceStub(channel).GenerateStream(HELLO, timeout=25)
        handle = (await attachment.next_submit()).handle
        attachment.send(*(tokens(handle, 100 * i, ids) for i in range(num_runs)), finished(handle, 100 * num_runs))
        while attachment.outgoing.qsize():
            await asyncio.sleep(0.05)  # the client does not read meanwhile
        events = await read_events(call)
    assert output(events)[1] == ids * num_runs
    assert sum(event.HasField("delta") for event in events) < num_runs


# --- errors ----------------------------------------------------------------------------------------------------------


@asynchronous
async def test_a_refusal_arrives_typed_through_both_doors() -> None:
    """RESOURCE_EXHAUSTED with RetryInfo; HTTP 429 with Retry-After in OpenAI's shape, before any stream begins."""
    refusal = ResourceExhausted("the queue is full", reason="QUEUE_FULL", retry_after_s=2.5)
    async with pair() as (_, attachment, running):
        call = running.stub.GenerateStream(HELLO, timeout=20)
        submit = await attachment.next_submit()
        failed = engine_pb2.Failed(handle=submit.handle, error=rpc.to_error_status(refusal))
        attachment.send(engine_pb2.EngineMessage(failed=[failed]))
        error = await error_of(call)
        assert (type(error), error.reason, error.retry_after_s) == (ResourceExhausted, "QUEUE_FULL", 2.5)
        assert error.metadata["request_id"] == submit.request_id
        async with httpx.AsyncClient(base_url=f"http://{running.http}") as client:
            asking = asyncio.create_task(client.post("/v1/completions", json={"prompt": "x", "stream": True}))
            failed.handle = (await attachment.next_submit()).handle
            attachment.send(engine_pb2.EngineMessage(failed=[failed]))
            answer = await asking
        assert (answer.status_code, answer.headers["retry-after"]) == (429, "3")
        assert answer.json()["error"]["code"] == "queue_full"


@asynchronous
async def test_a_failure_in_the_middle_is_an_error_and_no_finish() -> None:
    """Over gRPC as the status, over HTTP as the stream's last event without [DONE]."""
    lost = engine_pb2.Failed(error=common_pb2.ErrorStatus(status="INTERNAL", reason="NOT_FINITE", message="NaN"))
    async with pair() as (_, attachment, running):
        async with httpx.AsyncClient(base_url=f"http://{running.http}", timeout=10) as client:
            asking = asyncio.create_task(client.post("/v1/completions", json={"prompt": "x", "stream": True}))
            lost.handle = (await attachment.next_submit()).handle
            attachment.send(tokens(lost.handle, 0, IDS[:1]), engine_pb2.EngineMessage(failed=[lost]))
            body = (await asking).text
        assert '"code":"not_finite"' in body.strip().splitlines()[-1]
        assert "[DONE]" not in body
        assert '"finish_reason":"' not in body


@pytest.mark.parametrize(
    ("reason", "status"),
    [(common_pb2.FINISH_REASON_CANCELLED, "CANCELLED"), (common_pb2.FINISH_REASON_UNSPECIFIED, "INTERNAL")],
)
@asynchronous
async def test_only_normal_ends_are_finish_reasons(reason: int, status: str) -> None:
    """Never report a failure as OK."""
    async with pair() as (_, attachment, running):
        call = running.stub.Generate(HELLO, timeout=20)
        handle = (await attachment.next_submit()).handle
        attachment.send(tokens(handle, 0, IDS[:1]), finished(handle, 1, reason))
        assert (await error_of(call)).status == status


@asynchronous
async def test_a_deadline_is_ours_and_typed() -> None:
    """The client sees our reason, not the transport's bare status; the scheduler is told to stop."""
    async with pair() as (_, attachment, running):
        # Long enough for a busy machine to submit both, and to deliver a token of one, before.
        queued = running.stub.Generate(HELLO, timeout=6, metadata=(("x-request-id", "queued"),))
        running_one = running.stub.GenerateStream(HELLO, timeout=6, metadata=(("x-request-id", "running"),))
        handles = {submit.request_id: submit.handle for submit in await attachment.next_submits(2)}
        attachment.send(tokens(handles["running"], 0, IDS[:1]))
        error, later = await error_of(queued), await error_of(running_one)
        assert (error.status, error.reason) == ("DEADLINE_EXCEEDED", "EXPIRED_IN_QUEUE")
        assert (later.status, later.reason) == ("DEADLINE_EXCEEDED", "DURING_DECODE")
        cancelled: set[int] = set()
        while len(cancelled) < 2:
            cancelled |= {cancel.handle for cancel in (await attachment.next()).cancels}
        assert cancelled == set(handles.values())


@asynchronous
async def test_leaving_cancels_at_once_through_both_doors() -> None:
    """A dropped stream, a cancelled unary call and a closed HTTP connection each reach the scheduler right away."""
    async with pair() as (_, attachment, running):
        stream, unary = running.stub.GenerateStream(HELLO), running.stub.Generate(HELLO)
        handles: set[int] = set()
        while len(handles) < 2:
            handles |= {submit.handle for submit in (await attachment.next()).submits}
        stream.cancel()
        unary.cancel()
        cancelled: set[int] = set()
        while cancelled != handles:
            cancelled |= {cancel.handle for cancel in (await attachment.next()).cancels}
        for stream_wish in (True, False):
            body = {"prompt": "x", "stream": stream_wish}
            async with httpx.AsyncClient(base_url=f"http://{running.http}") as client:
                asking = asyncio.create_task(client.post("/v1/completions", json=body))
                submit = await attachment.next_submit()
                asking.cancel()
                await asyncio.gather(asking, return_exceptions=True)
            assert [cancel.handle for cancel in (await attachment.next()).cancels] == [submit.handle]


@asynchronous
async def test_cancel_by_id() -> None:
    """Ours ends with CANCELLED; another gateway's is passed on to the scheduler; nothing is an error."""
    async with pair() as (_, attachment, running):
        call = running.stub.Generate(HELLO, metadata=(("x-request-id", "victim"),))
        submit = await attachment.next_submit()
        await running.stub.Cancel(pb.CancelRequest(request_id="victim"))
        assert (await error_of(call)).status == "CANCELLED"
        assert (await attachment.next()).cancels[0].handle == submit.handle
        await running.stub.Cancel(pb.CancelRequest(request_id="elsewhere"))
        assert (await attachment.next()).cancels[0] == engine_pb2.Cancel(request_id="elsewhere")


@asynchronous
async def test_an_id_in_use_is_refused() -> None:
    """The id names one request at a time."""
    async with pair() as (_, attachment, running):
        metadata = (("x-request-id", "twice"),)
        first = running.stub.Generate(HELLO, metadata=metadata)
        handle = (await attachment.next_submit()).handle
        assert (await error_of(running.stub.Generate(HELLO, metadata=metadata))).status == "ALREADY_EXISTS"
        attachment.send(tokens(handle, 0, IDS[:1]), finished(handle, 1))
        assert list((await first).choices[0].token_ids) == IDS[:1]


# --- the scheduler comes and goes ------------------------------------------------------------------------------------


@asynchronous
async def test_requests_wait_for_a_scheduler_that_comes_later() -> None:
    """The gateway is up first and queues; the request that waited is served."""
    with ports.reserved("127.0.0.1", {"--port": 0}) as chosen:
        port = chosen["--port"]
        async with gateway(f"127.0.0.1:{port}") as running:
            assert await health_of(running) == health_pb2.HealthCheckResponse.NOT_SERVING
            assert await health_of(running, "liveness") == health_pb2.HealthCheckResponse.SERVING
            call = running.stub.Generate(HELLO, timeout=20)
            await asyncio.sleep(0.3)
            async with engine(port) as scheduler:
                attachment = await scheduler.attached()
                submit = await attachment.next_submit()
                assert not submit.resubmitted
                attachment.send(tokens(submit.handle, 0, IDS[:1]), finished(submit.handle, 1))
                assert list((await call).choices[0].token_ids) == IDS[:1]
                await wait_for_health(running, health_pb2.HealthCheckResponse.SERVING)


@asynchronous
async def test_waiting_is_bounded_in_number_and_time() -> None:
    """Beyond either bound: UNAVAILABLE with a retry time. Where no worker is loading a model the time is short."""
    async with gateway("127.0.0.1:1", max_waiting_requests=1, unreachable_s=0.5) as running:
        waiting = running.stub.Generate(HELLO, timeout=20)
        await asyncio.sleep(0.1)
        for call in (running.stub.Generate(HELLO, timeout=20), waiting):
            error = await error_of(call)
            assert (error.status, error.reason) == ("UNAVAILABLE", "NO_MODEL")
            assert error.retry_after_s is not None


@asynchronous
async def test_a_request_waits_long_only_while_a_worker_is_loading() -> None:
    """Waits while the model is being loaded, and fails at once where there is no worker."""
    async with engine() as scheduler:
        scheduler.welcome.ClearField("limits")
        scheduler.welcome.state.CopyFrom(engine_pb2.ServiceState(reason="the worker is loading", warming=True))
        async with gateway(scheduler.address, unreachable_s=0.2, warm_up_s=60.0) as running:
            attachment = await scheduler.attached()
            call = running.stub.Generate(HELLO, timeout=20)
            await asyncio.sleep(0.5)
            assert not call.done(), "a worker is loading"
            attachment.send(engine_pb2.EngineMessage(state=engine_pb2.ServiceState(reason="the worker died")))
            error = await error_of(call)
            assert (error.status, error.reason, error.message) == ("UNAVAILABLE", "NO_MODEL", "the worker died")


@asynchronous
async def test_requests_outlive_a_lost_scheduler_for_a_bounded_time() -> None:
    """Then they end with UNAVAILABLE; and meanwhile only so many new ones may wait."""
    async with (
        engine() as scheduler,
        gateway(scheduler.address, scheduler_away_s=1.0, max_waiting_requests=2) as running,
    ):
        attachment = await scheduler.attached()
        call = running.stub.Generate(HELLO, timeout=20)
        await attachment.next_submit()
        scheduler.welcome.identity.protocol_revision += 1  # from now on it is a peer that does not fit
        attachment.break_off()
        await wait_for_health(running, health_pb2.HealthCheckResponse.NOT_SERVING)
        later = [running.stub.Generate(HELLO, timeout=20) for _ in range(3)]
        errors = [await error_of(one) for one in (call, *later)]
        assert {(error.status, error.reason) for error in errors} == {("UNAVAILABLE", "SCHEDULER_AWAY")}
        assert "revision" in errors[0].message


@asynchronous
async def test_health_follows_the_scheduler() -> None:
    """SERVING only while the scheduler says that steps complete; /health/ready says why not."""
    async with pair() as (_, attachment, running):
        await wait_for_health(running, health_pb2.HealthCheckResponse.SERVING)
        state = engine_pb2.ServiceState(serving=False, reason="the worker is lost")
        attachment.send(engine_pb2.EngineMessage(state=state))
        await wait_for_health(running, health_pb2.HealthCheckResponse.NOT_SERVING)
        async with httpx.AsyncClient(base_url=f"http://{running.http}") as client:
            ready = await client.get("/health/ready")
            assert (ready.status_code, ready.json()["reason"]) == (503, "the worker is lost")
            assert (await client.get("/health/live")).status_code == 200


@asynchronous
async def test_a_bundle_that_is_not_what_was_asked_for_is_not_used() -> None:
    """Content-addressed: the digest must fit."""
    async with engine() as scheduler:
        scheduler.welcome.limits.bundle_digest = "0" * 64
        async with gateway(scheduler.address, warm_up_s=0.5) as running:
            attachment = await scheduler.attached()
            error = await error_of(running.stub.Generate(HELLO, timeout=20))
            while error.message == "the tokenizer of model tiny is being loaded":  # slow machine: not fetched yet
                error = await error_of(running.stub.Generate(HELLO, timeout=20))
            assert error.status == "UNAVAILABLE"
            assert "digest" in error.message
            attachment.send(engine_pb2.EngineMessage(state=engine_pb2.ServiceState(serving=True, limits=limits())))
            await wait_for_health(running, health_pb2.HealthCheckResponse.SERVING)


@asynchronous
async def test_held_requests_without_a_reader_are_cancelled() -> None:
    """A scheduler that still holds a request whose client left is told so."""
    async with engine() as scheduler:
        scheduler.welcome.held.add(handle=77, request_id="gone", token_offsets=wire_arrays.pack([0], wire_arrays.U32))
        async with gateway(scheduler.address):
            message = await (await scheduler.attached()).next()
            assert [cancel.handle for cancel in message.cancels] == [77]


@asynchronous
async def test_stopping_says_goodbye() -> None:
    """SIGTERM: no new requests, goodbye, so that the scheduler frees everything at once."""
    async with pair() as (_, attachment, running):
        call = running.stub.Generate(HELLO, timeout=20)
        await attachment.next_submit()
        running.stop.set()
        message = await attachment.next()
        assert message.HasField("goodbye")
        error = await error_of(call)
        assert (error.status, error.reason) == ("UNAVAILABLE", "DRAINING")
        await running.task


@asynchronous
async def test_a_stop_is_not_forgotten_while_the_stream_ends() -> None:
    """Cancelled in any turn of the event loop after the stream has broken: the link ends, and does not attach again."""
    async with engine() as scheduler, grpc.aio.insecure_channel(scheduler.address) as channel:
        for turns in range(12):
            link = SchedulerLink(GatewaySettings(), scheduler.address, rpc.Identity(), channel, TenantLoad())
            running = asyncio.create_task(link.run())
            await scheduler.attached()
            while not link.state.attached:
                await asyncio.sleep(0)
            link.move()
            for _ in range(turns):
                await asyncio.sleep(0)
            running.cancel()
            done, _ = await asyncio.wait([running], timeout=PATIENCE_S)
            assert done, f"cancelled {turns} turns after the stream broke"
            assert running.cancelled()


@asynchronous
async def test_a_broken_message_of_the_scheduler_ends_the_stream_not_the_gateway() -> None:
    """Columns that do not fit are refused; the gateway attaches anew and the request goes on."""
    async with pair() as (scheduler, attachment, running):
        call = running.stub.Generate(HELLO, timeout=20)
        handle = (await attachment.next_submit()).handle
        broken = tokens(handle, 0, IDS[:2])
        broken.tokens.token_ids = b"abc"
        attachment.send(broken)
        second = await scheduler.attached()
        assert (await second.next_submit()).handle == handle
        second.send(tokens(handle, 0, IDS[:1]), finished(handle, 1))
        assert list((await call).choices[0].token_ids) == IDS[:1]
