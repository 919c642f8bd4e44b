"""Every preset in the running service, with blocks so few that work is preempted: the same tokens as undisturbed, nothing leaks.

The simulated worker's tokens depend on what its cache holds, so blocks swapped to the wrong place change them.
"""

import asyncio

import pytest

from tests.support.services.harness import Gateway, Stack, eventually, once, run_async, scheduler, stack, worker

PROMPTS = [list(range(32 + i, 32 + i + length)) for i, length in enumerate((3, 40, 17, 90, 25, 60, 40, 9))]
MAX_TOKENS = 24
ROOMY = {"num_gpu_blocks": 100}
TIGHT = {"num_gpu_blocks": 16, "num_cpu_blocks": 16, "max_model_len": 200}
CASES = [
    pytest.param("vllm-2023", (), "recompute", marks=pytest.mark.long),
    ("vllm-2023", ("preemption_mode=swap",), "swap"),
    ("vllm-v0", (), "recompute"),
    pytest.param("vllm-v0", ("preemption_mode=swap",), "swap", marks=pytest.mark.long),
    ("vllm-v0", ("preemption_mode=swap", "num_cpu_blocks=6"), "swap"),
    pytest.param("vllm-v0", ("async_output=true",), "recompute", marks=pytest.mark.long),
    pytest.param(
        "vllm-v0", ("delay_factor=0.5", "num_lookahead_slots=2", "max_loras=1"), "recompute", marks=pytest.mark.long
    ),
    ("vllm-v0-chunked", ("max_num_batched_tokens=32",), "recompute"),
    ("vllm-v0-chunked", ("preemption_mode=swap", "max_num_batched_tokens=32"), "swap"),
    ("vllm-v1", ("max_num_batched_tokens=32",), "recompute"),
    pytest.param("vllm-v1", ("policy=fcfs", "async=true"), "recompute", marks=pytest.mark.long),
    ("vllm-v1-async", ("max_num_batched_tokens=32",), "recompute"),
    ("static", ("max_num_seqs=5",), "recompute"),
    ("chitu", (), "recompute"),
    ("chitu", ("scheduler.type=prefill_first,stride", "infer.pp_size=3", "infer.prefill_chunk_size=20"), "recompute"),
    ("quire", ("restraint=null", "preemption_mode=recompute", "patience_s=0"), "recompute"),
    ("quire", ("restraint=null", "preemption_mode=swap", "patience_s=0", "max_num_batched_tokens=32"), "swap"),
]


async def tokens_of_all(running: Stack) -> list[list[int]]:
    """All prompts at once, with priorities; their outputs, each to its full length."""
    handles = [
        await running.gateway.submit(prompt, max_tokens=MAX_TOKENS, priority=i % 2) for i, prompt in enumerate(PROMPTS)
    ]
    outputs = await asyncio.gather(*(running.gateway.end_of(handle) for handle in handles))
    assert [output.failed for output in outputs] == [None] * len(PROMPTS)
    return [output.tokens for output in outputs]


@once
async def undisturbed() -> list[list[int]]:
    """The same with enough blocks for all."""
    async with stack(ROOMY) as roomy:
        return await tokens_of_all(roomy)


@pytest.mark.parametrize(("policy", "sets", "mode"), CASES, ids=str)
@run_async
async def test_preempted_requests_get_the_same_tokens(policy: str, sets: tuple[str, ...], mode: str) -> None:
    """R76, R78, R131: computed again or swapped, a request's tokens are those of an undisturbed run; all blocks come back (R17)."""
    expected = await undisturbed()
    assert [len(tokens) for tokens in expected] == [MAX_TOKENS] * len(PROMPTS)
    async with stack(TIGHT, policy=policy, policy_set=sets) as tight:
        assert await tokens_of_all(tight) == expected
        await tight.admin.assert_all_free()
        steps = await tight.admin.steps()
    assert {step.policy for step in steps} == {policy}
    assert mode in {event.mode for step in steps for event in step.preempted}, "the pool was to force preemption"
    assert any(step.swap_out for step in steps) == any(step.swap_in for step in steps) == (mode == "swap")


@pytest.mark.parametrize(
    ("policy", "sets"),
    [
        ("chitu-skew", ("infer.pp_size=2", "infer.prefill_chunk_size=32", "infer.max_reqs=4")),
        ("chitu-dp", ("infer.dp_size=1", "infer.prefill_chunk_size=32")),
    ],
    ids=str,
)
@run_async
async def test_slots_and_ranks_never_preempt(policy: str, sets: tuple[str, ...]) -> None:
    """R184, R190: requests enter one after the other as their blocks can be reserved; each gets the tokens it gets alone."""
    expected = await undisturbed()
    async with stack(TIGHT, policy=policy, policy_set=sets) as tight:
        assert await tokens_of_all(tight) == expected
        await tight.admin.assert_all_free()
        steps = await tight.admin.steps()
    assert {step.policy for step in steps} == {policy}
    assert not any(step.preempted for step in steps)


@run_async
async def test_a_worker_that_does_not_suit_the_policy_is_named() -> None:
    """R48: what only the worker can tell is told by health, again and again, and the service waits for another worker."""
    async with (
        worker(max_model_len=4096) as (worker_address,),
        scheduler(worker_address, policy="vllm-v0", policy_set=("max_num_batched_tokens=512",)) as (address, _),
        Gateway(address) as gateway,
    ):
        await eventually(lambda: "max_model_len (4096)" in gateway.states[-1].reason, "the reason is told")
        assert not gateway.states[-1].serving


@run_async
async def test_a_shorter_model_length_holds_for_all_requests() -> None:
    """`max_model_len` below the worker's: gateways are told it, and longer requests are refused."""
    async with stack(ROOMY, policy="vllm-v0", policy_set=("max_model_len=64",)) as running:
        assert running.gateway.states[-1].limits.max_model_len == 64
        handle = await running.gateway.submit(list(range(32, 132)), max_tokens=4)
        output = await running.gateway.end_of(handle)
        assert output.failed is not None and "this model takes is 63" in output.failed.error.message
