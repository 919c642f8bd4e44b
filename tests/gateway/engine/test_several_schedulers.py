"""A gateway of several schedulers: requests go to the one that serves their model, and one that is away harms no other."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from grpc_health.v1 import health_pb2

from protos.common.v1 import common_pb2
from protos.engine.v1 import engine_pb2
from protos.inference.v1 import inference_pb2 as pb
from quire.local_stack import ports
from svc_common import wire_arrays
from svc_common.errors import NotFound
from svc_common.net import rpc
from tests.gateway.engine.test_scheduler_link import IDS, error_of, health_of, output, read_events
from tests.support.services.scripted_engine import (
    Attachment,
    Gateway,
    ScriptedEngine,
    asynchronous,
    engine,
    finished,
    gateway,
    tokens,
)

pytestmark = pytest.mark.processes

SERVING, NOT_SERVING = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING


@contextlib.asynccontextmanager
async def two(**changes: Any) -> AsyncIterator[tuple[list[ScriptedEngine], list[Attachment], Gateway]]:
    """Schedulers of the models "one", with the adapter "poet", and "two", attached to a gateway with the alias "usual"."""
    async with engine() as one, engine() as other:
        one.welcome.limits.model, other.welcome.limits.model = "one", "two"
        one.welcome.state.adapters.append("poet")
        async with gateway(one.address, other.address, model_aliases=("usual",), **changes) as running:
            attachments = [await one.attached(), await other.attached()]
            while len((await running.stub.ListModels(pb.ListModelsRequest())).models) < 3:
                await asyncio.sleep(0.02)
            yield [one, other], attachments, running


def asked(model: str, request_id: str = "") -> dict[str, Any]:
    request = pb.GenerateRequest(model=model, text="hello", stop=pb.StopConditions(max_tokens=9))
    return {"request": request, "timeout": 20, "metadata": (("x-request-id", request_id),) if request_id else ()}


@asynchronous
@pytest.mark.parametrize(
    ("model", "number", "adapter"), [("one", 0, ""), ("two", 1, ""), ("poet", 0, "poet"), ("usual", 0, ""), ("", 0, "")]
)
async def test_each_request_goes_to_the_scheduler_of_its_model(model: str, number: int, adapter: str) -> None:
    """Adapters, aliases and requests without a model too; the other hears nothing. So do embeddings, over HTTP."""
    async with two() as (_, attachments, running):
        call = running.stub.GenerateStream(**asked(model))
        submit = await attachments[number].next_submit()
        assert submit.adapter == adapter
        attachments[number].send(tokens(submit.handle, 0, IDS), finished(submit.handle, len(IDS)))
        events = await read_events(call)
        assert output(events) == ("one two three four", IDS)
        assert events[0].started.model == (adapter or ("one", "two")[number])
        async with httpx.AsyncClient(base_url=f"http://{running.http}") as client:
            body = {"input": "x", "model": model} if model else {"input": "x"}
            answer = asyncio.ensure_future(client.post("/v1/embeddings", json=body))
            await attachments[number].next_submit()
            answer.cancel()
        assert attachments[1 - number].said.empty()


@asynchronous
async def test_all_models_are_listed() -> None:
    """Under all names; an unknown one is refused with these."""
    async with two() as (_, _, running):
        async with httpx.AsyncClient(base_url=f"http://{running.http}") as client:
            cards = (await client.get("/v1/models")).json()["data"]
        assert [(card["id"], card["root"]) for card in cards] == [
            *(("one", "one"), ("poet", "poet"), ("two", "two"), ("usual", "one"))
        ]
        error = await error_of(running.stub.Generate(**asked("three")))
        assert (error.status, error.metadata["served"]) == ("NOT_FOUND", "one, poet, two, usual")


@asynchronous
async def test_a_scheduler_that_is_away() -> None:
    """Health by name says so; requests for its model wait for it, and the other model is served meanwhile."""
    async with two() as (engines, attachments, running):
        engines[0].welcome.identity.protocol_revision += 1  # so that it is refused from now on
        attachments[0].break_off()
        while await health_of(running, "one") != NOT_SERVING:
            await asyncio.sleep(0.02)
        assert [await health_of(running, name) for name in ("poet", "two", "")] == [NOT_SERVING, SERVING, SERVING]
        waiting = asyncio.ensure_future(read_events(running.stub.GenerateStream(**asked("one"))))
        call = running.stub.GenerateStream(**asked("two"))
        submit = await attachments[1].next_submit()
        attachments[1].send(tokens(submit.handle, 0, IDS), finished(submit.handle, len(IDS)))
        assert output(await read_events(call)) == ("one two three four", IDS)
        assert not waiting.done()
        engines[0].welcome.identity.protocol_revision -= 1
        while await health_of(running, "one") != SERVING:
            await asyncio.sleep(0.02)
        while not engines[0].attachments.empty():  # those that it refused, then the one that it serves
            attachment = await engines[0].attached()
        assert (await attachment.next_submit()).num_choices == 1
        waiting.cancel()


@asynchronous
async def test_a_model_that_may_be_that_of_a_scheduler_not_reached_yet() -> None:
    """UNAVAILABLE, not NOT_FOUND, as nobody knows; what is known is served."""
    async with engine() as one:
        with ports.reserved("127.0.0.1", {"--port": 0}) as chosen:
            async with gateway(one.address, f"127.0.0.1:{chosen['--port']}", unreachable_s=0.3) as running:
                attachment = await one.attached()
                error = await error_of(running.stub.Generate(**asked("two")))
                assert (error.status, error.reason) == ("UNAVAILABLE", "NO_MODEL")
                call = running.stub.GenerateStream(**asked("tiny"))
                submit = await attachment.next_submit()
                attachment.send(tokens(submit.handle, 0, IDS), finished(submit.handle, len(IDS)))
                assert output(await read_events(call))[1] == IDS
                assert await health_of(running) == SERVING


@asynchronous
async def test_resuming_asks_each_scheduler() -> None:
    """Nothing in the call tells which has the request; where none has it, that is the answer."""
    async with two() as (_, attachments, running):
        call = running.stub.Resume(pb.ResumeRequest(request_id="r"), timeout=20)
        [first] = (await attachments[0].next()).attaches
        unknown = NotFound("there is no request r", reason="RESUME_EXPIRED")
        failed = engine_pb2.Failed(handle=first.handle, error=rpc.to_error_status(unknown))
        attachments[0].send(engine_pb2.EngineMessage(failed=[failed]))
        [second] = (await attachments[1].next()).attaches
        held = engine_pb2.HeldRequest(
            handle=second.handle,
            request_id="r",
            token_offsets=wire_arrays.pack([0], wire_arrays.U32),
            frontend_state=engine_pb2.FrontendState(model="two").SerializeToString(),
            submit=engine_pb2.Submit(
                request_id="r",
                token_ids=wire_arrays.pack([5]),
                sampling=common_pb2.ResolvedSampling(top_p=1.0),
                stop=common_pb2.StopRules(max_tokens=9),
                resumable=True,
            ),
        )
        attachments[1].send(engine_pb2.EngineMessage(attached=[held]))
        attachments[1].send(tokens(second.handle, 0, IDS), finished(second.handle, len(IDS)))
        events = await read_events(call)
        assert (events[0].started.model, output(events)[1]) == ("two", IDS)

        call = running.stub.Resume(pb.ResumeRequest(request_id="s"), timeout=20)
        for attachment in attachments:
            [attach] = (await attachment.next()).attaches
            failed = engine_pb2.Failed(handle=attach.handle, error=rpc.to_error_status(unknown))
            attachment.send(engine_pb2.EngineMessage(failed=[failed]))
        error = await error_of(call)
        assert (error.status, error.reason) == ("NOT_FOUND", "RESUME_EXPIRED")


@asynchronous
async def test_a_cancel_by_id() -> None:
    """Of a request of this gateway at its scheduler alone; of any other at all."""
    async with two() as (_, attachments, running):
        call = running.stub.GenerateStream(**asked("two", "mine"))
        submit = await attachments[1].next_submit()
        await running.stub.Cancel(pb.CancelRequest(request_id="mine"))
        assert (await error_of(call)).reason == "CANCELLED"
        assert [cancel.handle for cancel in (await attachments[1].next()).cancels] == [submit.handle]
        assert attachments[0].said.empty()
        await running.stub.Cancel(pb.CancelRequest(request_id="theirs"))
        for attachment in attachments:
            assert [cancel.request_id for cancel in (await attachment.next()).cancels] == ["theirs"]


@asynchronous
async def test_the_room_is_that_of_the_gateway() -> None:
    """`max_live_requests` counts requests at all schedulers."""
    async with two(max_live_requests=1) as (_, attachments, running):
        running.stub.GenerateStream(**asked("one"))
        await attachments[0].next_submit()
        error = await error_of(running.stub.Generate(**asked("two")))
        assert (error.status, error.reason) == ("RESOURCE_EXHAUSTED", "GATEWAY_FULL")
