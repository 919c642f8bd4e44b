"""Plans of draws and what becomes of them, and guesses."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protos.worker.v1 import worker_pb2
from tests.support.worker.builders import Change, Row, rare, step
from worker_svc.rows.table import ChangeLimits, RowTable
from worker_svc.sampling.draft_proposer import DraftAsk, NgramProposer
from worker_svc.sampling.draft_verification import settle
from worker_svc.sampling.draw_plan import plan_draws

LIMITS = ChangeLimits(vocab_size=100, max_model_len=64, block_size=4, num_gpu_blocks=64, num_cpu_blocks=8)
GRAMMAR, NOT_FINITE = worker_pb2.ROW_FLAG_GRAMMAR, worker_pb2.ROW_FLAG_NOT_FINITE


def ints(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


def mixed():
    """Row 0 drafts two tokens, row 1 has three children, row 2 is a beam, row 3 decodes."""
    rows = RowTable(LIMITS)
    plain = [Row(row, [1, 2, 3], range(8 * row, 8 * row + 8), 3) for row in (0, 3)]
    rows.commit(rows.apply(step(add=plain)), ints(50, 80))
    joins = [
        Row(1, [1, 2], range(8, 16), 2, index=4, options=rare(num_children=3)),
        Row(2, [1], range(16, 24), 1, options=rare(num_candidates=5)),
    ]
    batch = rows.apply(step(add=joins, change=[Change(0, 3, num_drafts=2)]))
    return rows, rows.drafted(batch, [ints(51, 52)])


def test_places_and_draws() -> None:
    rows, batch = mixed()
    plan = plan_draws(rows, batch)
    assert plan.place_rows.tolist() == [0, 0, 0, 1, 2, 3]
    assert plan.lengths.tolist() == [4, 5, 6, 2, 1, 4]
    assert plan.draw_rows.tolist() == [0, 0, 0, 1, 1, 1, 3]
    assert plan.draw_places.tolist() == [0, 1, 2, 3, 3, 3, 5]
    assert plan.sequence_indexes.tolist() == [0, 0, 0, 4, 5, 6, 0]
    assert plan.draft_ids.tolist() == [51, 52, -1, -1, -1, -1, -1]
    assert not plan.is_plain


@pytest.mark.parametrize(
    ("drawn", "kept"),
    [([51, 52, 53], 3), ([51, 9, 53], 2), ([9, 52, 53], 1), ([9, 9, 9], 1), ([51, 52, 51], 3)],
)
def test_drafts_are_accepted_up_to_the_first_that_differs(drawn: list[int], kept: int) -> None:
    rows, batch = mixed()
    fit = np.ones(6, np.bool_)
    settled = settle(plan_draws(rows, batch), ints(*drawn, 1, 2, 3, 4), fit, fit)
    assert settled.counts.tolist() == [kept, 3, 0, 1]
    assert settled.kept.tolist() == [*range(kept), 3, 4, 5, 6]
    assert not settled.flags.any()


@pytest.mark.parametrize(
    ("unfit", "counts", "failed"),
    [
        (0, [0, 3, 0, 1], 0),
        (1, [1, 3, 0, 1], None),
        (2, [2, 3, 0, 1], None),
        (3, [3, 0, 0, 1], 1),
        (4, [3, 3, 0, 1], 2),
    ],
)
@pytest.mark.parametrize("flag", [GRAMMAR, NOT_FINITE])
def test_only_a_row_that_cannot_draw_at_once_fails(
    unfit: int, counts: list[int], failed: int | None, flag: int
) -> None:
    """As if drawn one by one: an unfit place after accepted drafts is met again in the next step."""
    rows, batch = mixed()
    fit, all_fit = np.ones(6, np.bool_), np.ones(6, np.bool_)
    fit[unfit] = False
    columns = (all_fit, fit) if flag == GRAMMAR else (fit, all_fit)
    settled = settle(plan_draws(rows, batch), ints(51, 52, 53, 1, 2, 3, 4), *columns)
    assert settled.counts.tolist() == counts
    assert settled.flags.tolist() == [flag if row == failed else 0 for row in range(4)]


def one_by_one(drafts: list[list[int]], drawn: list[list[int]]) -> list[int]:
    """How many draws count, said as a loop."""
    counts = []
    for guesses, tokens in zip(drafts, drawn, strict=True):
        count = 1
        while count <= len(guesses) and tokens[count - 1] == guesses[count - 1]:
            count += 1
        counts.append(count)
    return counts


@settings(max_examples=60, deadline=None)
@given(drafts=st.lists(st.lists(st.integers(0, 1), max_size=4), min_size=1, max_size=6), data=st.data())
def test_settling_equals_a_loop(drafts: list[list[int]], data: st.DataObject) -> None:
    rows = RowTable(LIMITS)
    joins = [Row(row, [1], [8 * row, 8 * row + 1], 1) for row in range(len(drafts))]
    rows.commit(rows.apply(step(add=joins)), np.zeros(len(drafts), np.int32))
    changes = [Change(row, 5, num_drafts=4) for row in range(len(drafts))]
    batch = rows.drafted(rows.apply(step(change=changes)), [ints(*guess) for guess in drafts])
    plan = plan_draws(rows, batch)
    drawn = [[data.draw(st.integers(0, 1)) for _ in range(len(guess) + 1)] for guess in drafts]
    fit = np.ones(len(plan.lengths), np.bool_)
    settled = settle(plan, ints(*[token for tokens in drawn for token in tokens]), fit, fit)
    assert settled.counts.tolist() == one_by_one(drafts, drawn)


@pytest.mark.parametrize(
    ("known", "wanted", "guessed"),
    [
        ([1, 2, 3, 9, 1, 2, 3], 2, [9, 1]),
        ([5, 1, 2, 7, 1, 2, 8, 1, 2], 1, [8]),
        ([4, 1, 2, 7, 3, 1, 2, 8, 4, 1, 2], 1, [7]),
        ([1, 2, 3, 4], 3, []),
        ([1], 3, []),
        ([6, 6], 4, [6, 6, 6, 6]),
        ([1, 2, 1, 2, 1], 5, [2, 1, 2, 1, 2]),
    ],
    ids=["follows", "most-recent", "longest-first", "nothing", "alone", "repeats", "period"],
)
def test_prompt_lookup(known: list[int], wanted: int, guessed: list[int]) -> None:
    (found,) = NgramProposer().propose([DraftAsk(0, ints(*known), wanted)])
    assert found.tolist() == guessed


def test_as_many_draws_as_rows_are_not_one_of_each() -> None:
    """R25: a beam draws nothing and a row with two children twice; what is drawn from which logits must be looked up."""
    rows = RowTable(LIMITS)
    beam = Row(3, [1, 2], range(8), 2, options=rare(num_candidates=2))
    batch = rows.apply(step(add=[beam, Row(5, [1], range(8, 16), 1, options=rare(num_children=2))]))
    plan = plan_draws(rows, batch)
    assert plan.draw_rows.tolist() == [5, 5] and plan.draw_places.tolist() == [1, 1] and not plan.is_plain


@pytest.mark.parametrize(("finite", "opens"), [([1, 1, 1], [1, 1, 1]), ([1, 0, 1], [1, 1, 1]), ([1, 1, 0], [1, 0, 1])])
def test_one_draw_of_each_row_settles_like_any_other(finite: list[int], opens: list[int]) -> None:
    """The short way where every row has drawn its token gives what the long one gives."""
    rows = RowTable(LIMITS)
    batch = rows.apply(step(add=[Row(row, [1], [row], 1) for row in (2, 4, 5)]))
    plan = plan_draws(rows, batch)
    assert plan.is_plain
    given = ints(7, 8, 9), np.array(finite, np.bool_), np.array(opens, np.bool_)
    short, long = settle(plan, *given), settle(replace(plan, is_plain=False), *given)
    for name in ("counts", "kept", "flags"):
        assert getattr(short, name).tolist() == getattr(long, name).tolist()
        assert getattr(short, name).dtype == getattr(long, name).dtype
