"""Speculative tokens: guesses are scheduled beside the next token, and come off again when they were wrong (R127, R149-R151)."""

import pytest

from scheduler_svc.core.plan import StepPlan, StepResult
from scheduler_svc.core.scheduler import Scheduler
from tests.support.core.builders import EOS, make_request, shares, waiting
from tests.support.core.pipelines import Loop, Worker, build


def after_prompt(preset: str = "vllm-v1", drafts: int = 3, **limits: int) -> Scheduler:
    """A core whose request "a" has 6 prompt tokens, all computed, and its first output token."""
    core = build(preset, drafts=drafts, **limits)
    core.add(make_request("a", 6, max_tokens=20))
    [plan] = core.schedule(0.0)
    core.update(StepResult(plan.step, {"a/0": [50]}))
    return core


def entry_of(plan: StepPlan) -> tuple[int, int, int]:
    """(computed before, tokens, of them guesses) of the only entry."""
    [entry] = plan.scheduled
    return entry.computed_before, entry.num_tokens, entry.num_drafts


@pytest.mark.parametrize("num_right", [0, 1, 3])
def test_wrong_guesses_were_never_computed(num_right: int) -> None:
    """R127, R129: known and guessed tokens are scheduled; of the guesses only the right ones stay computed."""
    core = after_prompt()
    core.put_drafts({"a/0": [51, 52, 53]})
    [plan] = core.schedule(0.0)
    assert entry_of(plan) == (6, 4, 3)
    core.update(StepResult(plan.step, {"a/0": [60] * (num_right + 1)}))
    sequence = core.request("a").sequences[0]
    assert (sequence.num_tokens, sequence.num_computed_tokens) == (8 + num_right, 7 + num_right)
    assert entry_of(core.schedule(0.0)[0]) == (7 + num_right, 1, 0)


def test_guesses_are_trimmed_to_budget_and_model_length() -> None:
    """R129: guesses take what is left of the budget, and never a position that the model does not have."""
    core = after_prompt(max_num_batched_tokens=8)
    core.put_drafts({"a/0": [1] * 12})
    assert entry_of(core.schedule(0.0)[0]) == (6, 8, 7)
    core = after_prompt(max_model_len=9)
    core.put_drafts({"a/0": [1] * 12})
    assert entry_of(core.schedule(0.0)[0]) == (6, 2, 1)


def test_guesses_behind_a_stop_are_cut() -> None:
    """R139: right guesses behind an EOS are no output."""
    core = after_prompt()
    core.put_drafts({"a/0": [51, 52, 53]})
    [plan] = core.schedule(0.0)
    outcome = core.update(StepResult(plan.step, {"a/0": [51, EOS, 53, 54]}))
    assert [r.token_ids for r in outcome.runs] == [[51, EOS]]
    assert not core.has_unfinished


def test_guesses_for_unknown_or_finished_are_ignored() -> None:
    """R158: drafts come after the update, when some requests are over."""
    core = after_prompt()
    core.abort(["a"])
    core.put_drafts({"a/0": [1], "nobody/0": [2]})
    assert core.schedule(0.0)[0].is_empty


def test_accepted_tokens_are_registered_by_the_next_step() -> None:
    """R136: in the plain loop what became full by accepted guesses can be found from the next step on, not before."""
    core = after_prompt()
    core.put_drafts({"a/0": [51, 52, 53]})
    [plan] = core.schedule(0.0)
    core.update(StepResult(plan.step, {"a/0": [51, 52, 53, 54]}))
    a = core.request("a").sequences[0]
    core.add(make_request("b", a.token_ids[:10]))
    b = core.request("b").sequences[0]
    assert core.state.cache.lookup(b).num_tokens == 4
    core.schedule(0.0)
    assert core.state.cache.lookup(b).num_tokens == 8


def test_guesses_of_a_preempted_request_are_verified_behind_its_last_known_token() -> None:
    """R131: its tokens are kept, and so are guesses about the next ones; it starts again with known tokens alone."""
    core = build(
        "vllm-v1", drafts=2, num_gpu_blocks=5, max_model_len=16, long_prefill_token_threshold=7, prefix_caching=False
    )
    core.add(make_request("a", 7, max_tokens=3))
    core.add(make_request("b", 7, max_tokens=9))
    [plan] = core.schedule(0.0)
    core.update(StepResult(plan.step, {"a/0": [50], "b/0": [50]}))
    core.put_drafts({"a/0": [51, 52], "b/0": [51, 52]})
    [plan] = core.schedule(0.0)
    assert (plan.preempted, shares(plan), waiting(core)) == ([("b", "recompute")], {"a": 3}, ["b"])
    core.update(StepResult(plan.step, {"a/0": [51, 52]}))
    [plan] = core.schedule(0.0)
    assert entry_of(plan) == (0, 7, 0)
    core.update(StepResult(plan.step))
    assert entry_of(core.schedule(0.0)[0]) == (7, 3, 2)


def test_guesses_of_steps_in_flight_are_placeholders() -> None:
    """R149, R150: each step promises a token and all its guesses; the worker fills in what the scheduler counts only."""
    core = build("vllm-v1-async", drafts=3)
    core.add(make_request("a", 6, max_tokens=40))
    a = core.request("a").sequences[0]
    assert entry_of(core.schedule(0.0)[0]) == (0, 6, 0)
    assert (a.num_placeholders, a.draft_token_ids) == (1, [-1, -1, -1])
    assert entry_of(core.schedule(0.0)[0]) == (6, 4, 3)
    assert (a.num_placeholders, a.draft_token_ids) == (5, [-1, -1, -1])


@pytest.mark.parametrize("num_right", [0, 2, 3])
def test_wrong_guesses_leave_both_counts(num_right: int) -> None:
    """R151: rejected guesses come off computed and off placeholders, tokens that came off placeholders alone."""
    core = build("vllm-v1-async", drafts=3)
    core.add(make_request("a", 6, max_tokens=40))
    a = core.request("a").sequences[0]
    plans = [core.schedule(0.0)[0], core.schedule(0.0)[0]]
    core.update(StepResult(plans[0].step, {"a/0": [50]}))
    plans += core.schedule(0.0)
    assert (a.num_computed_tokens, a.num_placeholders) == (14, 8)
    core.update(StepResult(plans[1].step, {"a/0": [60] * (num_right + 1)}))
    rejected = 3 - num_right
    assert (a.num_tokens, a.num_computed_tokens, a.num_placeholders) == (8 + num_right, 14 - rejected, 4)


def test_no_step_is_added_while_max_tokens_is_surely_in_flight() -> None:
    """R152: sure means that all guesses may be wrong; guesses that may be right stop no step."""
    core = build("vllm-v1-async", drafts=3)
    core.add(make_request("a", 6, max_tokens=2))
    loop = Loop(core, Worker(wrong_every=1))
    assert [len(tokens) for tokens in loop.run().values()] == [2]
    assert [shares(p) for p in loop.plans[:3]] == [{"a": 6}, {"a": 4}, {}]


def test_right_guesses_save_steps() -> None:
    """R149-R151: the tokens are those of the plain loop, in fewer steps."""
    plain, ahead = build("vllm-v1"), build("vllm-v1-async", drafts=3)
    loops = []
    for core in (plain, ahead):
        core.add(make_request("a", 6, max_tokens=24))
        loops.append(Loop(core, Worker(wrong_every=1_000)))
    assert loops[0].run() == loops[1].run()
    busy = [sum(not p.is_empty for p in loop.plans) for loop in loops]
    assert busy[0] == 24
    assert busy[1] <= 9
