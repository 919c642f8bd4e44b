"""Policy and limits changed while a core runs: what changes at once, what is refused, and that nothing else is touched."""

from dataclasses import replace
from typing import Any

import pytest

from scheduler_svc.core.composition import presets
from scheduler_svc.core.composition.live_change import LIVE_KNOBS, LIVE_LIMITS, reconfigure
from scheduler_svc.core.limits import CoreLimits
from scheduler_svc.core.plan import StepResult
from scheduler_svc.core.request import Request
from scheduler_svc.core.request_rules import StopRules
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.core.spec.policy_spec import knob_names
from scheduler_svc.policy.keys import limit_names
from svc_common.errors import ConfigError
from tests.support.core.builders import answer, make_request, one_step, shares, waiting

LIMITS = CoreLimits(4, 17, 64, num_cpu_blocks=8, max_num_seqs=4, max_num_batched_tokens=64)


def _core(policy: str = "vllm-v1", **knobs: Any) -> Scheduler:
    return presets.build(policy, LIMITS, **knobs)


def _change(core: Scheduler, **values: Any) -> None:
    knobs = {name: value for name, value in values.items() if name in knob_names()}
    limits = {name: value for name, value in values.items() if name in limit_names()}
    reconfigure(core, replace(core.spec, **knobs), replace(core.state.limits, **limits))


def test_the_waiting_are_sorted_anew() -> None:
    """R24, R82: by priority from the next plan on, and by arrival again after that."""
    core = _core()
    for i, priority in enumerate((3, 1, 2)):
        core.add(make_request(f"r{i}", 4, arrival=float(i), priority=priority))
    _change(core, policy="priority")
    assert waiting(core) == ["r1", "r2", "r0"]
    core.add(make_request("r3", 4, arrival=3.0, priority=0))
    assert waiting(core) == ["r3", "r1", "r2", "r0"]
    _change(core, policy="fcfs")
    assert waiting(core) == ["r0", "r1", "r2", "r3"]


def test_other_changes_leave_the_queue_as_it_is() -> None:
    """R131: a request that was put back to the front stays there."""
    core = _core()
    core.add(make_request("late", 4, arrival=9.0))
    core.add(make_request("early", 4, arrival=1.0))
    _change(core, max_loras=2, max_num_seqs=8)
    assert waiting(core) == ["late", "early"]


def test_more_blocks_admit_at_once() -> None:
    """R136: exactly as many as are missing; one less does not."""
    for extra, admitted in ((0, False), (1, False), (2, True)):
        core = _core()
        core.add(make_request("big", 48))
        one_step(core)
        core.add(make_request("next", 20, arrival=1.0))
        assert "next" not in shares(one_step(core)[0])
        _change(core, num_gpu_blocks=LIMITS.num_gpu_blocks + extra)
        assert ("next" in shares(one_step(core)[0])) is admitted, extra


@pytest.mark.parametrize("policy", ["vllm-v1", "vllm-v1-async", "vllm-v0", "quire"])
def test_running_rows_go_on(policy: str) -> None:
    """R201: a change in the middle of fast decode loses no token and no block."""
    core = _core(policy)
    for i in range(3):
        core.add(make_request(f"r{i}", 5, 12))
    tokens = {f"r{i}": 0 for i in range(3)}
    plans = []
    for step in range(40):
        if step in (6, 9):
            _change(
                core, num_gpu_blocks=LIMITS.num_gpu_blocks + step, max_num_seqs=3 + step % 2, max_num_batched_tokens=65
            )
        plans += core.schedule(float(step))
        while plans and (len(plans) == core.depth or plans[0].is_empty):
            plan = plans.pop(0)
            for run in core.update(answer(plan)).runs if not plan.is_empty else ():
                tokens[run.request_id] += len(run.token_ids)
        assert core.check_integrity() == []
    assert tokens == dict.fromkeys(tokens, 12)
    assert core.pool_report().gpu.free == core.pool_report().gpu.total


def test_a_delay_remembers() -> None:
    """R57: the last prompt's time holds under the new factor."""
    for factor, starts in ((1.0, False), (0.1, True)):
        core = _core("vllm-v0", delay_factor=1.0)
        core.add(make_request("r0", 4, 8))
        one_step(core, 0.0)
        one_step(core, 10.0)
        core.add(make_request("r1", 4, 8, arrival=10.0))
        _change(core, delay_factor=factor)
        plan, _ = one_step(core, 12.0)
        assert ("r1" in shares(plan)) is starts, factor


