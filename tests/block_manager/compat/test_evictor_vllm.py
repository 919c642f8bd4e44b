"""Which of the freed blocks is evicted first (R110, R111)."""

import hypothesis.strategies as st
import pytest
from hypothesis import given

from block_manager.compat.evictor_vllm import LruEvictor
from block_manager.compat.free_stack import FreeStack, StackThenEvictor
from block_manager.pool import BlockPool


def test_the_least_recently_accessed_goes_first() -> None:
    """R111: by time; among equals the longest prefix; among those the first added."""
    evictor = LruEvictor()
    for block, num_hashed_tokens, time in [(1, 4, 1.0), (2, 8, 1.0), (3, 8, 1.0), (4, 99, 2.0)]:
        evictor.add(block, num_hashed_tokens, time)
    assert [evictor.evict() for _ in range(4)] == [2, 3, 1, 4]


def test_only_the_front_of_the_table_is_looked_at() -> None:
    """R111: the scan ends at the first entry accessed later than the candidate, whatever lies behind it."""
    evictor = LruEvictor()
    for block, time in [(1, 5.0), (2, 9.0), (3, 1.0)]:
        evictor.add(block, 4, time)
    assert evictor.evict() == 1


def test_what_is_not_there_is_an_error() -> None:
    """R111: ValueError for evicting from nothing, and for removing or updating what is unknown."""
    evictor = LruEvictor()
    for wrong in (evictor.evict, lambda: evictor.remove(1), lambda: evictor.update(1, 2.0)):
        with pytest.raises(ValueError):
            wrong()
    evictor.add(1, 4, 1.0)
    evictor.remove(1)
    assert len(evictor) == 0 and 1 not in evictor


def test_an_update_keeps_the_place() -> None:
    """R111: a changed access time changes which block is evicted, not the order of the table."""
    evictor = LruEvictor()
    evictor.add(1, 4, 1.0)
    evictor.add(2, 4, 2.0)
    evictor.update(1, 3.0)
    assert list(evictor) == [1, 2]
    assert evictor.evict() == 1, "the candidate is the first; 2 has no longer prefix"


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3)), max_size=20))
def test_with_growing_times_it_is_plain_lru(steps: list[tuple[int, int]]) -> None:
    """R111: where times grow with the order of adding, the victim is the true minimum."""
    evictor, now, model = LruEvictor(), 0.0, []
    for block, (pause, num_hashed_tokens) in enumerate(steps):
        now += pause
        evictor.add(block, num_hashed_tokens, now)
        model.append((now, -num_hashed_tokens, block))
    assert [evictor.evict() for _ in steps] == [block for _, _, block in sorted(model)]


def test_blank_blocks_go_before_contents() -> None:
    """R117: a freed block with known contents is taken only when no blank one is left; the last freed blank first (R99)."""
    free = StackThenEvictor([1, 0], keep_all=False)
    pool = BlockPool(2, free_blocks=free)
    assert [*pool.allocate(1), *pool.allocate(1)] == [0, 1]
    pool.register(0, b"prefix", 4)
    pool.release([0, 1])
    assert (len(free), list(free), 0 in free, 7 in free) == (2, [1, 0], True, False)
    assert [free.pop(), free.pop()] == [1, 0]
    with pytest.raises(IndexError):
        free.pop()


def test_in_2023_all_freed_blocks_keep_their_contents() -> None:
    """R110: free = never used + evictable."""
    free = StackThenEvictor([2, 1, 0], keep_all=True)
    pool = BlockPool(3, free_blocks=free)
    [block] = pool.allocate(1)
    pool.release([block])
    assert (len(free), len(free.evictor)) == (3, 1)
    free.remove([block])
    assert list(free) == [1, 2]


def test_the_last_freed_is_taken_first() -> None:
    """R99: most recently freed first."""
    free = FreeStack([2, 1, 0])
    assert [free.pop(), free.pop()] == [0, 1]
    free.extend([0], BlockPool(3))
    assert list(free) == [0, 2] and 0 in free and 1 not in free
    free.remove([2])
    assert (free.pop(), len(free)) == (0, 0)
