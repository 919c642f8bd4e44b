"""What a plan carries, and what its result does."""

import pytest

from scheduler_svc.core.plan import StepResult
from scheduler_svc.core.request import Request, SequenceStatus
from scheduler_svc.core.request_rules import StopRules
from scheduler_svc.core.scheduler import Scheduler
from tests.support.core.v0_builders import add, answer, finish, make_v0, one_step, queues, steps

STOPPED, LENGTH = SequenceStatus.FINISHED_STOPPED, SequenceStatus.FINISHED_LENGTH_CAPPED


def test_the_first_plan_tells_all_and_the_next_ones_what_is_new() -> None:
    """R92: whose, prompt or not, tokens, table, whether a token is sampled; then only appended blocks (send_delta_data)."""
    core = make_v0()
    request = add(core, "a", 4)
    first, second, third = (plan.scheduled[0] for plan in steps(core, 3))
    assert (first.request_id, first.name, first.is_prefill, first.samples, first.fresh) == (
        "a",
        "a/0",
        True,
        True,
        True,
    )
    assert (first.token_ids, first.num_prompt_tokens) == (request.prompt_token_ids, 4)
    assert [len(e.new_block_ids) for e in (first, second, third)] == [1, 1, 0]
    assert [(e.fresh, e.token_ids, e.computed_before) for e in (second, third)] == [(False, None, 4), (False, None, 5)]


def test_one_that_was_preempted_is_told_anew() -> None:
    """R92: all tokens and blocks again, after it was told to forget it."""
    core = make_v0(num_gpu_blocks=4)
    add(core, "a", 7, 2)
    add(core, "b", 7)
    plans = steps(core, 3)
    assert [p.preempted for p in plans] == [[], [("b", "recompute")], []]
    assert "b/0" in plans[1].left
    [again] = plans[2].scheduled
    assert (again.fresh, again.resumed, len(again.token_ids or ()), len(again.new_block_ids)) == (True, True, 8, 2)


def test_blocks_of_a_batch_count_as_computed_once_it_is_planned() -> None:
    """R92, R93: the same prompt in the same step skips nothing, in the next one all blocks but the last."""
    core = make_v0(prefix_caching=True)
    prompt = list(range(1, 13))
    for name in "ab":
        add(core, name, prompt)
    plan, _ = one_step(core)
    assert [e.num_cached_blocks for e in plan.scheduled] == [0, 0]
    add(core, "c", prompt)
    [entry] = one_step(core)[0].scheduled
    assert (entry.num_tokens, entry.num_cached_blocks) == (12, 2)


@pytest.mark.parametrize("preset", ["vllm-v0", "vllm-2023"])
def test_blocks_remember_when_a_step_last_held_them(preset: str) -> None:
    """R93: `now` of that step, for all blocks of its sequences, and not that of a later step without them."""
    core = make_v0(preset, prefix_caching=True)
    add(core, "a", 5)
    add(core, "b", 5)
    for now in (10.0, 11.0):
        one_step(core, now)
    add(core, "c", 5)
    one_step(core, 12.0)
    blocks = {name: [int(block[1:]) for block in table] for name, table in core.block_tables().items()}
    core.abort("abc")
    last_accessed = core.state.cache.ledger.gpu.last_accessed
    assert {name: {last_accessed[b] for b in table} for name, table in blocks.items()} == {
        "a/0": {11.0},
        "b/0": {11.0},
        "c/0": {12.0},
    }


