"""Requests, groups and sequences."""

import pytest

from scheduler_svc.core.request import Request, SequenceStatus
from scheduler_svc.core.request_rules import StopRules
from svc_common.errors import InvalidArgument
from tests.support.core.v0_builders import add, answer, make_request, make_v0, names, one_step, queues, steps, until


@pytest.mark.parametrize(
    ("status", "is_finished", "reason"),
    [
        ("WAITING", False, None),
        ("RUNNING", False, None),
        ("PREEMPTED", False, None),
        ("SWAPPED", False, None),
        ("FINISHED_STOPPED", True, "stop"),
        ("FINISHED_LENGTH_CAPPED", True, "length"),
        ("FINISHED_ABORTED", True, "abort"),
        ("FINISHED_IGNORED", True, "length"),
    ],
)
def test_finished_is_whatever_lies_beyond_swapped(status: str, is_finished: bool, reason: str | None) -> None:
    """R23: the statuses, and the reasons that clients read; an ignored request reports "length"."""
    found = SequenceStatus[status]
    assert (found.is_finished, found.finish_reason) == (is_finished, reason)
    assert found.is_finished == (found > SequenceStatus.SWAPPED)


def test_an_ignored_request_ends_as_length() -> None:
    """R23: through the core, from a prompt that is too long."""
    core = make_v0()
    add(core, "long", 65)
    [ended] = one_step(core)[0].ended
    assert (ended.status, ended.status.finish_reason) == (SequenceStatus.FINISHED_IGNORED, "length")


def test_a_group_belongs_to_a_request_that_keeps_what_it_was_given() -> None:
    """R4, R24: one prompt, many outputs; id, arrival, rules, adapter, priority are the request's, for all its sequences."""
    core = make_v0()
    request = add(core, "a", 3, arrival=7.5, priority=-2, lora_id=4, n=2)
    steps(core, 1)
    assert [s.request for s in request.groups[0].sequences] == [request, request]
    assert (request.request_id, request.arrival_time, request.priority, request.lora_id) == ("a", 7.5, -2, 4)
    assert request.sequences[1].lora_id == 4


def test_the_sequences_that_a_group_takes_over_its_life() -> None:
    """R25: n while it is in the prompt, then those that are unfinished."""
    core = make_v0()
    group = add(core, "a", 3, n=3).groups[0]
    assert (len(group.sequences), group.max_num_running_seqs) == (1, 3)
    [plan] = core.schedule(0)
    assert group.max_num_running_seqs == 3
    core.update(answer(core, plan))
    assert (len(group.sequences), group.max_num_running_seqs) == (3, 3)
    core.stop_at("a/1", 1)
    assert group.max_num_running_seqs == 2


def test_best_of_replaces_n_inside() -> None:
    """R25: best_of sequences run, n are given; fewer than n is an error."""
    core = make_v0()
    group = add(core, "a", 3, n=2, best_of=4).groups[0]
    assert group.max_num_running_seqs == 4
    one_step(core)
    assert len(group.live) == 4
    with pytest.raises(InvalidArgument, match="best_of"):
        add(core, "b", 3, n=3, best_of=2)
    with pytest.raises(InvalidArgument, match="best_of"):
        add(core, "c", 3, n=0)


def test_the_best_samples_by_score() -> None:
    """R25: of best_of samples the n with the largest logprob, best first; failed ones last, equal ones in order of age."""
    request = make_request("a", 3, n=2, best_of=4)
    group = request.groups[0]
    for index in (1, 2, 3):
        group.add(group.sequences[0].fork(index))
    for sequence, logprob in zip(group.sequences, (-3.0, -1.0, -0.1, -1.0), strict=True):
        sequence.status, sequence.cumulative_logprob = SequenceStatus.FINISHED_STOPPED, logprob
    group.sequences[2].status = SequenceStatus.FINISHED_ABORTED
    assert [s.index for s in request.best_sequences()] == [1, 3]


