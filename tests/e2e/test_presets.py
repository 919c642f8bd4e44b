"""Every preset through the services: mixed requests in few blocks give the tokens of an undisturbed run, in the preset's own way.

A sample here (two presets, 15 requests), the whole in `make test-long` (all, 64 requests); sizes are printed.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest

from quire.stack import LocalStack, default_model
from tests.e2e import mixed_requests
from tests.e2e.commands import blocks, steps

Step = dict[str, Any]
Check = Callable[[list[Step]], None]


def never_mixes(log: list[Step]) -> None:
    """R41: a step is one of prompts or one of decodes."""
    assert all(len({group["prefill"] for group in step["scheduled"]}) <= 1 for step in log)


def mixes(log: list[Step]) -> None:
    """R127: prompts and decodes share steps."""
    assert any(len({group["prefill"] for group in step["scheduled"]}) == 2 for step in log)


def never_swaps(log: list[Step]) -> None:
    """R130: swap maps are empty."""
    assert not any(step["swap_in"] or step["swap_out"] for step in log)


def swaps(log: list[Step]) -> None:
    """R75, R76: who leaves is copied to the host and back."""
    assert any(step["swap_out"] for step in log) and any(step["swap_in"] for step in log)


def preempts(log: list[Step]) -> None:
    """R72, R130: the pool was to force it."""
    assert any(step["preempted"] for step in log)


def stays(log: list[Step]) -> None:
    """R183, R190: whoever has a slot or a rank keeps it."""
    lanes: dict[str, set[int]] = {}
    for step in log:
        for group in step["scheduled"]:
            for sequence in group["seqs"]:
                lanes.setdefault(sequence, set()).add(step["lane"])
    assert all(len(found) == 1 for found in lanes.values())
    assert len(set().union(*lanes.values())) > 1


def nobody_joins(log: list[Step]) -> None:
    """R1: a static batch ends before another begins."""
    last = {group["id"]: i for i, step in enumerate(log) for group in step["scheduled"]}
    seen: set[str] = set()
    for i, step in enumerate(log):
        here = {group["id"] for group in step["scheduled"]}
        if here - seen:
            assert not {name for name in seen if last[name] >= i} - here or here <= seen, f"step {step['step']}"
        seen |= here


@dataclass(frozen=True)
class Case:
    """A preset with its knobs, and what its step log shows."""

    policy: str
    checks: tuple[Check, ...]
    sets: tuple[str, ...] = ()
    stack: dict[str, Any] = field(default_factory=dict)
    num_blocks: int = 48

    def __str__(self) -> str:
        return " ".join((self.policy, *self.sets))


SAMPLE = [
    Case("quire", (mixes,), ("restraint=null",), num_blocks=36),
    Case("vllm-v0", (never_mixes, preempts, swaps), ("preemption_mode=swap",), num_blocks=36),
]
WHOLE = [
    Case("quire", (mixes, preempts), ("restraint=null",)),
    Case("vllm-v0", (never_mixes, preempts, swaps), ("preemption_mode=swap",)),
    Case("chitu-dp", (stays,), stack={"workers": 2}, num_blocks=96),
    Case("vllm-v0", (never_mixes, preempts)),
    Case("vllm-v0", (never_mixes, preempts), ("policy=priority",)),
    Case("vllm-v0", (never_mixes, preempts), ("delay_factor=0.5",)),
    Case("vllm-v0-chunked", (preempts,)),
    Case("vllm-2023", (never_mixes, preempts, swaps), ("preemption_mode=swap",)),
    Case("vllm-v1", (mixes, never_swaps, preempts)),
    Case("vllm-v1-async", (mixes, never_swaps, preempts), num_blocks=40),
    Case("static", (nobody_joins,), num_blocks=96),
    Case("chitu", (never_mixes,)),
    Case("chitu-skew", (stays,), ("infer.pp_size=2", "infer.max_reqs=16"), num_blocks=96),
]


def compare(case: Case, count: int) -> str:
    wanted = mixed_requests.asks(count)
    expected = mixed_requests.undisturbed(default_model(), count)
    options = LocalStack(
        policy=case.policy,
        policy_set=case.sets,
        worker_args=(
            *("--dtype", "float32", "--max-model-len", "192", "--swap-space", "8MiB"),
            *("--num-gpu-blocks-override", str(case.num_blocks)),
        ),
        scheduler_args=("--max-num-seqs", "16"),
        **case.stack,
    )
    with options as stack:
        assert mixed_requests.run(stack.grpc_address, wanted) == expected
        log = steps(stack.admin_address)
        pool = blocks(stack.admin_address)["gpu"]
    assert pool["free"] == pool["total"]
    for check in case.checks:
        check(log)
    return f"{case}: {count} mixed requests, {len(log)} steps, {sum(len(s['preempted']) for s in log)} preemptions"


@pytest.mark.parametrize("case", SAMPLE, ids=str)
def test_sample(case: Case, record_property: Callable[[str, object], None]) -> None:
    """R21, R25, R48: two presets."""
    record_property("size", compare(case, 15))


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("case", WHOLE, ids=str)
def test_whole(case: Case, record_property: Callable[[str, object], None]) -> None:
    """R21, R25, R48: every preset."""
    record_property("size", compare(case, 64))
