"""The batch queue: several plans in flight, results in order, aborts in between."""

import ast
from pathlib import Path

import pytest

from scheduler_svc.core.plan import StepResult
from scheduler_svc.core.request import SequenceStatus
from tests.support.core.builders import make_request, shares
from tests.support.core.pipelines import Loop, build

CORE = Path(__file__).parents[2] / "scheduler_svc" / "core"


def test_the_engine_example_of_two_prompts_under_a_plain_scheduler() -> None:
    """R147: prompts 12 + 12, budget 10, two plans in flight: a request whose token is on the way is skipped."""
    core = build("vllm-v1", depth=2, max_num_batched_tokens=10, max_num_seqs=2, prefix_caching=False)
    for name in ("r0", "r1"):
        core.add(make_request(name, 12, max_tokens=3))
    loop = Loop(core)
    loop.run()
    assert [shares(p) for p in loop.plans] == [
        {"r0": 10},
        {"r0": 2, "r1": 8},
        {"r1": 4},
        {"r0": 1},
        {"r1": 1},
        {"r0": 1},
        {"r1": 1},
        {},
        {},
    ]


def test_the_queue_is_filled_before_a_result_is_awaited() -> None:
    """R147: no result in the first step at depth 2; then one for each plan, the oldest first, and never more than two in flight."""
    core = build("vllm-v1-async")
    core.add(make_request("a", 5, max_tokens=9))
    loop = Loop(core)
    assert loop.step() is None
    assert (len(loop.queue), loop.queue.due) == (1, None)
    for number in range(4):
        oldest = loop.plans[number].step
        plan = loop.queue.plan(0.0)
        assert (len(loop.queue), loop.queue.due.step) == (2, oldest)
        assert loop.queue.plan(0.0) is None
        loop.plans.append(plan)
        loop.queue.update(StepResult(oldest, {"a/0": [5]}))
        assert (len(loop.queue), loop.queue.due) == (1, None)


def test_nothing_to_schedule_takes_the_oldest_result_at_once() -> None:
    """R147: an empty plan is queued too and the oldest result is then due, even if the queue is not full; at last it runs dry."""
    core = build("vllm-v1", depth=3)
    core.add(make_request("a", 5, max_tokens=2))
    loop = Loop(core)
    assert loop.step() is None
    assert [r.token_ids for r in loop.step().runs] == [loop.tokens()["a/0"]]
    assert (shares(loop.plans[0]), shares(loop.plans[1]), len(loop.queue)) == ({"a": 5}, {}, 1)
    loop.run()
    assert loop.queue.is_idle
    assert (loop.queue.plan(0.0), loop.queue.due) == (None, None)


def test_ended_requests_are_told_by_a_plan_of_their_own() -> None:
    """R135, R147: when all is over one empty plan still tells the workers; the queue is drained behind it."""
    core = build("vllm-v1-async")
    core.add(make_request("a", 5, max_tokens=1))
    loop = Loop(core)
    loop.run()
    assert [(shares(p), p.finished) for p in loop.plans] == [({"a": 5}, []), ({}, []), ({}, ["a"])]
    assert len(loop.outcomes) == 3


@pytest.mark.parametrize("preset", ["vllm-v1", "vllm-v1-async"])
def test_depth_one_is_the_plain_loop(preset: str) -> None:
    """R147: with one plan in flight every result is due at once."""
    core = build(preset, depth=1)
    core.add(make_request("a", 5, max_tokens=3))
    loop = Loop(core)
    assert [len(loop.step().runs) for _ in range(3)] == [1, 1, 1]
    assert loop.queue.is_idle


def test_results_come_in_order() -> None:
    """R147: the result of a younger plan is refused, and so is one of no plan in flight."""
    core = build("vllm-v1-async")
    core.add(make_request("a", 5))
    loop = Loop(core)
    loop.step()
    younger = loop.queue.plan(0.0)
    with pytest.raises(ValueError, match="not the oldest"):
        loop.queue.update(StepResult(younger.step))
    with pytest.raises(ValueError, match="not the oldest"):
        Loop(core).queue.update(StepResult(1))


def test_aborts_during_execution_wait_for_the_next_update() -> None:
    """R153: kept while a plan executes, applied as one batch before the update, so that what came for them is ignored."""
    core = build("vllm-v1-async")
    for name in "abc":
        core.add(make_request(name, 5, max_tokens=9))
    loop = Loop(core)
    assert loop.step(abort_meanwhile=("b",)) is None
    assert core.request("b") is not None
    outcome = loop.step(abort_meanwhile=("c", "b", "nobody"))
    assert [(e.request_id, e.status) for e in outcome.ended] == [
        ("b", SequenceStatus.FINISHED_ABORTED),
        ("c", SequenceStatus.FINISHED_ABORTED),
    ]
    assert [r.request_id for r in outcome.runs] == ["a"]
    assert (shares(loop.plans[1]), sorted(core.block_tables())) == ({"a": 1, "b": 1, "c": 1}, ["a/0"])
    assert [e.request_id for e in loop.step().ended] == []


def test_a_step_of_the_engine_answers_each_client_and_then_runs_its_hook() -> None:
    """R144, R158: outputs of one update name request and sample; drafts that the hook hands over then are in the next plan."""
    core = build("vllm-v1", drafts=2)
    core.add(make_request("a", 5, max_tokens=9))
    core.add(make_request("b", 5, max_tokens=9))
    loop = Loop(core)
    outcome = loop.step()
    assert [(r.request_id, r.index, r.offset, len(r.token_ids)) for r in outcome.runs] == [
        ("a", 0, 0, 1),
        ("b", 0, 0, 1),
    ]
    core.put_drafts({"b/0": [1, 2]})
    loop.step()
    assert [(e.request_id, e.num_tokens, e.num_drafts) for e in loop.plans[-1].scheduled] == [("a", 1, 0), ("b", 3, 2)]


def busy_share(preset: str, plan_s: float, execute_s: float) -> float:
    """How much of the time a device works that has a plan waiting or not, when planning and executing take so long."""
    core = build(preset)
    core.add(make_request("a", 5, max_tokens=40))
    loop = Loop(core)
    now = device_free_at = 0.0
    done_at: dict[int, float] = {}
    num_executed = 0
    while not loop.queue.is_idle:
        if (plan := loop.send_off()) is not None:
            now += plan_s
            if not plan.is_empty:
                num_executed += 1
                device_free_at = max(now, device_free_at) + execute_s
            done_at[plan.step] = device_free_at
        if (due := loop.queue.due) is not None:
            now = max(now, done_at[due.step])
            loop.take()
    return num_executed * execute_s / device_free_at


def test_the_device_does_not_wait_for_the_scheduler() -> None:
    """R146: planning takes half as long as executing; one plan at a time leaves bubbles of a third, two leave none."""
    assert busy_share("vllm-v1", 1.0, 2.0) == pytest.approx(2 / 3)
    assert busy_share("vllm-v1-async", 1.0, 2.0) == pytest.approx(80 / 81)


def test_no_part_of_the_core_waits_for_anything() -> None:
    """R155: asynchronous execution is outside; no module of the core knows futures, threads or tasks."""
    forbidden = {"asyncio", "concurrent", "threading", "multiprocessing", "queue", "time", "grpc"}
    files = sorted(CORE.rglob("*.py"))
    assert len(files) > 20
    for file in files:
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            assert not isinstance(node, (ast.AsyncFunctionDef, ast.Await)), file
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert not {name.split(".")[0] for name in names} & forbidden, file
