"""What operators see of a running scheduler at one instant: requests that wait and why, times of steps, cached blocks."""

import time
from typing import Any

from protos.inference.v1 import admin_pb2
from tests.support.services.harness import Admin, Gateway, Stack, eventually, run_async, scheduler, stack

PROMPT = list(range(32, 72))
SLOW = {"time_scale": 1.0, "step_base_s": 0.01}


async def listed(admin: Admin, at_most: int = 0) -> admin_pb2.ListRequestsResponse:
    return await admin.stub.ListRequests(admin_pb2.ListRequestsRequest(max_requests=at_most))


async def explained(admin: Admin, request_id: str) -> tuple[str, str, list[Any]]:
    """The last episode of its timeline."""
    answer = await admin.stub.ExplainRequest(admin_pb2.ExplainRequestRequest(request_id=request_id))
    last = answer.episodes[-1]
    return last.queue, last.reason, list(last.numbers)


async def submit(s: Stack, names: str, **values: Any) -> list[int]:
    return [
        await s.gateway.submit([100 + i, *PROMPT], request_id=name, **values) for i, name in enumerate(names.split())
    ]


@run_async
async def test_every_reason_is_the_last_one_of_the_requests_timeline() -> None:
    """P1: `quire top` and `quire why` never tell two stories: the head's reason, those behind it, those that run."""
    async with stack(SLOW, max_num_seqs=2) as s:
        handles = await submit(s, "a b c d e", max_tokens=1_000, priority=-3)
        await eventually(lambda: s.gateway.outputs[handles[1]].tokens, "two run")
        for _ in range(20):
            answer = await listed(s.admin)
            told = {r.id: (r.queue, r.reason, list(r.numbers)) for r in answer.requests}
            own = {name: await explained(s.admin, name) for name in told}
            if (await listed(s.admin)).requests == answer.requests:
                break
        assert told == own
        assert [r.reason for r in answer.requests] == ["RUNNING", "RUNNING", "MAX_SEQS", "BEHIND", "BEHIND"]
        assert {(c.queue, c.reason): c.num_requests for c in answer.reasons} == {
            ("running", "RUNNING"): 2,
            ("waiting", "BEHIND"): 2,
            ("waiting", "MAX_SEQS"): 1,
        }
        first = answer.requests[0]
        assert (first.priority, first.num_choices, first.prompt_tokens) == (3, 1, 41)
        assert first.arrived_ns <= first.started_ns <= time.time_ns()
        assert not answer.requests[2].HasField("started_ns")
        short = await listed(s.admin, 1)
        assert [r.id for r in short.requests] == ["a"] and short.num_left_out == 4 and short.reasons == answer.reasons
        for handle in handles:
            await s.gateway.leave(handle)
        assert not (await listed(s.admin)).requests


@run_async
async def test_preempted_requests_say_so_and_come_back() -> None:
    """R85: one that had to leave is waiting again, with how often it left."""
    async with stack({"num_gpu_blocks": 9, **SLOW}, policy="vllm-v1") as s:
        handles = await submit(s, "a b c", max_tokens=40)
        seen: set[tuple[str, str]] = set()
        while not all(s.gateway.outputs[handle].is_over for handle in handles):
            answer = await listed(s.admin)
            seen |= {(r.queue, r.reason) for r in answer.requests if r.num_preemptions}
        assert ("waiting", "PREEMPTED") in seen or ("waiting", "NEED_BLOCKS") in seen
        assert ("running", "RUNNING") in seen


@run_async
async def test_without_a_worker_all_requests_wait_for_one() -> None:
    """The service's own reason, in its own words."""
    async with (
        scheduler("127.0.0.1:9", no_worker_timeout_s=20.0) as (address, admin_address),
        Admin(admin_address) as admin,
        Gateway(address) as gateway,
    ):
        await gateway.submit(PROMPT, request_id="early")
        answer = await listed(admin)
        while not answer.requests:
            answer = await listed(admin)
        [early] = answer.requests
        assert (early.queue, early.reason, early.request_id) == ("waiting", "NO_WORKER", "early")
        assert early.numbers[0].name == "why" and answer.step == 0


@run_async
async def test_a_steps_times_follow_each_other() -> None:
    """Planned, run, done, by one clock here; the worker's parts add up to what it took."""
    async with stack(SLOW) as s:
        before_ns = time.time_ns()
        await s.gateway.end_of(await s.gateway.submit(PROMPT, max_tokens=5))
        steps = await s.admin.steps()
        assert len(steps) == 5
        for step in steps:
            t = step.times
            assert before_ns <= t.planned_ns < t.planned_ns + t.schedule_ns <= t.finished_ns <= time.time_ns()
            assert t.planned_ns + t.schedule_ns <= t.started_ns < t.finished_ns
            assert t.cache_ns + t.prepare_ns + t.model_ns + t.sample_ns == step.duration_ns
            assert t.finished_ns - t.started_ns >= step.duration_ns


@run_async
async def test_cached_blocks_are_named_when_asked_for() -> None:
    """R110: an ended request leaves full blocks that can be hit; they are unreferenced, and counted as cached."""
    async with stack(SLOW) as s:
        await s.gateway.end_of(await s.gateway.submit(PROMPT, max_tokens=2))
        plain = await s.admin.blocks()
        asked = await s.admin.stub.GetBlocks(admin_pb2.GetBlocksRequest(cached=True))
        assert not plain.cached_blocks and plain.gpu.cached == 2
        assert len(asked.cached_blocks) == len(set(asked.cached_blocks)) == 2
        assert all(name.startswith("g") and name not in asked.refs for name in asked.cached_blocks)
        again = await s.gateway.submit(PROMPT, max_tokens=400)
        await s.gateway.tokens_of(again, 1)
        held = await s.admin.stub.GetBlocks(admin_pb2.GetBlocksRequest(cached=True))
        assert set(asked.cached_blocks) <= set(held.tables[0].blocks) and not held.cached_blocks