def test_without_best_of_samples_keep_their_order() -> None:
    """R25: n of n are not ranked."""
    request = make_request("a", 3, n=2)
    group = request.groups[0]
    group.add(group.sequences[0].fork(1))
    for sequence, logprob in zip(group.sequences, (-3.0, -1.0), strict=True):
        sequence.status, sequence.cumulative_logprob = SequenceStatus.FINISHED_STOPPED, logprob
    assert [s.index for s in request.best_sequences()] == [0, 1]


def test_the_prefill_lasts_until_all_tokens_are_computed() -> None:
    """R26: all tokens, then one per step; after a preemption prompt and outputs are a prefill again."""
    core = make_v0(num_gpu_blocks=4)
    request = add(core, "a", 7)
    sequence = request.sequences[0]
    add(core, "b", 7)
    assert sequence.in_prefill
    seen = [(e.num_tokens, e.is_prefill) for plan in steps(core, 2) for e in plan.scheduled if e.request_id == "a"]
    assert seen == [(7, True), (1, False)]
    assert not sequence.in_prefill
    victim = core.request("b").sequences[0]
    until(core, "preempted")
    assert victim.in_prefill
    assert (victim.num_prompt_tokens, victim.prefill_end) == (7, victim.num_tokens)
    core.abort(["a"])
    num_tokens = victim.num_tokens
    plan, _ = one_step(core)
    assert [(e.name, e.num_tokens, e.is_prefill) for e in plan.scheduled] == [("b/0", num_tokens, True)]


def test_a_restart_keeps_the_generated_tokens() -> None:
    """R27: computed is 0, the prefill begins again, nothing that was generated is lost."""
    sequence = Request("a", [1, 2, 3], StopRules(9), 0.0).sequences[0]
    sequence.token_ids += [4, 5]
    sequence.num_computed_tokens = 4
    assert not sequence.in_prefill
    sequence.restart()
    assert (sequence.num_computed_tokens, sequence.in_prefill, sequence.prefill_end) == (0, True, 5)
    assert sequence.token_ids == [1, 2, 3, 4, 5]


def test_a_group_acts_as_a_whole() -> None:
    """R28: its unfinished sequences are all scheduled or none, and leave together."""
    core = make_v0(num_gpu_blocks=9)
    add(core, "a", 11)
    add(core, "b", 7, n=3)
    for _ in range(20):
        plan, _ = one_step(core)
        of_b = [name for name in names(plan) if name.startswith("b/")]
        assert of_b in ([], ["b/0"] if plan.num_prefill_groups else ["b/0", "b/1", "b/2"])
        if plan.swap_out:
            break
    assert plan.preempted == [("b", "swap")]
    assert of_b == []
    assert {s.status for s in core.request("b").sequences} == {SequenceStatus.SWAPPED}


def test_a_group_that_waits_has_one_sequence() -> None:
    """R29: however many samples are wanted; the others are forked at the prompt's end."""
    core = make_v0()
    group = add(core, "a", 3, n=3).groups[0]
    assert [s.status for s in group.sequences] == [SequenceStatus.WAITING]
    plan, _ = one_step(core)
    assert names(plan) == ["a/0"]
    assert [s.name for s in group.sequences] == ["a/0", "a/1", "a/2"]


def test_unknown_and_double_sequences_are_errors() -> None:
    """R30: find, add and remove."""
    group = make_request("a", 3, n=3).groups[0]
    first = group.sequences[0]
    assert group.find(0) is first
    with pytest.raises(ValueError, match="no sequence 1"):
        group.find(1)
    with pytest.raises(ValueError, match="sequence 0 already"):
        group.add(first.fork(0))
    with pytest.raises(ValueError, match="no sequence 1"):
        group.remove(1)
    group.add(first.fork(1))
    group.remove(0)
    assert [s.index for s in group.sequences] == [1]


def test_a_group_is_over_with_its_last_sequence() -> None:
    """R30: not before."""
    core = make_v0()
    group = add(core, "a", 3, n=2).groups[0]
    one_step(core)
    assert [e.request_done for e in core.stop_at("a/0", 1)] == [False]
    assert (group.is_finished, queues(core)["running"]) == (False, ["a"])
    assert [e.request_done for e in core.stop_at("a/1", 1)] == [True]
    assert (group.is_finished, queues(core)["running"]) == (True, [])
