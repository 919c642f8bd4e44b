"""Where errors go, before and after the scheduler has a request; and a gateway without a scheduler, or without the option."""

import asyncio
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import grpc
import httpx
import pytest

from gateway_svc.engine_calls import FailureTold
from gateway_svc.openengine.control_contract import OpenEngineControl
from protos.engine.v1 import engine_pb2
from protos.routers.v1 import openengine_pb2 as pb
from protos.routers.v1.openengine_pb2_grpc import ControlStub, InferenceStub
from svc_common.errors import QuireError, ResourceExhausted, Unavailable
from svc_common.net import rpc
from tests.support.services.harness import run_async, scheduler, worker
from tests.support.services.scripted_engine import asynchronous, finished, gateway, pair, tokens

pytestmark = pytest.mark.processes

BLOCK = 16
REQUEST = pb.GenerateRequest(prompt="abc", stopping=pb.StoppingOptions(max_tokens=9))


def failed(handle: int, error: QuireError) -> engine_pb2.EngineMessage:
    """The end of a request by an error."""
    return engine_pb2.EngineMessage(failed=[engine_pb2.Failed(handle=handle, error=rpc.to_error_status(error))])


@asynchronous
async def test_a_refusal_of_the_scheduler_is_a_status() -> None:
    """With what a client needs to retry; the priority arrives with its direction."""
    async with pair(openengine=True) as (_, attachment, running):
        call = InferenceStub(running.channel).Generate(REQUEST, metadata=(("openengine-priority", "7"),))
        reading = asyncio.ensure_future(call.read())
        submit = await attachment.next_submit()
        assert submit.priority == -7  # the scheduler's lower ones are sooner
        attachment.send(failed(submit.handle, ResourceExhausted("full", reason="QUEUE_FULL", retry_after_s=2.0)))
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await reading
    error = rpc.from_rpc_error(caught.value)
    assert (error.status, error.reason, error.retry_after_s) == ("RESOURCE_EXHAUSTED", "QUEUE_FULL", 2.0)


@asynchronous
async def test_a_failure_after_the_first_token_is_the_last_event() -> None:
    """With status OK; metrics count the call as failed."""
    async with pair(openengine=True) as (_, attachment, running), httpx.AsyncClient() as http:
        call = InferenceStub(running.channel).Generate(REQUEST)
        reading = asyncio.ensure_future(_events(call))
        handle = (await attachment.next_submit()).handle
        attachment.send(tokens(handle, 0, [65, 66]), failed(handle, Unavailable("gone", reason="NO_WORKER")))
        *_, last = events = await reading
        assert await call.code() is grpc.StatusCode.OK
        metrics = (await http.get(f"http://{running.http}/metrics")).text
    assert [event.WhichOneof("event") for event in events] == ["token", "error"]
    assert (last.error.code, last.error.retryable, last.error.message) == (
        pb.ERROR_CODE_INTERNAL,
        True,
        "NO_WORKER: gone",
    )
    assert (last.usage.prompt_tokens, last.usage.completion_tokens) == (1, 2)
    assert 'quire_gateway_calls_total{door="grpc",method="Generate",status="UNAVAILABLE"} 1' in metrics


async def _events(call: Any) -> list[pb.GenerateResponse]:
    return [event async for event in call]


@asynchronous
async def test_an_adapter_is_one_of_the_model() -> None:
    """It is submitted by its name, also beside that of its model."""
    async with pair(openengine=True) as (_, attachment, running):
        state = engine_pb2.ServiceState(serving=True, adapters=["sql"])
        attachment.send(engine_pb2.EngineMessage(state=state))
        stub, control = InferenceStub(running.channel), ControlStub(running.channel)
        while True:
            [model] = (await control.GetServerInfo(pb.GetServerInfoRequest())).supported_models or [""]
            if model:
                break
            await asyncio.sleep(0.01)
        for name in ("", model):
            asked = pb.GenerateRequest(prompt="abc", model=name, lora_name="sql")
            asked.stopping.max_tokens = 1
            reading = asyncio.ensure_future(_events(stub.Generate(asked)))
            submit = await attachment.next_submit()
            assert submit.adapter == "sql"
            attachment.send(tokens(submit.handle, 0, [65]), finished(submit.handle, 1))
            assert (await reading)[-1].finished.reason == pb.FINISH_REASON_LENGTH


