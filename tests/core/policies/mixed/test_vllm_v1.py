"""The rules of vLLM V1 one by one, each as small as it can be."""

import pytest

from scheduler_svc.core.plan import StepResult
from scheduler_svc.core.request import SequenceStatus
from svc_common.errors import AlreadyExists, ConfigError, InvalidArgument, OutOfRange
from tests.support.core.builders import EOS, answer, make_core, make_request, one_step, shares, waiting


def test_budget_of_ten_with_prompts_3_5_12() -> None:
    """R128: the article's own example, step by step."""
    core = make_core(max_num_batched_tokens=10, num_gpu_blocks=101)
    for name, length in (("R1", 3), ("R2", 5), ("R3", 12)):
        core.add(make_request(name, length, max_tokens=10))
    got = [shares(one_step(core)[0]) for _ in range(4)]
    assert got == [
        {"R1": 3, "R2": 5, "R3": 2},
        {"R1": 1, "R2": 1, "R3": 8},
        {"R1": 1, "R2": 1, "R3": 2},
        {"R1": 1, "R2": 1, "R3": 1},
    ]


def test_no_request_is_visited_when_the_budget_is_used_up() -> None:
    """R128: to the last token: waiting requests are not even looked up, whether prompts took it all or decodes and prompts."""
    core = make_core(max_num_batched_tokens=8)
    core.add(make_request("a", 8, max_tokens=20))
    core.add(make_request("b", 7))
    core.add(make_request("c", 3))
    first, second = one_step(core)[0], one_step(core)[0]
    assert (shares(first), first.lookups) == ({"a": 8}, [("a", 0)])
    assert (shares(second), second.lookups) == ({"a": 1, "b": 7}, [("b", 0)])
    assert waiting(core) == ["c"]


def test_prefill_chunks_and_decodes_share_a_step() -> None:
    """R1, R127: a newcomer's prompt joins running decodes in the very next step."""
    core = make_core()
    core.add(make_request("a", 4))
    one_step(core)
    core.add(make_request("b", 6))
    plan, _ = one_step(core)
    assert shares(plan) == {"a": 1, "b": 6}
    assert [e.is_prefill for e in plan.scheduled] == [False, True]


def test_a_finished_request_makes_room_at_once() -> None:
    """R1, R17: slot and blocks are usable in the next step."""
    core = make_core(max_num_seqs=1, num_gpu_blocks=3)
    core.add(make_request("a", 4, max_tokens=1))
    core.add(make_request("b", 8, max_tokens=1))
    plan, outcome = one_step(core)
    assert shares(plan) == {"a": 4}
    assert [e.request_id for e in outcome.ended] == ["a"]
    assert shares(one_step(core)[0]) == {"b": 8}


def test_long_prompts_are_capped_by_the_threshold() -> None:
    """R129, R132: long_prefill_token_threshold bounds a prompt's share."""
    core = make_core(long_prefill_token_threshold=5)
    core.add(make_request("a", 12))
    assert [shares(one_step(core)[0])["a"] for _ in range(4)] == [5, 5, 2, 1]


def test_the_newest_leaves_when_blocks_run_out() -> None:
    """R130, R131: FCFS preempts the tail by recompute; its tokens stay and it waits in front."""
    core = make_core(num_gpu_blocks=5, max_model_len=16)
    core.add(make_request("a", 7, max_tokens=9))
    core.add(make_request("b", 7, max_tokens=9))
    core.add(make_request("c", 7, max_tokens=9))
    plans = [one_step(core)[0] for _ in range(3)]
    assert plans[-1].preempted == [("b", "recompute")]
    sequence = core.request("b").sequences[0]
    assert (sequence.num_computed_tokens, sequence.num_output_tokens) == (0, 2)
    assert waiting(core) == ["b", "c"]


def test_priority_preempts_the_least_important() -> None:
    """R130: the victim is the largest (priority, arrival), even if it was scheduled in this step already."""
    core = make_core("priority", num_gpu_blocks=5, max_model_len=16)
    core.add(make_request("low", 5, max_tokens=9, priority=5, arrival=0))
    one_step(core)
    core.add(make_request("high", 7, max_tokens=9, priority=1, arrival=1))
    plans = [one_step(core)[0] for _ in range(3)]
    assert [p.preempted for p in plans] == [[], [], [("low", "recompute")]]
    assert shares(plans[-1]) == {"high": 1}