class TestBranches:
    """R94: what becomes of a group whose result names children."""

    @staticmethod
    def core() -> Scheduler:
        core = make_v0()
        add(core, "a", 6, n=3)
        one_step(core)
        return core

    def test_the_prompt_forks_and_goes_on_as_the_first_sample(self) -> None:
        """R94, R102: forks copy the past before the parent gets its token, share all its blocks, and join in order."""
        core = make_v0()
        request = add(core, "a", 6, n=3)
        [plan] = core.schedule(0)
        outcome = core.update(StepResult(plan.step, children={"a/0": [11, 22, 33]}))
        assert [(r.name, r.token_ids, r.forked_from) for r in outcome.runs] == [
            ("a/0", [11], None),
            ("a/1", [22], "a/0"),
            ("a/2", [33], "a/0"),
        ]
        assert [s.token_ids for s in request.sequences] == [[*request.prompt_token_ids, t] for t in (11, 22, 33)]
        assert len({tuple(table) for table in core.block_tables().values()}) == 1
        assert core.pool_report().refs == dict.fromkeys(core.pool_report().refs, 3)

    def test_parents_without_children_leave_the_group(self) -> None:
        """R94: freed, told as dropped, not as ended, and forgotten by the worker."""
        core = self.core()
        [plan] = core.schedule(0)
        outcome = core.update(StepResult(plan.step, children={"a/0": [5, 6], "a/1": [], "a/2": [7]}))
        assert (outcome.dropped, outcome.ended) == (["a/1"], [])
        assert [s.name for s in core.request("a").sequences] == ["a/0", "a/2", "a/3"]
        assert "a/1" not in core.block_tables()
        assert core.block_tables()["a/3"] == core.block_tables()["a/0"]
        assert "a/1" in one_step(core)[0].left
        assert core.check_integrity() == []

    def test_indexes_are_never_used_twice(self) -> None:
        """R94: a fork after a drop has a new one."""
        core = self.core()
        for children in ({"a/0": [5, 6, 7], "a/1": [], "a/2": []}, {"a/0": [], "a/3": [8, 9], "a/4": [1]}):
            [plan] = core.schedule(0)
            core.update(StepResult(plan.step, children=children))
        assert [s.name for s in core.request("a").sequences] == ["a/3", "a/4", "a/5"]

    def test_a_child_that_is_over_at_once_shares_no_blocks(self) -> None:
        """R94: all are appended to and asked before forks share and the finished are freed."""
        core = self.core()
        [plan] = core.schedule(0)
        outcome = core.update(StepResult(plan.step, children={"a/0": [5, 0], "a/1": [6], "a/2": []}))
        assert [(e.name, e.status) for e in outcome.ended] == [("a/3", STOPPED)]
        assert sorted(core.block_tables()) == ["a/0", "a/1"]

    def test_a_parent_that_is_over_leaves_its_blocks_to_its_child(self) -> None:
        """R94: parents are freed last, so that a fork finds the table."""
        core = self.core()
        [plan] = core.schedule(0)
        table = core.block_tables()["a/0"]
        outcome = core.update(StepResult(plan.step, children={"a/0": [0, 5], "a/1": [6], "a/2": []}))
        assert [e.name for e in outcome.ended] == ["a/0"]
        assert core.block_tables()["a/3"] == table


def stop(tokens: list[int], **rules) -> tuple[SequenceStatus | None, int | None, int]:
    """(status, stop token, output tokens) of a request of 3 prompt tokens that gets these."""
    core = make_v0(max_model_len=8, max_num_batched_tokens=8)
    given = {"max_tokens": 20, "eos_token_ids": frozenset([0]), "stop_token_ids": frozenset([7]), **rules}
    core.add(Request("a", [1, 2, 3], StopRules(**given), 0.0))
    for token in tokens:
        [plan] = core.schedule(0)
        outcome = core.update(StepResult(plan.step, {"a/0": [token]}))
        if outcome.ended:
            return outcome.ended[0].status, outcome.ended[0].stop_token_id, outcome.ended[0].num_output_tokens
    return None, None, len(tokens)


