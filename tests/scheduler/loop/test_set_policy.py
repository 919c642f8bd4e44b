"""SetPolicy of a running scheduler: what holds from the next step on, and what cannot be changed."""

import grpc
import pytest

from protos.inference.v1 import admin_pb2
from tests.support.services.harness import Admin, Gateway, Stack, eventually, run_async, scheduler, stack

PROMPT = list(range(32, 52))
SLOW = {"time_scale": 1.0, "step_base_s": 0.005, "num_gpu_blocks": 512}


async def set_policy(admin: Admin, *settings: str) -> admin_pb2.SetPolicyResponse:
    return await admin.stub.SetPolicy(admin_pb2.SetPolicyRequest(settings=settings))


async def refusal(admin: Admin, *settings: str) -> str:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await set_policy(admin, *settings)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    return caught.value.details() or ""


async def most_at_once(s: Stack, since: int) -> int:
    return max(len(report.scheduled) for report in await s.admin.steps(since_step=since))


@run_async
async def test_a_limit_holds_from_the_step_that_it_names_and_requests_stay() -> None:
    """Fewer sequences at a time, then more again: each request gets the tokens that it gets alone, none is lost."""
    async with stack(SLOW, policy="vllm-v1", max_num_seqs=4) as s:
        alone = (await s.gateway.end_of(await s.gateway.submit(PROMPT, max_tokens=30))).tokens
        handles = [await s.gateway.submit(PROMPT, max_tokens=30) for _ in range(6)]
        await eventually(lambda: s.gateway.outputs[handles[0]].tokens, "they run")
        answer = await set_policy(s.admin, "max_num_seqs=2")
        assert [(c.key, c.old_value, c.new_value) for c in answer.changes] == [("max_num_seqs", "4", "2")]
        outputs = [await s.gateway.end_of(handle) for handle in handles]
        assert [o.tokens for o in outputs] == [alone] * 6
        last = (await s.admin.steps())[-1].step
        again = [await s.gateway.submit(PROMPT, max_tokens=10) for _ in range(6)]
        for handle in again:
            await s.gateway.end_of(handle)
        assert await most_at_once(s, last + 1) == 2
        await s.admin.assert_all_free()


@run_async
async def test_another_order_applies_to_waiting_requests() -> None:
    """Priority instead of arrival, while they wait: the last with the highest priority is served first."""
    async with stack(SLOW, policy="vllm-v1", policy_set=("policy=fcfs",), max_num_seqs=1) as s:
        first = await s.gateway.submit(PROMPT, max_tokens=40)
        await eventually(lambda: s.gateway.outputs[first].tokens, "the first runs")
        rest = [await s.gateway.submit(PROMPT, max_tokens=2, priority=p, request_id=f"p{p}") for p in (3, 2, 1)]
        await s.admin.blocks()
        assert (await set_policy(s.admin, "policy=priority")).changes[0].new_value == "priority"
        for handle in rest:
            await s.gateway.end_of(handle)
        started = [g.id for report in await s.admin.steps() for g in report.scheduled if g.prefill]
        assert started[1:] == ["p1", "p2", "p3"]


@run_async
async def test_what_is_fixed_at_start_is_refused_and_nothing_is_changed() -> None:
    """The error names the key, why, and what can be changed; the other keys of the call do not hold either."""
    async with stack(policy="vllm-v1", max_num_seqs=4) as s:
        for setting, words in (
            ("phases=prefill_or_decode", ("phases", "max_num_seqs")),
            ("block_size=8", ("block",)),
            ("max_num_seqs=5", ("max_num_seqs", "restart")),
            ("nonsense=1", ("unknown key", "nonsense")),
            ("max_num_seqs", ("KEY=VALUE",)),
            ("async=true", ("async", "fixed at start")),
            ("num_gpu_blocks=1000000", ("num_gpu_blocks",)),
        ):
            details = await refusal(s.admin, "max_num_seqs=3", setting)
            assert all(word in details for word in words), details
        assert "settings" in await refusal(s.admin)
        assert list((await set_policy(s.admin, "max_num_seqs=4")).changes) == []


@run_async
async def test_without_a_worker_it_is_kept_for_the_core_to_come() -> None:
    """An operator may say it early."""
    async with (
        scheduler("127.0.0.1:9", policy="vllm-v1") as (address, admin_address),
        Admin(admin_address) as admin,
        Gateway(address),
    ):
        assert list((await set_policy(admin, "max_num_seqs=3")).changes) == []
        assert "fixed at start" in await refusal(admin, "async=true")