def test_what_is_open_stays_open() -> None:
    """R59: with output handled one step late, an end that is not handled yet is handled after the change."""
    core = _core("vllm-v0", async_output=True)
    core.add(make_request("r0", 4, 1))
    one_step(core, 0.0)
    _change(core, max_loras=1)
    ended = [
        end
        for now in (1.0, 2.0, 3.0)
        for plan in core.schedule(now)
        for end in (*plan.ended, *core.update(answer(plan)).ended)
    ]
    assert [end.request_id for end in ended] == ["r0"]
    assert not core.has_unfinished


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"cache": "quire"}, r"cache \(now 'v1_pool'\) cannot be changed"),
        ({"progress": "placeholders", "batch_queue": 2}, "progress .*, batch_queue"),
        ({"block_size": 8}, "block_size"),
        ({"prefix_caching": False}, "prefix_caching"),
        ({"num_spec_tokens": 1}, "num_spec_tokens"),
    ],
)
def test_what_is_fixed_at_start(values: dict[str, Any], named: str) -> None:
    """Refused, with what could be changed; nothing has happened."""
    core = _core()
    with pytest.raises(ConfigError, match=named) as error:
        _change(core, **values, max_num_seqs=3)
    for name in (*LIVE_KNOBS, *LIVE_LIMITS):
        assert name in error.value.message
    assert core.state.limits == LIMITS


def test_blocks_in_use_stay() -> None:
    """Says how many there must be at least; nothing has happened."""
    core = _core()
    core.add(make_request("big", 40))
    one_step(core)
    with pytest.raises(ConfigError, match="num_gpu_blocks=5: blocks in use cannot be taken away; the least now is 11"):
        _change(core, num_gpu_blocks=5, max_num_seqs=3)
    assert core.state.limits == LIMITS
    _change(core, num_gpu_blocks=11)
    assert core.pool_report().gpu.free == 0


def test_no_request_is_left_on_the_host() -> None:
    """R76: a policy that never brings groups back is refused while there are any."""
    core = presets.build("quire", replace(LIMITS, num_gpu_blocks=9), restraint=None, preemption_mode="swap")
    for i in range(2):
        core.add(make_request(f"r{i}", 8, 20, arrival=float(i)))
    plans = []
    for step in range(60):
        plans += core.schedule(float(step))
        while plans and (len(plans) == core.depth or plans[0].is_empty):
            plan = plans.pop(0)
            if not plan.is_empty:
                core.update(answer(plan))
        if core.state.swapped:
            break
    assert core.state.swapped
    with pytest.raises(ConfigError, match="1 requests wait on the host"):
        _change(core, preemption_mode="recompute")


def test_all_or_nothing() -> None:
    """A limit that contradicts the policy: the good one beside it does not hold either."""
    core = _core("vllm-v0")
    with pytest.raises(ConfigError, match="max_model_len"):
        _change(core, max_num_batched_tokens=32, num_gpu_blocks=30)
    assert core.state.limits == LIMITS
    assert core.pool_report().gpu.total == LIMITS.num_gpu_blocks


@pytest.mark.parametrize("policy", ["chitu", "chitu-skew", "chitu-dp"])
def test_sizes_and_order_of_task_policies_change_live(policy: str) -> None:
    """R168, R170, R180, R185, R188: a larger chunk and more tasks hold from the next batch on; slots and ranks stay as many."""
    limits = CoreLimits(block_size=4, num_gpu_blocks=200, max_model_len=64, max_num_seqs=8, max_num_batched_tokens=64)
    core = presets.build(policy, replace(limits, prefix_caching=False), max_reqs=2, prefill_chunk_size=4)
    for i in range(4):
        core.add(Request(f"r{i}", list(range(40 * i, 40 * i + 8)), StopRules(4, ignore_eos=True), float(i)))
    first = [entry for plan in core.schedule(10.0) for entry in plan.scheduled]
    assert sum(entry.num_tokens for entry in first) == 4
    reconfigure(core, replace(core.spec, max_reqs=8, prefill_chunk_size=64), core.state.limits)
    for step in range(1, core.step + 1):
        core.update(StepResult(step))
    second = [entry for plan in core.schedule(11.0) for entry in plan.scheduled]
    assert sum(entry.num_tokens for entry in second) == 28
    assert len({entry.request_id for entry in second}) == 4
    with pytest.raises(ConfigError, match="pp_size"):
        reconfigure(core, replace(core.spec, pp_size=3), core.state.limits)
    assert core.check_integrity() == []


def test_slots_are_not_made_or_taken_away_live() -> None:
    """R179: fewer requests than slots would be fewer slots."""
    limits = CoreLimits(block_size=4, num_gpu_blocks=200, max_model_len=64, max_num_seqs=8, max_num_batched_tokens=64)
    core = presets.build("chitu-skew", replace(limits, prefix_caching=False), pp_size=3, max_reqs=6)
    with pytest.raises(ConfigError, match="slots are fixed"):
        reconfigure(core, replace(core.spec, max_reqs=2), core.state.limits)
