"""What a gateway takes in: refused before any work where it is full, or where the scheduler has said that its queue is."""

import asyncio
import time

import grpc
import httpx
from grpc_health.v1 import health_pb2

from gateway_svc.engine.admission import GatewayCapacity
from gateway_svc.engine.outbox import Outbox
from gateway_svc.requests.engine_request import EngineRequest
from gateway_svc.settings import GatewaySettings
from protos.common.v1 import common_pb2
from protos.engine.v1 import engine_pb2
from protos.inference.v1 import inference_pb2 as pb
from svc_common import wire_arrays
from svc_common.clock import monotonic_ns
from svc_common.errors import QuireError, ResourceExhausted
from svc_common.net import rpc
from svc_common.tenant_load import Load, TenantLoad
from tests.gateway.engine.test_scheduler_link import wait_for_health
from tests.support.services.scripted_engine import asynchronous, finished, pair, tokens

HELLO = pb.GenerateRequest(text="hello", stop=pb.StopConditions(max_tokens=4))
MINUTE_NS = 60_000_000_000


async def _error_of(call: grpc.aio.UnaryUnaryCall) -> QuireError:
    try:
        await call
    except grpc.aio.AioRpcError as error:
        return rpc.from_rpc_error(error)
    raise AssertionError("it was answered")


def _closed(*tenants: str) -> engine_pb2.EngineMessage:
    return engine_pb2.EngineMessage(queue=engine_pb2.QueueState(closed_for=tenants, retry_after_ns=MINUTE_NS))


@asynchronous
async def test_a_full_queue_is_refused_here_until_it_is_not() -> None:
    """Both doors: RESOURCE_EXHAUSTED with the scheduler's retry time, at once, and nothing is sent; another tenant's queue is
    another matter, and so is a request that the scheduler may know."""
    async with pair() as (_, attachment, running):
        attachment.send(_closed(""))
        error = await _until_refused(running.stub, attachment)
        assert error.reason == "QUEUE_FULL" and 20 < (error.retry_after_s or 0) <= 60
        began = time.process_time()
        for _ in range(20):
            assert (await _error_of(running.stub.Generate(HELLO, timeout=20))).reason == "QUEUE_FULL"
        assert time.process_time() - began < 2, "no work is done for them"
        async with httpx.AsyncClient(base_url=f"http://{running.http}") as client:
            answer = await client.post("/v1/completions", json={"prompt": "x", "stream": True})
            assert answer.status_code == 429 and 20 < int(answer.headers["retry-after"]) <= 60
            answer = await client.post("/v1/embeddings", json={"input": "x"})
            assert answer.status_code == 429
        known = running.stub.Generate(HELLO, timeout=20, metadata=(("idempotency-key", "k"),))
        submit = await attachment.next_submit()
        known.cancel()
        assert submit.request_id == "k" and attachment.said.empty(), "no other was submitted"
        attachment.send(
            _closed("somebody-else"), engine_pb2.EngineMessage(state=engine_pb2.ServiceState(reason="heard"))
        )
        await wait_for_health(running, health_pb2.HealthCheckResponse.NOT_SERVING)
        call = running.stub.Generate(HELLO, timeout=20)
        while not (said := await attachment.next()).submits:
            pass
        handle = said.submits[0].handle
        attachment.send(tokens(handle, 0, [5]), finished(handle, 1, common_pb2.FINISH_REASON_LENGTH))
        assert (await call).choices[0].token_ids == [5]


async def _until_refused(stub: object, attachment: object) -> QuireError:
    """The word takes a moment to come; what was submitted until then is cancelled."""
    while True:
        call = stub.Generate(HELLO, timeout=20)  # type: ignore[attr-defined]
        asked = asyncio.ensure_future(_error_of(call))
        said = asyncio.ensure_future(attachment.next())  # type: ignore[attr-defined]
        await asyncio.wait({asked, said}, return_when=asyncio.FIRST_COMPLETED)
        if asked.done():
            said.cancel()
            return asked.result()
        call.cancel()
        asked.cancel()
        await attachment.next()  # type: ignore[attr-defined]


@asynchronous
async def test_what_it_holds_is_bounded_in_number() -> None:
    """GATEWAY_FULL, with a retry time; room again when one is over."""
    async with pair(max_live_requests=2) as (_, attachment, running):
        calls = [running.stub.Generate(HELLO, timeout=20) for _ in range(2)]
        submits = await attachment.next_submits(2)
        error = await _error_of(running.stub.Generate(HELLO, timeout=20))
        assert (error.status, error.reason) == ("RESOURCE_EXHAUSTED", "GATEWAY_FULL") and error.retry_after_s
        attachment.send(tokens(submits[0].handle, 0, [5]), finished(submits[0].handle, 1))
        await asyncio.wait(map(asyncio.ensure_future, calls), return_when=asyncio.FIRST_COMPLETED)
        third = running.stub.Generate(HELLO, timeout=20)
        assert await attachment.next_submit()
        for call in (third, *calls):
            call.cancel()


