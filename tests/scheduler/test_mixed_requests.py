"""Mixed requests in few blocks on the simulated worker, which checks what every block holds (R21, R25)."""

from collections.abc import Callable

import pytest

from protos.common.v1 import common_pb2
from tests.support.services.harness import once, run_async, stack
from tests.support.stack.mixed_requests import Ask, asks

POLICIES = [
    ("quire", ["restraint=null"]),
    ("quire", ["restraint=null", "num_spec_tokens=3"]),
    ("vllm-v0", ["preemption_mode=swap"]),
    ("vllm-v0", ["num_scheduler_steps=4"]),
    ("vllm-v0-chunked", []),
    ("vllm-2023", ["preemption_mode=swap"]),
    ("vllm-v1", []),
    ("vllm-v1-async", ["num_spec_tokens=2"]),
    ("chitu", []),
    ("chitu-skew", ["infer.pp_size=2", "infer.max_reqs=16"]),
]


def submission(ask: Ask) -> dict[str, object]:
    drawn = ask.kind in ("drawn", "two")
    sampling = common_pb2.ResolvedSampling(temperature=1.0 if drawn else 0.0, top_p=1.0, seed=ask.number)
    values: dict[str, object] = {"max_tokens": min(ask.max_tokens, 32), "sampling": sampling, "priority": -ask.priority}
    if ask.kind == "two":
        values |= {"num_choices": 2}
    if ask.kind == "beams":
        values |= {"num_choices": 4, "best_of": 4, "beam": common_pb2.BeamRules(length_penalty=1.0)}
    return values


async def served(policy: str, sets: list[str], num_gpu_blocks: int, num: int) -> tuple[list[list[list[int]]], int]:
    """Outputs of all requests, and how many preemptions there were."""
    worker = {"num_gpu_blocks": num_gpu_blocks, "num_cpu_blocks": 200, "vocab_size": 4096}
    async with stack(worker, policy=policy, policy_set=sets, max_num_seqs=16) as s:
        handles = [await s.gateway.submit(list(ask.prompt), **submission(ask)) for ask in asks(num)]
        outputs = [await s.gateway.end_of(handle) for handle in handles]
        steps = await s.admin.steps()
        await s.admin.assert_all_free()
    assert all(output.failed is None for output in outputs)
    assert not any(step.error for step in steps)
    return [output.choices for output in outputs], sum(len(step.preempted) for step in steps)


@once
async def undisturbed(num: int) -> tuple[list[list[list[int]]], int]:
    """Outputs where blocks are plenty."""
    return await served("vllm-v1", [], 600, num)


@pytest.mark.parametrize(("policy", "sets"), POLICIES, ids=str)
@pytest.mark.parametrize(("num", "num_blocks"), [(8, 20), pytest.param(80, 48, marks=pytest.mark.long)])
@run_async
async def test_choices_are_those_of_a_run_with_room(
    policy: str, sets: list[str], num: int, num_blocks: int, record_property: Callable[[str, object], None]
) -> None:
    """R21, R25, R27, R94: whatever preempts, swaps, forks or comes back in the middle of a search."""
    expected, _ = await undisturbed(num)
    found, num_preempted = await served(policy, sets, num_blocks, num)
    assert found == expected
    record_property("size", f"mixed requests under {policy} {sets}: {num}, {num_preempted} preemptions")
