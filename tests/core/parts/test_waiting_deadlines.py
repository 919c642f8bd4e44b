"""Deadlines in the core: refused when they cannot be met, dropped before they cost anything, first served by least slack."""

import pytest

from scheduler_svc.core.parts.costs import Costs
from scheduler_svc.core.parts.waiting_deadlines import EXPIRED
from scheduler_svc.core.request import SequenceStatus
from svc_common.errors import DeadlineExceeded
from tests.support.core.builders import answer
from tests.support.core.quire_builders import quire_core, request, running, serve, waiting

COSTS = {"step_s": 0.5, "compute_token_s": 0.25}


def test_what_cannot_be_done_in_time_is_refused_with_both_numbers() -> None:
    """8 prompt tokens and two tokens to give: (8 + 1) * 0.25 + 2 * 0.5 s; nothing of it is left in the core."""
    core = quire_core(**COSTS)
    with pytest.raises(DeadlineExceeded, match=r"needs at least 3\.250 s and has 3\.200 s") as error:
        core.add(request("late", 8, at=10.0, deadline=13.2, min_tokens=2))
    assert error.value.reason == "INFEASIBLE"
    assert error.value.metadata == {"needs_s": "3.250000", "has_s": "3.200000"}
    assert not core.has_unfinished
    core.add(request("late", 8, at=10.0, deadline=13.25, min_tokens=2))
    assert waiting(core) == ["late"]


def test_time_that_has_passed_since_it_arrived_counts() -> None:
    """A request that comes again with its old arrival time has what is left now."""
    core = quire_core(**COSTS)
    core.schedule(20.0)
    with pytest.raises(DeadlineExceeded, match=r"has 1\.000 s"):
        core.add(request("again", 8, at=10.0, deadline=21.0))


def test_nothing_is_refused_while_costs_are_not_known() -> None:
    """Nor any without a deadline; measured costs count at once."""
    core = quire_core()
    core.add(request("a", 8, at=0.0, deadline=0.001))
    core.observe_costs(Costs(**COSTS))
    core.add(request("b", 8))
    with pytest.raises(DeadlineExceeded):
        core.add(request("c", 8, at=0.0, deadline=0.001))


def test_cached_tokens_need_no_time() -> None:
    """R134: only what must be computed counts, so that nothing feasible is refused."""
    core = quire_core({"prefix_caching": True}, **COSTS)
    for name, deadline in (("first", None), ("second", 2.0)):
        each = request(name, 13, at=0.0, deadline=deadline)
        each.prompt_token_ids[:] = range(1, 14)
        each.as_one_group()
        core.add(each)
        core.update(answer(core.schedule(0.0)[0]))
    assert running(core) == ["first", "second"]


def test_a_request_that_expires_in_the_queue_computes_nothing() -> None:
    """It ends in the next plan, once, and no step has a share of it."""
    core = quire_core({"max_num_seqs": 1})
    core.add(request("runs", 4, max_tokens=30))
    core.update(answer(core.schedule(0.0)[0]))
    core.add(request("waits", 4, at=0.0, deadline=5.0))
    [plan] = core.schedule(4.9)
    assert plan.ended == []
    core.update(answer(plan))
    [plan] = core.schedule(5.0)
    [ended] = plan.ended
    assert (ended.name, ended.status, ended.error) == ("waits/0", SequenceStatus.FINISHED_ABORTED, EXPIRED)
    assert (ended.request_done, running(core), waiting(core)) == (True, ["runs"], [])
    core.update(answer(plan))
    assert core.schedule(6.0)[0].ended == []


def test_running_requests_are_left_to_the_caller() -> None:
    """Its client may still want what there is."""
    core = quire_core()
    core.add(request("runs", 4, max_tokens=6, deadline=2.0))
    ended: list[str] = []
    serve(core, look=lambda plan: ended.extend(e.name for e in plan.ended))
    assert ended == []


def test_a_preempted_request_is_dropped_with_its_blocks_on_the_host() -> None:
    """Computing it again would be for nothing."""
    core = quire_core({"num_gpu_blocks": 9}, compute_token_s=0.1, swap_block_s=0.01)
    core.add(request("a", 11, max_tokens=20))
    core.add(request("b", 11, max_tokens=20, at=1.0, deadline=100.0))
    for now in range(20):
        [plan] = core.schedule(float(now))
        core.update(answer(plan))
        if core.state.swapped:
            break
    [plan] = core.schedule(100.0)
    assert [(e.name, e.error) for e in plan.ended] == [("b/0", EXPIRED)]
    assert core.pool_report().cpu.free == 64


def test_least_slack_goes_first() -> None:
    """Among equals those whose deadlines leave least time; those without keep their place by arrival."""
    core = quire_core({"max_num_seqs": 1}, patience_s=10.0, **COSTS)
    core.add(request("runs", 4, max_tokens=30))
    core.schedule(0.0)
    for name, at, deadline in (("none", 3.0, None), ("far", 3.5, 300.0), ("near", 4.0, 13.0), ("nearer", 5.0, 12.0)):
        core.add(request(name, 4, at=at, deadline=deadline))
    assert waiting(core) == ["nearer", "near", "none", "far"]


def test_other_policies_do_not_look_at_deadlines() -> None:
    """They are a part of their own."""
    core = quire_core(deadlines=False, **COSTS)
    core.add(request("a", 8, at=10.0, deadline=10.1))
    assert core.schedule(50.0)[0].ended == []


def test_ended_requests_are_forgotten() -> None:
    """Far deadlines of requests that are over take no memory for ever."""
    core = quire_core({"max_num_seqs": 8})
    for number in range(3_000):
        core.add(request(f"r{number}", 1, max_tokens=1, deadline=1e9))
        core.abort([f"r{number}"])
    assert len(core._intake.deadlines) < 1_100
