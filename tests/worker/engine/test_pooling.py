"""Pools by themselves: sums that chunks do not change, rows that come, go and come again. With models: test_families.py."""

import random

import numpy as np
import pytest
import torch

from svc_common.errors import InvalidArgument
from worker_svc.model.pooling import LAST, MEAN, PoolingSums, check_added

SIZE = 24


def rows_of(*rows: int) -> np.ndarray:
    return np.array(rows, np.int32)


def hidden_of(num_tokens: int, seed: int) -> torch.Tensor:
    return torch.randn(num_tokens, SIZE, generator=torch.Generator().manual_seed(seed))


def fed(pools: PoolingSums, states: dict[int, torch.Tensor], rng: random.Random) -> dict[int, np.ndarray]:
    """Vectors of all rows, whose tokens come in random chunks beside rows that do not pool."""
    vectors: dict[int, np.ndarray] = {}
    at = dict.fromkeys(states, 0)
    while at:
        parts, rows, done = [], [], []
        for row in sorted(at):
            count = rng.randint(0, len(states[row]) - at[row])
            if count:
                parts.append(states[row][at[row] : at[row] + count])
                at[row] += count
                rows.append(row)
                done.append(at[row] == len(states[row]))
        if parts:
            offsets = np.cumsum([0, *map(len, parts)], dtype=np.int32)
            vectors |= dict(pools.step(torch.cat(parts), rows_of(*rows), offsets, np.array(done)))
        at = {row: n for row, n in at.items() if n < len(states[row])}
    return vectors


def test_vectors_do_not_depend_on_chunks():
    """Bit for bit, for 20 rows of which some pool by mean, some by the last token, some not at all."""
    states = {row * 3: hidden_of(1 + 7 * row % 41, row) for row in range(20)}
    tasks = {row: (None, MEAN, LAST)[row % 3 if row % 2 else (row // 3) % 3] for row in states}
    found = []
    for seed in range(5):
        pools = PoolingSums(SIZE, torch.device("cpu"))
        for row, task in tasks.items():
            if task is not None:
                pools.open(row, task)
        found.append(fed(pools, states, random.Random(seed)))
        assert not pools.wants(rows_of(*states))
    pooling = {row for row, task in tasks.items() if task is not None}
    for vectors in found:
        assert vectors.keys() == pooling
        for row, vector in vectors.items():
            assert vector.dtype == np.float32
            np.testing.assert_array_equal(vector, found[0][row])
            wanted = states[row].double().mean(0) if tasks[row] == MEAN else states[row][-1]
            np.testing.assert_allclose(vector, wanted.numpy(), rtol=1e-6)
    assert {tasks[row] for row in pooling} == {MEAN, LAST}


def test_rows_that_leave_leave_nothing():
    """A row that was forgotten, or whose index begins another life, starts from nothing; strangers are passed over."""
    pools = PoolingSums(SIZE, torch.device("cpu"))
    ten, two = hidden_of(10, 0), hidden_of(2, 1)
    first, not_done, done = np.array([0, 10], np.int32), np.array([False]), np.array([True])
    pools.open(4, MEAN)
    assert pools.step(ten, rows_of(4), first, not_done) == []
    pools.open(4, MEAN)
    [(row, vector)] = pools.step(two, rows_of(4), np.array([0, 2], np.int32), done)
    assert row == 4
    np.testing.assert_allclose(vector, two.mean(0).numpy(), rtol=1e-6)
    pools.open(4, MEAN)
    pools.forget(rows_of(4, 5, 70_000))
    assert not pools.wants(rows_of(4))
    assert pools.step(ten, rows_of(4), first, done) == []
    pools.open(2, LAST)
    pools.clear()
    assert not pools.wants(rows_of(2))


def test_values_that_are_not_finite_stay_in_their_row():
    """NaN in one row's hidden states is in its vector and in no other, also of those that use its place later."""
    pools = PoolingSums(SIZE, torch.device("cpu"))
    for row in (0, 1):
        pools.open(row, MEAN)
    bad = torch.cat([torch.full((1, SIZE), float("nan")), hidden_of(1, 3)])
    vectors = dict(pools.step(bad, rows_of(0, 1), np.array([0, 1, 2], np.int32), np.array([True, True])))
    assert np.isnan(vectors[0]).all()
    assert np.isfinite(vectors[1]).all()
    for row in range(10):
        pools.open(row, MEAN)
    again = pools.step(hidden_of(10, 4), rows_of(*range(10)), np.arange(11, dtype=np.int32), np.ones(10, np.bool_))
    assert all(np.isfinite(vector).all() for _, vector in again)


def test_what_cannot_be_pooled_is_refused():
    """An unknown task, and a mean that would miss tokens computed before the row joined, by field."""
    rows, computed = rows_of(3, 8), rows_of(0, 16)
    check_added(rows, rows_of(MEAN, LAST), computed)
    check_added(rows, rows_of(0, 0), computed)
    with pytest.raises(InvalidArgument, match=r"added\.options\.task.*row 8"):
        check_added(rows, rows_of(MEAN, MEAN), computed)
    with pytest.raises(InvalidArgument, match=r"added\.options\.task.*row 3.*task 9"):
        check_added(rows, rows_of(9, LAST), computed)
