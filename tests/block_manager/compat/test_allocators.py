"""Allocators of one device: plain, by hash as in 2023, full blocks by hash as in 0.6.3 (R99, R106, R109, R113, R117, R118)."""

import pytest

from block_manager.compat.allocator_063 import FullBlockAllocator
from block_manager.compat.allocators_2023 import CachedAllocator, UncachedAllocator
from block_manager.compat.free_stack import FreeStack, StackThenEvictor
from block_manager.pool import NEVER_ACCESSED, BlockPool


def _cached_2023(num_blocks: int) -> CachedAllocator:
    free = StackThenEvictor(reversed(range(num_blocks)), keep_all=True)
    return CachedAllocator(BlockPool(num_blocks, free_blocks=free))


def _full_063(num_blocks: int) -> FullBlockAllocator:
    free = StackThenEvictor(reversed(range(num_blocks)), keep_all=False)
    return FullBlockAllocator(BlockPool(num_blocks, free_blocks=free))


def test_plain_blocks() -> None:
    """R99: one reference each, an error when there are none and on a double free; free at zero references."""
    allocator = UncachedAllocator(BlockPool(2, free_blocks=FreeStack(range(2))))
    assert [allocator.allocate(), allocator.allocate(b"x", 4)] == [1, 0]
    assert allocator.pool.refs == [1, 1]
    with pytest.raises(IndexError):
        allocator.allocate()
    allocator.release(1)
    with pytest.raises(ValueError):
        allocator.release(1)
    assert (allocator.pool.num_free, allocator.num_queries, allocator.num_hits) == (1, 0, 0)
    assert allocator.promote(0, b"x") == 0
    allocator.mark_computed(0)
    assert not allocator.is_computed(0)


def test_a_block_is_found_by_its_hash() -> None:
    """R109: in use it is shared, freed it comes back from the evictor, else a fresh one is taken; each adds a reference."""
    allocator = _cached_2023(3)
    block = allocator.allocate(b"x", 4)
    assert (allocator.allocate(b"x", 4), allocator.pool.refs[block]) == (block, 2)
    allocator.release(block)
    allocator.release(block)
    assert (allocator.pool.num_free, allocator.pool.refs[block]) == (3, 0)
    other = allocator.allocate(b"y", 4)
    assert other != block, "never used blocks go before contents"
    assert allocator.allocate(b"x", 4) == block
    assert (allocator.num_queries, allocator.num_hits) == (4, 2)


def test_a_taken_over_block_is_known_by_its_new_hash_only() -> None:
    """R109, R115: eviction drops the old hash and the word that it is computed."""
    allocator = _cached_2023(1)
    block = allocator.allocate(b"x", 4)
    allocator.mark_computed(block)
    allocator.release(block)
    assert allocator.allocate(b"x", 4) == block and allocator.is_computed(block), "revived with what it holds"
    allocator.release(block)
    assert allocator.allocate(b"y", 4) == block and not allocator.is_computed(block)
    assert allocator.pool.lookup(b"x") is None
    with pytest.raises(IndexError):
        allocator.allocate(b"x", 4)


def test_a_block_that_got_full() -> None:
    """R113: unknown contents: registered anew, its private hash removed; known ones: the known block instead of its own."""
    allocator = _cached_2023(4)
    mine = allocator.allocate(None, 4)
    private = allocator.pool.hash_of[mine]
    assert allocator.promote(mine, b"x") == mine
    assert allocator.pool.lookup(private) is None and allocator.pool.lookup(b"x") == mine
    late = allocator.allocate(None, 4)
    assert allocator.promote(late, b"x") == mine and allocator.pool.refs[mine] == 2 and allocator.pool.refs[late] == 0
    allocator.release(mine)
    allocator.release(mine)
    again = allocator.allocate(None, 4)
    assert allocator.promote(again, b"x") == mine, "out of the evictor too"


def test_private_blocks_are_never_shared_by_chance() -> None:
    """R113: each gets a hash of its own."""
    allocator = _cached_2023(3)
    blocks = [allocator.allocate() for _ in range(3)]
    assert len(set(blocks)) == 3 and len({allocator.pool.hash_of[b] for b in blocks}) == 3


def test_full_blocks_are_shared_in_the_step_that_fills_them() -> None:
    """R117, R118, R119: a hit on a block touched in this step shares it, but it is computed only after the step."""
    allocator = _full_063(3)
    block = allocator.allocate_full(b"x", 4)
    assert allocator.allocate_full(b"x", 4) == block
    assert not allocator.is_computed(block)
    allocator.mark_computed()
    assert allocator.is_computed(block)
    assert (allocator.num_queries, allocator.num_hits) == (2, 1)


def test_a_revived_block_is_computed_and_new() -> None:
    """R115, R117: out of the evictor its contents are valid; its access time starts anew."""
    allocator = _full_063(3)
    block = allocator.allocate_full(b"x", 4)
    allocator.mark_computed()
    allocator.pool.last_accessed[block] = 7.0
    allocator.pool.release([block])
    assert allocator.allocate_full(b"x", 4) == block
    assert allocator.is_computed(block) and allocator.pool.last_accessed[block] == NEVER_ACCESSED


def test_without_a_key_it_is_the_plain_allocator() -> None:
    """R106, R119: nothing is looked up, counted or registered."""
    allocator = FullBlockAllocator(BlockPool(2, free_blocks=FreeStack([1, 0])))
    assert [allocator.allocate_full(None, 4), allocator.fill(0, None, 4), allocator.allocate()] == [0, 0, 1]
    assert (allocator.num_queries, allocator.pool.num_prefixes) == (0, 0)


def test_a_block_that_got_full_in_063() -> None:
    """R118, R113: known contents are shared and the own block is given back; without reuse it is kept, unregistered."""
    allocator = _full_063(4)
    known = allocator.allocate_full(b"x", 4)
    own = allocator.allocate()
    assert allocator.fill(own, b"x", 4) == known and allocator.pool.refs[own] == 0
    own = allocator.allocate()
    assert allocator.fill(own, b"x", 4, reuse=False) == own and allocator.pool.hash_of[own] is None
    assert allocator.allocate_full(b"x", 4, reuse=False) not in (known, own)
    assert (allocator.num_queries, allocator.num_hits) == (1, 0)


def test_what_a_swap_touches_and_what_it_takes() -> None:
    """R72: contents in use over there cost nothing, in the evictor one block; equal ones are not joined in the recorded count."""
    allocator = _full_063(4)
    allocator.allocate_full(b"used", 4)
    allocator.pool.release([allocator.allocate_full(b"freed", 4)])
    assert allocator.num_touched_by([b"used", b"freed", b"new", b"new", None]) == 4
    assert allocator.num_taken_by([b"used", b"freed", b"new", b"new", None]) == 3
