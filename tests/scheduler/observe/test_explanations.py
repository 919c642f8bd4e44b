"""ExplainRequest of a running scheduler: why a request waits, while it waits and after."""

import time
from typing import Any

import grpc
import pytest

from protos.inference.v1 import admin_pb2
from quire.operators.why import why_json, why_table
from tests.support.services.harness import Admin, Gateway, eventually, run_async, scheduler, stack

PROMPT = list(range(32, 52))
SLOW = {"time_scale": 1.0, "step_base_s": 0.01, "num_gpu_blocks": 512}


async def explain(admin: Admin, request_id: str, tenant: str = "") -> admin_pb2.ExplainRequestResponse:
    return await admin.stub.ExplainRequest(admin_pb2.ExplainRequestRequest(request_id=request_id, tenant=tenant))


def reasons(answer: admin_pb2.ExplainRequestResponse) -> list[str]:
    return [episode.reason for episode in answer.episodes]


@run_async
async def test_a_wait_is_explained_while_it_lasts_and_when_it_is_over() -> None:
    """MAX_SEQS with its numbers for the head, BEHIND for the next, then RUNNING, and times that add up."""
    async with stack(SLOW, max_num_seqs=1) as s:
        before_ns = time.time_ns()
        lengths = {"a": 1_000, "b": 5, "c": 5}
        handles = [await s.gateway.submit(PROMPT, max_tokens=n, request_id=name) for name, n in lengths.items()]
        await eventually(lambda: s.gateway.outputs[handles[0]].tokens, "a runs")
        answer = await explain(s.admin, "b")
        assert reasons(answer)[-1] == "MAX_SEQS" and not answer.episodes[-1].HasField("to_step")
        behind = why_json(await explain(s.admin, "c"))["episodes"][-1]
        assert behind["reason"] == "BEHIND" and behind["to_ns"] is None
        assert behind["numbers"] == {"head": "b", "head_reason": "MAX_SEQS", "running": 1, "limit": 1}
        await s.gateway.leave(handles[0])
        for handle in handles[1:]:
            await s.gateway.end_of(handle)
        over = (await explain(s.admin, "b")).episodes
        waits = [e for e in over if e.queue == "waiting"]
        assert reasons(await explain(s.admin, "b"))[-1] == "RUNNING"
        account = s.gateway.outputs[handles[1]].finished.account
        waited_ns = sum(e.to_ns - e.from_ns for e in waits)
        assert waited_ns == pytest.approx(account.queue_ns, rel=0.2)
        assert before_ns <= over[0].from_ns <= over[-1].from_ns <= time.time_ns()
        assert why_table(await explain(s.admin, "b")).row_count == len(over)


@run_async
async def test_time_without_a_worker_has_its_own_reason() -> None:
    """A request that no worker could serve says so, in the service's own words."""
    async with (
        scheduler("127.0.0.1:9", no_worker_timeout_s=20.0) as (address, admin_address),
        Admin(admin_address) as admin,
        Gateway(address) as gateway,
    ):
        await gateway.submit(PROMPT, request_id="early")
        found: list[Any] = []

        async def explained() -> None:
            found[:] = (await explain(admin, "early")).episodes

        while not found or found[-1].reason != "NO_WORKER":
            try:
                await explained()
            except grpc.aio.AioRpcError as error:
                assert error.code() is grpc.StatusCode.NOT_FOUND  # not here yet
        assert why_json(await explain(admin, "early"))["episodes"][-1]["numbers"]["why"]


@run_async
async def test_any_id_that_a_door_printed_finds_its_request() -> None:
    """OpenAI's answers have a prefix before the id; the parts of a call with several prompts have a number behind it."""
    async with stack() as s:
        for request_id in ("mine", "cmpl-own", "two-0", "two-1", "two-2"):
            await s.gateway.end_of(await s.gateway.submit(PROMPT, request_id=request_id))
        for printed in ("mine", "cmpl-mine", "chatcmpl-mine", "embd-mine", "msg_mine"):
            assert (await explain(s.admin, printed)).id == "mine"
        assert (await explain(s.admin, "cmpl-own")).id == "cmpl-own", "a caller's own id"
        several = await explain(s.admin, "cmpl-two")
        assert (several.id, list(several.others)) == ("two-0", ["two-1", "two-2"])
        assert not (await explain(s.admin, "two-1")).others


@run_async
async def test_an_unknown_request_is_refused() -> None:
    """An unknown id is NOT_FOUND, an empty one INVALID_ARGUMENT; the tenant belongs to the id."""
    async with stack() as s:
        await s.gateway.end_of(await s.gateway.submit(PROMPT, request_id="mine"))
        for request_id, tenant, code in (
            ("nobody", "", grpc.StatusCode.NOT_FOUND),
            ("mine", "", None),
            ("", "", grpc.StatusCode.INVALID_ARGUMENT),
        ):
            if code is None:
                assert (await explain(s.admin, request_id, tenant)).id == "mine"
                continue
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await explain(s.admin, request_id, tenant)
            assert caught.value.code() is code