def test_no_newcomer_in_a_step_that_preempted() -> None:
    """R132: waiting is visited only if no request was preempted."""
    core = make_core(num_gpu_blocks=5, max_model_len=16)
    core.add(make_request("a", 7, max_tokens=9))
    core.add(make_request("b", 7, max_tokens=9))
    plans = [one_step(core)[0] for _ in range(2)]
    core.add(make_request("tiny", 1, max_tokens=1))
    plans.append(one_step(core)[0])
    assert plans[-1].preempted
    assert "tiny" not in shares(plans[-1])


def test_max_num_seqs_stops_admission() -> None:
    """R132, R196: running never exceeds max_num_seqs."""
    core = make_core(max_num_seqs=2)
    for name in "abc":
        core.add(make_request(name, 2))
    assert shares(one_step(core)[0]) == {"a": 2, "b": 2}


def test_without_chunking_a_prompt_waits_for_room_in_the_budget() -> None:
    """R132: chunked prefill off and more tokens than the budget has left: no request behind it starts either."""
    core = make_core(chunked_prefill=False, max_num_batched_tokens=64)
    core.add(make_request("a", 40))
    core.add(make_request("b", 40))
    core.add(make_request("c", 2))
    assert shares(one_step(core)[0]) == {"a": 40}
    assert shares(one_step(core)[0]) == {"a": 1, "b": 40, "c": 2}


def test_the_same_prompt_again_computes_only_the_rest() -> None:
    """R134, R136: whole blocks hit, at least one token is computed again; the hit relieves the budget."""
    core = make_core()
    prompt = list(range(1, 17))
    core.add(make_request("a", prompt, max_tokens=1))
    one_step(core)
    core.add(make_request("b", prompt, max_tokens=1))
    plan, _ = one_step(core)
    assert plan.lookups == [("b", 12)]
    assert (plan.scheduled[0].computed_before, plan.scheduled[0].num_tokens) == (12, 4)


def test_other_salts_share_nothing() -> None:
    """R138: extra keys are part of the hash."""
    core = make_core()
    prompt = list(range(1, 17))
    core.add(make_request("a", prompt, salt="x"))
    one_step(core)
    core.add(make_request("b", prompt, salt="y"))
    assert one_step(core)[0].lookups == [("b", 0)]


def test_a_request_of_the_same_step_is_a_hit() -> None:
    """R136: full blocks are registered as soon as they are scheduled."""
    core = make_core()
    prompt = list(range(1, 9))
    core.add(make_request("a", prompt))
    core.add(make_request("b", prompt))
    assert one_step(core)[0].lookups == [("a", 0), ("b", 4)]


def test_output_tokens_are_computed_again_after_preemption() -> None:
    """R26, R133: a resumed request prefills prompt and outputs, and is told apart from new ones."""
    core = make_core(num_gpu_blocks=5, max_model_len=16, prefix_caching=False)
    core.add(make_request("a", 7, max_tokens=4))
    core.add(make_request("b", 7, max_tokens=4))
    resumed = []
    while core.has_unfinished:
        resumed += [e for e in one_step(core)[0].scheduled if e.resumed]
    assert [(e.request_id, e.num_tokens, len(e.token_ids)) for e in resumed] == [("b", 9, 9)]


def test_computed_counts_before_execution_and_endings_are_told_once() -> None:
    """R126, R135: computed grows at schedule; ended requests reach the workers with the next plan only."""
    core = make_core()
    core.add(make_request("a", 5, max_tokens=1))
    core.add(make_request("b", 5, max_tokens=9))
    [plan] = core.schedule(0)
    assert core.request("a").sequences[0].num_computed_tokens == 5
    core.update(answer(plan))
    second, third = one_step(core)[0], one_step(core)[0]
    assert (second.finished, second.left, third.finished, third.left) == (["a"], ["a/0"], [], [])


