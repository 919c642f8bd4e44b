"""Chitu's tasks: types, chunks, deadlines, how they end (R160-R164)."""

import pytest

from scheduler_svc.core.parts.progress import OneUnderWay
from scheduler_svc.core.policies.chitu.scorers import deadline
from scheduler_svc.core.request import SequenceStatus
from svc_common.errors import AlreadyExists, InvalidArgument, OutOfRange, ResourceExhausted
from tests.support.core.task_builders import Tasks, ids


def test_a_task_is_a_prefill_until_its_prompt_is_computed() -> None:
    """R160: then it decodes, one token at a time."""
    tasks = Tasks(prefill_chunk_size=4)
    tasks.add("a", 6)
    assert [tasks.step() for _ in range(3)] == [[("a", "P", 0, 4)], [("a", "P", 4, 2)], [("a", "D", 6, 1)]]


def test_a_chunk_in_flight_holds_its_task_back() -> None:
    """R160, R166: its rest is not scheduled before the result is there, though another group is free."""
    tasks = Tasks(prefill_chunk_size=4, pp_size=2)
    tasks.add("a", 6)
    assert tasks.plan() == [("a", "P", 0, 4)]
    [first] = tasks.plans
    assert OneUnderWay().num_pending(tasks.group("a").live[0]) == 0
    assert tasks.plan() == []
    tasks.finish(first)
    assert tasks.plan() == [("a", "P", 4, 2)]


def test_larger_priorities_come_first() -> None:
    """R160, R168: the scorer turns the core's order round."""
    tasks = Tasks(scheduler_type="request_preset", max_reqs=1)
    tasks.add("low", priority=1)
    tasks.add("high", priority=3)
    assert ids(tasks.step()) == ["high"]


def test_the_deadline_is_fixed_at_arrival() -> None:
    """R161: a millisecond for each token of the prompt and for 1,024 more; generated tokens do not move it."""
    tasks = Tasks()
    tasks.add("a", 10, arrival=2.0)
    before = deadline(tasks.group("a"), 0)
    assert before == -(2_000_000_000 + 10_000_000 + 1_024_000_000)
    tasks.step()
    assert tasks.group("a").live[0].num_output_tokens == 1
    assert deadline(tasks.group("a"), 10**12) == before


@pytest.mark.parametrize(
    ("chunk", "expected"), [(None, [(0, 10)]), (10, [(0, 10)]), (7, [(0, 7), (7, 3)]), (4, [(0, 4), (4, 4), (8, 2)])]
)
def test_chunks_of_a_prompt(chunk: int | None, expected: list[tuple[int, int]]) -> None:
    """R162: all that is left where the chunk reaches the end, else the chunk; it is given anew in each step."""
    tasks = Tasks(prefill_chunk_size=chunk)
    tasks.add("a", 10)
    assert [tasks.step() for _ in expected] == [[("a", "P", start, n)] for start, n in expected]
    assert tasks.step() == [("a", "D", 10, 1)]


def test_tasks_end_by_eos_or_length() -> None:
    """R163: EOS stops; max_tokens are never exceeded, one token where one is asked for."""
    tasks = Tasks()
    tasks.add("eos", max_tokens=9)
    tasks.add("one", max_tokens=1)
    tasks.add("two", max_tokens=2)
    tasks.plan()
    ended = tasks.finish(eos=("eos",)).ended
    assert [(e.request_id, e.status, e.num_output_tokens) for e in ended] == [
        ("eos", SequenceStatus.FINISHED_STOPPED, 1),
        ("one", SequenceStatus.FINISHED_LENGTH_CAPPED, 1),
    ]
    tasks.plan()
    assert [e.num_output_tokens for e in tasks.finish().ended] == [2]
    assert tasks.core.pool_report().gpu.free == 64


def test_prompts_and_outputs_are_bounded_by_the_model() -> None:
    """R163: a prompt that leaves no room for a token is refused; outputs end at the model's length."""
    tasks = Tasks(max_model_len=16)
    with pytest.raises(OutOfRange):
        tasks.add("long", 16)
    tasks.add("a", 15, max_tokens=50)
    tasks.plan()
    [ended] = tasks.finish().ended
    assert (ended.status, ended.num_output_tokens) == (SequenceStatus.FINISHED_LENGTH_CAPPED, 1)


def test_a_task_leaves_only_with_its_result() -> None:
    """R163: what would stop it is known when its batch is back; until then it stays in the pool."""
    tasks = Tasks(pp_size=2)
    tasks.add("a", max_tokens=1)
    tasks.plan()
    [first] = tasks.plans
    assert tasks.plan() == [] and tasks.pool() == ["a"]
    tasks.finish(first)
    assert tasks.pool() == []


def test_the_pool_keeps_the_order_of_arrival() -> None:
    """R164: one task of an id; unknown ids are ignored; an evicted task keeps its place."""
    tasks = Tasks(num_blocks=4, scheduler_type="prefill_first")
    tasks.add("a", 7, max_tokens=9)
    tasks.add("b", 7, max_tokens=9)
    with pytest.raises(AlreadyExists):
        tasks.add("a")
    assert tasks.core.abort(["nobody"]) == []
    steps = [tasks.step() for _ in range(4)]
    assert tasks["threshold"] == 2 and "b" not in ids(steps[-1])
    tasks.add("c", 1)
    assert tasks.pool() == ["a", "b", "c"]


def test_a_request_that_was_prefilled_elsewhere() -> None:
    """R160, R167: it decodes at once, with blocks for what is computed; nothing is left of one that cannot be taken."""
    tasks = Tasks(num_blocks=4)
    tasks.core.add_prefilled(tasks.request("a", 9, max_tokens=3, committed=(5,)))
    assert tasks.core.block_tables() == {"a/0": ["g1", "g2", "g3"]}
    with pytest.raises(InvalidArgument, match="committed"):
        tasks.core.add_prefilled(tasks.request("b", 2))
    with pytest.raises(ResourceExhausted, match="no room for the 8 tokens"):
        tasks.core.add_prefilled(tasks.request("c", 8, committed=(5,)))
    with pytest.raises(InvalidArgument, match="which worker"):
        Tasks("chitu-dp").core.add_prefilled(tasks.request("d", 2, committed=(5,)))
    assert tasks.pool() == ["a"]
    assert [tasks.step() for _ in range(3)] == [[("a", "D", 9, 1)], [("a", "D", 10, 1)], []]
    assert tasks.core.pool_report().gpu.free == 4