@asynchronous
async def test_what_it_holds_is_bounded_in_bytes() -> None:
    """One of any size fits where there is none."""
    async with pair(max_live_bytes=1_000) as (_, attachment, running):
        large = pb.GenerateRequest(token_ids=pb.TokenIds(ids=[300] * 600), stop=pb.StopConditions(max_tokens=1))
        first = running.stub.Generate(large, timeout=20)
        submit = await attachment.next_submit()
        error = await _error_of(running.stub.Generate(HELLO, timeout=20))
        assert (error.status, error.reason) == ("RESOURCE_EXHAUSTED", "GATEWAY_FULL")
        attachment.send(tokens(submit.handle, 0, [5]), finished(submit.handle, 1))
        assert (await first).choices[0].token_ids == [5]


@asynchronous
async def test_prompts_that_wait_for_a_scheduler_are_bounded_in_tokens() -> None:
    """While it is away: UNAVAILABLE beyond `max_waiting_tokens`, whatever `max_waiting_requests` says."""
    async with pair(max_waiting_tokens=12, scheduler_away_s=60.0) as (engine, attachment, running):
        await wait_for_health(running, health_pb2.HealthCheckResponse.SERVING)
        engine.welcome.identity.protocol_revision += 1
        attachment.break_off()
        await wait_for_health(running, health_pb2.HealthCheckResponse.NOT_SERVING)
        eight = pb.GenerateRequest(token_ids=pb.TokenIds(ids=[300] * 8), stop=pb.StopConditions(max_tokens=1))
        asked = [asyncio.ensure_future(_error_of(running.stub.Generate(eight, timeout=20))) for _ in range(2)]
        [refused], [waiting] = await asyncio.wait(asked, return_when=asyncio.FIRST_COMPLETED)
        assert (refused.result().status, refused.result().reason) == ("UNAVAILABLE", "SCHEDULER_AWAY")
        waiting.cancel()


def test_a_flood_leaves_room_for_others() -> None:
    """A gateway full of one tenant's requests, in number or in bytes, still takes another's up to that one's share."""
    for limits in ({"max_live_requests": 4}, {"max_live_bytes": 400}):
        admission = GatewayCapacity(GatewaySettings(**limits), TenantLoad())
        taken = {
            tenant: sum(_takes(admission, tenant, 100) for _ in range(10)) for tenant in ("flood", "quiet", "third")
        }
        assert taken == {"flood": 4, "quiet": 2, "third": 1}
        admission.give_back("flood", 100)
        assert (admission.num_live, admission.num_bytes) == (6, 600)
        assert not _takes(admission, "flood", 100)
        admission.hear(engine_pb2.QueueState(closed_for=["flood"], retry_after_ns=MINUTE_NS))
        admission.give_back("third", 100)
        assert _takes(admission, "third", 100), "what the scheduler says of one tenant is of no other"


def _takes(admission: GatewayCapacity, tenant: str, num_bytes: int) -> bool:
    try:
        admission.take(tenant, num_bytes, is_known=False)
    except ResourceExhausted as error:
        assert error.retry_after_s
        return False
    return True


def test_a_flood_waits_for_a_scheduler_beside_others() -> None:
    """Requests that wait to be submitted: each tenant has its share of the room; one that is submitted again counts once."""
    outbox, limit = Outbox(), Load(4, 1_000)
    flood = [_waiting("flood", handle) for handle in range(10)]
    for request in flood:
        if outbox.has_room("flood", 2, limit):
            outbox.submit(request)
    assert not outbox.has_room("flood", 2, limit) and outbox.has_room("quiet", 2, limit)
    outbox.submit(flood[0])
    outbox.withdraw(flood[1])
    assert outbox.has_room("flood", 2, limit)
    assert [submit.handle for submit in outbox.take().submits] == [0, 2, 3]
    assert outbox.has_room("flood", 998, limit)


def _waiting(tenant: str, handle: int) -> EngineRequest:
    submit = engine_pb2.Submit(handle=handle, tenant=tenant, request_id=str(handle), token_ids=wire_arrays.pack([1, 2]))
    return EngineRequest(submit, monotonic_ns() + MINUTE_NS)


def test_defaults_hold_ten_thousand_streams() -> None:
    """The default limit of live requests is at least 10,000."""
    assert GatewaySettings().max_live_requests >= 10_000