def test_block_zero_is_never_used() -> None:
    """R137: the null block is reserved."""
    core = make_core(num_gpu_blocks=5, max_model_len=16)
    core.add(make_request("a", 15, max_tokens=1))
    one_step_blocks = [b for e in core.schedule(0)[0].scheduled for b in e.new_block_ids]
    assert sorted(one_step_blocks) == [1, 2, 3, 4]


def test_stop_rules_in_order() -> None:
    """R140: EOS, stop ids, lengths; none but lengths... and not below min_tokens."""
    core = make_core()
    core.add(make_request("a", 3, max_tokens=9))
    [plan] = core.schedule(0)
    outcome = core.update(StepResult(plan.step, {"a/0": [EOS]}))
    assert (outcome.ended[0].status, outcome.ended[0].stop_token_id) == (SequenceStatus.FINISHED_STOPPED, EOS)


def test_tokens_behind_a_stop_are_cut() -> None:
    """R139: stop check after each token; the rest is thrown away."""
    core = make_core()
    core.add(make_request("a", 3, max_tokens=2))
    [plan] = core.schedule(0)
    outcome = core.update(StepResult(plan.step, {"a/0": [5, 6, 7]}))
    assert [r.token_ids for r in outcome.runs] == [[5, 6]]
    assert outcome.ended[0].status is SequenceStatus.FINISHED_LENGTH_CAPPED


def test_the_model_length_ends_a_sequence() -> None:
    """R129, R140: num_tokens reaches max_model_len."""
    core = make_core(max_model_len=8)
    core.add(make_request("a", 6, max_tokens=99))
    one_step(core)
    _, outcome = one_step(core)
    assert outcome.ended[0].status is SequenceStatus.FINISHED_LENGTH_CAPPED


@pytest.mark.parametrize("when", ["waiting", "running", "executing", "preempted"])
def test_abort_works_in_every_state(when: str) -> None:
    """R35, R141, R198: blocks are free at once, a result for it is ignored, unknown ids too."""
    core = make_core(num_gpu_blocks=5, max_model_len=16)
    core.add(make_request("a", 7, max_tokens=9))
    core.add(make_request("b", 7, max_tokens=9))
    plan = None
    if when != "waiting":
        for _ in range(3 if when == "preempted" else 1):
            plan, _ = one_step(core)
    if when == "executing":
        [plan] = core.schedule(0)
    ended = core.abort(["b", "nobody"])
    assert [e.status for e in ended] == [SequenceStatus.FINISHED_ABORTED]
    assert not any(name.startswith("b/") for name in core.block_tables())
    if when == "executing":
        assert "b" not in {r.request_id for r in core.update(answer(plan)).runs}
    assert core.abort(["b"]) == []
    assert core.check_integrity() == []


def test_a_failed_step_ends_its_requests_alone() -> None:
    """The affected requests fail, the process goes on."""
    core = make_core(max_num_seqs=1)
    core.add(make_request("a", 3))
    core.add(make_request("b", 3))
    [plan] = core.schedule(0)
    outcome = core.fail_step(plan.step, "device lost")
    assert [(e.request_id, e.error) for e in outcome.ended] == [("a", "device lost")]
    assert shares(one_step(core)[0]) == {"b": 3}


def test_a_failed_row_ends_alone() -> None:
    """NaN logits end that request, its neighbours get their tokens."""
    core = make_core()
    core.add(make_request("a", 3))
    core.add(make_request("b", 3))
    [plan] = core.schedule(0)
    outcome = core.update(StepResult(plan.step, {"b/0": [9]}, failed={"a/0": "logits are not finite"}))
    assert [(e.request_id, e.error) for e in outcome.ended] == [("a", "logits are not finite")]
    assert [r.token_ids for r in outcome.runs] == [[9]]


def test_a_lost_worker_makes_everything_wait_again() -> None:
    """Sequences go back to waiting in their order, with their tokens; no prefix is known any more."""
    core = make_core()
    for name in "abc":
        core.add(make_request(name, 9))
    one_step(core)
    core.schedule(0)
    core.reset_sequences_of_lost_worker()
    assert waiting(core) == ["a", "b", "c"]
    plan, _ = one_step(core)
    assert [(e.request_id, e.computed_before, e.num_tokens, e.fresh) for e in plan.scheduled] == [
        (name, 0, 10, True) for name in "abc"
    ]
    assert core.check_integrity() == []