class TestStops:
    """R95: which rule ends a sequence."""

    def test_the_end_token(self) -> None:
        """R95: EOS, unless it is ignored."""
        assert stop([5, 0]) == (STOPPED, 0, 2)
        assert stop([5, 0, 5], ignore_eos=True) == (None, None, 3)

    def test_stop_tokens(self) -> None:
        """R95: the token is the reason; also for an end token that is ignored as such."""
        assert stop([5, 7]) == (STOPPED, 7, 2)
        assert stop([0], ignore_eos=True, stop_token_ids=frozenset([0])) == (STOPPED, 0, 1)

    def test_nothing_stops_before_min_tokens(self) -> None:
        """R95: neither the end token nor stop tokens."""
        assert stop([0, 7, 5, 0], min_tokens=3) == (STOPPED, 0, 4)
        assert stop([0, 7, 0], min_tokens=3) == (STOPPED, 0, 3)

    def test_max_tokens(self) -> None:
        """R95: counts outputs."""
        assert stop([5, 5], max_tokens=2) == (LENGTH, None, 2)

    def test_beyond_the_models_length(self) -> None:
        """R95: prompt and outputs, more than max_model_len: one token more than the model takes, as nothing computes it."""
        assert stop([5] * 9) == (LENGTH, None, 6)

    def test_min_tokens_do_not_go_beyond_the_models_length(self) -> None:
        """R95: there is no place for one more token, so it ends all the same."""
        assert stop([5] * 9, min_tokens=9) == (LENGTH, None, 6)
        assert stop([5] * 3, min_tokens=3, max_tokens=2) == (LENGTH, None, 3)

    def test_tokens_stop_before_lengths(self) -> None:
        """R95: in that order, when both hold."""
        assert stop([5, 0], max_tokens=2) == (STOPPED, 0, 2)
        assert stop([5, 7], max_tokens=2) == (STOPPED, 7, 2)

    def test_a_stop_string_cuts_behind_its_place(self) -> None:
        """R95: found in the text by the gateway; later tokens are cut off, the rest counts."""
        core = make_v0()
        request = add(core, "a", 3)
        steps(core, 4)
        [ended] = core.stop_at("a/0", 2)
        assert (ended.status, ended.num_output_tokens, ended.request_done) == (STOPPED, 2, True)
        assert len(request.sequences[0].token_ids) == 5


def test_finished_requests_leave_running_and_are_told_with_the_next_plan() -> None:
    """R96: S0's prose has their ids removed from the list; they are added to it, and the next plan flushes it (R36)."""
    core = make_v0()
    add(core, "a", 3, 1)
    add(core, "b", 3, 3)
    [plan] = core.schedule(0)
    core.update(answer(core, plan))
    assert (queues(core)["running"], core.state.shared.finished) == (["b"], ["a"])
    assert [p.finished for p in steps(core, 2)] == [["a"], []]


def test_samples_that_are_over_are_freed_while_their_siblings_go_on() -> None:
    """R96, R199: and the group needs fewer sequences of the budget."""
    core = make_v0()
    add(core, "a", 3, n=2)
    steps(core, 2)
    core.stop_at("a/0", 2)
    assert list(core.block_tables()) == ["a/1"]
    assert core.state.num_running_seqs == 1
    assert [e.name for e in one_step(core)[0].scheduled] == ["a/1"]


def test_freeing_twice_is_harmless() -> None:
    """R97, R103: a sequence without a table is passed over by every release."""
    core = make_v0()
    sequence = add(core, "a", 3).sequences[0]
    core.state.cache.release(sequence)
    one_step(core)
    core.abort(["a"])
    core.state.cache.release(sequence)
    assert core.stop_at("a/0", 1) == []
    assert core.pool_report().gpu.free == 20
    assert finish(core) == {}


def test_when_a_request_first_ran_and_first_gave_a_token() -> None:
    """R98: set once, whatever happens later; the time in the queue follows from it."""
    core = make_v0(num_gpu_blocks=4)
    a, b = add(core, "a", 7, arrival=1.0), add(core, "b", 7, arrival=2.0)
    assert (b.first_scheduled_time, b.first_token_time) == (None, None)
    [plan] = core.schedule(5.0)
    core.update(answer(core, plan), 6.5)
    assert [(r.first_scheduled_time, r.first_token_time) for r in (a, b)] == [(5.0, 6.5)] * 2
    assert one_step(core, 7.0)[0].preempted == [("b", "recompute")]
    core.abort(["a"])
    assert one_step(core, 8.0)[0].num_prefill_groups == 1
    assert (b.first_scheduled_time, b.first_token_time) == (5.0, 6.5)


def test_a_chunk_gives_no_first_token() -> None:
    """R90, R98: the time of the first output is that of the step that samples it."""
    core = make_v0("vllm-v0-chunked", max_num_batched_tokens=8)
    request = add(core, "a", 12)
    one_step(core, 1.0)
    assert (request.first_scheduled_time, request.first_token_time) == (1.0, None)
    one_step(core, 2.0)
    assert request.first_token_time == 2.0