@asynchronous
async def test_without_a_scheduler() -> None:
    """It is starting; the server tells what it knows; the load is unavailable."""
    async with gateway("127.0.0.1:1", openengine=True, unreachable_s=0.1) as running:
        control = ControlStub(running.channel)
        health = await control.Health(pb.HealthRequest(include_inference_probe=True))
        states = {check.name: check.state for check in health.checks}
        starting = pb.HEALTH_STATE_STARTING
        assert (states["grpc"], states["scheduler"], states["model"]) == (pb.HEALTH_STATE_READY, starting, starting)
        assert health.state == states["inference_probe"] == pb.HEALTH_STATE_NOT_READY
        server = await control.GetServerInfo(pb.GetServerInfoRequest())
        assert not server.supported_models and not server.capacity.HasField("total_kv_blocks")
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await control.GetLoad(pb.GetLoadRequest())
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE


@asynchronous
async def test_without_the_option_it_is_not_there() -> None:
    """As any other service that a gateway does not have."""
    async with gateway("127.0.0.1:1") as running:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await ControlStub(running.channel).GetServerInfo(pb.GetServerInfoRequest())
    assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED


# --- KV events -------------------------------------------------------------------------------------------------------


@run_async
async def test_subscribers_know_what_is_cached() -> None:
    """All full blocks of a request, each after the one before; a late subscriber learns the same."""
    async with (
        worker(block_size=BLOCK) as (worker_address,),
        scheduler(worker_address, kv_events=True) as (address, _),
        gateway(address, openengine=True) as running,
    ):
        stub, control = InferenceStub(running.channel), ControlStub(running.channel)
        early = control.SubscribeKvEvents(pb.SubscribeKvEventsRequest(), timeout=60)
        first = (await early.read()).batch
        assert [event.WhichOneof("event") for event in first.events] == ["all_blocks_cleared"]
        asked = pb.GenerateRequest(prompt="a" * 40, stopping=pb.StoppingOptions(max_tokens=20, ignore_eos=True))
        events = [event async for event in stub.Generate(asked)]
        text = [*b"a" * 40, *(info.token_id for event in events for info in event.token.tokens)][:-1]
        expected = [tuple(text[start : start + BLOCK]) for start in range(0, len(text) // BLOCK * BLOCK, BLOCK)]
        assert await _known(early, len(expected)) == expected
        late = control.SubscribeKvEvents(pb.SubscribeKvEventsRequest(start_sequence_number=7), timeout=60)
        assert await _known(late, len(expected)) == expected
        with pytest.raises(grpc.aio.AioRpcError, match="rank"):
            await control.SubscribeKvEvents(pb.SubscribeKvEventsRequest(data_parallel_ranks=[1])).read()


async def _known(stream: Any, num_blocks: int) -> list[tuple[int, ...]]:
    """The tokens of so many blocks, in their order in the sequence."""
    blocks: dict[bytes, tuple[bytes, tuple[int, ...]]] = {}
    while len(blocks) < num_blocks:
        for event in (await stream.read()).batch.events:
            stored = event.block_stored
            parent = stored.parent_block_hash.value
            for number, each in enumerate(stored.block_hashes):
                tokens = tuple(stored.token_ids[number * BLOCK : (number + 1) * BLOCK])
                blocks[each.value], parent = (parent, tokens), each.value
    after = {parent: (own, tokens) for own, (parent, tokens) in blocks.items()}
    found, place = [], b""
    while place in after:
        place, tokens = after[place]
        found.append(tokens)
    return found


@asynchronous
async def test_a_lost_scheduler_is_the_last_message_of_a_subscription() -> None:
    """Before the first batch it is a status."""
    for changes in ([engine_pb2.SubscribeKvEventsResponse(removed=[1])], []):

        async def kv_events(
            changes: list[engine_pb2.SubscribeKvEventsResponse] = changes,
        ) -> AsyncIterator[engine_pb2.SubscribeKvEventsResponse]:
            for change in changes:
                yield change
            raise Unavailable("gone", reason="SCHEDULER_AWAY")

        parts: Any = SimpleNamespace(kv_events=kv_events)
        control, told = OpenEngineControl(parts, SimpleNamespace()), []  # type: ignore[arg-type]
        with pytest.raises(FailureTold if changes else Unavailable):
            async for message in control.subscribe_kv_events(b"", SimpleNamespace()):  # type: ignore[arg-type]
                told.append(message)
        assert [message.WhichOneof("event") for message in told] == (["batch", "error"] if changes else [])