def test_a_stop_string_ends_a_sequence_at_its_offset() -> None:
    """Stopped(handle, choice, token_offset) ends one choice; usage counts to the offset."""
    core = make_core()
    core.add(make_request("a", 3, max_tokens=20))
    for _ in range(5):
        one_step(core)
    [ended] = core.stop_at("a/0", 3)
    assert (ended.status, ended.num_output_tokens, ended.request_done) == (SequenceStatus.FINISHED_STOPPED, 3, True)
    assert core.stop_at("a/0", 3) == []
    assert not core.has_unfinished


def test_bad_requests_are_refused_by_type() -> None:
    """Zero tokens, a live id, longer than model or cache."""
    core = make_core(max_model_len=16)
    with pytest.raises(InvalidArgument):
        core.add(make_request("none", 0))
    with pytest.raises(OutOfRange, match="15") as caught:
        core.add(make_request("long", 16))
    assert caught.value.metadata["limit"] == "15"
    core.add(make_request("a", 15))
    with pytest.raises(AlreadyExists):
        core.add(make_request("a", 3))
    small = make_core(num_gpu_blocks=3, max_model_len=64)
    with pytest.raises(OutOfRange, match="8"):
        small.add(make_request("big", 9))


def test_a_sequence_that_outgrows_the_cache_ends_with_an_error() -> None:
    """R197: alone in a pool that is too small it is given up instead of cycling for ever; others are served."""
    core = make_core(num_gpu_blocks=3, max_model_len=64)
    core.add(make_request("big", 7, max_tokens=20))
    core.add(make_request("small", 3, max_tokens=2))
    ended = []
    for _ in range(30):
        plan, outcome = one_step(core)
        ended += plan.ended + outcome.ended
        if not core.has_unfinished:
            break
    assert {e.request_id: e.error is None for e in ended} == {"big": False, "small": True}


@pytest.mark.parametrize(
    ("limits", "words"),
    [
        ({"max_num_batched_tokens": 4, "max_num_seqs": 8}, "max_num_seqs"),
        ({"chunked_prefill": False, "max_num_batched_tokens": 32}, "chunked prefill"),
        ({"block_size": 0}, "block_size"),
    ],
)
def test_contradicting_limits_are_refused(limits, words: str) -> None:
    """R48: clear errors when the core is built."""
    with pytest.raises(ConfigError, match=words):
        make_core(**limits)


@pytest.mark.parametrize("fate", ["step fails", "row fails"])
def test_what_a_failed_step_did_not_compute_is_no_hit(fate: str) -> None:
    """R136 registers blocks when they are scheduled; if the step fails they must not be found, earlier ones stay."""
    core = make_core(max_num_batched_tokens=8)
    prompt = list(range(1, 17))
    core.add(make_request("a", prompt))
    one_step(core)
    [plan] = core.schedule(0)
    if fate == "step fails":
        core.fail_step(plan.step, "broken")
    else:
        core.update(StepResult(plan.step, {}, failed={"a/0": "not finite"}))
    core.add(make_request("b", prompt))
    assert one_step(core)[0].lookups == [("b", 8)]
    assert core.check_integrity() == []


def test_what_a_withdrawn_sequence_did_not_compute_is_no_hit() -> None:
    """R130: a victim that was in the step already leaves no block behind that claims to hold what was never computed."""
    core = make_core("priority", num_gpu_blocks=8, max_model_len=32, long_prefill_token_threshold=8)
    core.add(make_request("low", 24, priority=5))
    one_step(core)
    core.add(make_request("high", 4, priority=1, arrival=1))
    one_step(core)
    low = core.request("low").sequences[0]
    [plan] = core.schedule(0)
    assert (plan.preempted, shares(plan)) == ([("low", "recompute")], {"high": 1})
    assert core.state.cache.lookup(low).num_tokens == 16
