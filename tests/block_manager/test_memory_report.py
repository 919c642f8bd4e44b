"""Arithmetic of the memory report on tables made by hand, and the contiguous model on memories one can draw."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from block_manager import contiguous
from block_manager.contiguous import (
    BuddyAllocator,
    ContiguousDemand,
    ContiguousMemory,
    ContiguousRequest,
    ContiguousServer,
)
from block_manager.memory_report import HeldSequence, PagedMemory, paged_memory


def test_two_samples_share_the_full_blocks_of_a_prompt() -> None:
    """R209: logical and physical blocks, the share saved, and the slots of last blocks that hold nothing."""
    memory = paged_memory([HeldSequence([1, 2, 3], 11), HeldSequence([1, 2, 4], 10)], 4)
    assert memory == PagedMemory(4, 2, 21, 6, 4, waste_tokens=3, max_waste_tokens=2)
    assert memory.saved == pytest.approx(1 / 3)
    assert memory.waste == pytest.approx(3 / 16)


def test_a_shared_last_block_is_wasted_once() -> None:
    """R209: before the copy-on-write both samples see the same empty slots; of a block that one fills, only what all leave."""
    assert paged_memory([HeldSequence([1], 3), HeldSequence([1], 3)], 4).waste_tokens == 1
    assert paged_memory([HeldSequence([1], 2), HeldSequence([1], 4)], 4).waste_tokens == 0


def test_what_holds_nothing_counts_nothing() -> None:
    """R209: no table, the null block of a window, and a token sampled after the table was made."""
    assert paged_memory([HeldSequence([], 7)], 4) == PagedMemory(4)
    assert PagedMemory(4).saved == PagedMemory(4).waste == 0.0
    windowed = paged_memory([HeldSequence([9, 9, 5], 12), HeldSequence([9, 9, 6], 13)], 4, placeholders=[9])
    assert (windowed.logical_blocks, windowed.physical_blocks, windowed.saved) == (2, 2, 0.0)
    assert (windowed.num_tokens, windowed.waste_tokens) == (24, 0)


def test_each_cache_group_has_slots_for_the_same_tokens() -> None:
    """R209: two groups, blocks of 4: three positions for 9 tokens, with 3 empty slots in both last blocks; null blocks
    count nothing.
    """
    memory = paged_memory([HeldSequence([1, 9, 2, 5, 3, 6], 9)], 4, placeholders=[9], num_groups=2)
    assert memory == PagedMemory(4, 1, 9, 5, 5, waste_tokens=6, max_waste_tokens=3)


def test_sums_over_instants() -> None:
    """R209: counts add up, the worst waste stays the worst."""
    total = PagedMemory(4, 1, 5, 2, 2, 3, 3) + PagedMemory(4, 2, 8, 4, 3, 1, 1)
    assert total == PagedMemory(4, 3, 13, 6, 5, 4, 3)


@given(st.integers(1, 300), st.lists(st.tuples(st.booleans(), st.integers(1, 40)), max_size=60))
def test_buddies_never_overlap_and_come_back_whole(num_slots: int, moves: list[tuple[bool, int]]) -> None:
    """R209: regions are aligned powers of two inside the memory, no slot is taken twice, and all is one piece again at the end."""
    memory, held = BuddyAllocator(num_slots), list[tuple[int, int]]()
    for takes, number in moves:
        if takes:
            size = BuddyAllocator.region_size(number)
            assert number <= size < 2 * number
            start = memory.take(size)
            assert start is not None or held or size > num_slots // 2, (
                "an empty memory has its larger half in one piece"
            )
            held += [] if start is None else [(start, size)]
        elif held:
            memory.give_back(*held.pop(number % len(held)))
        slots = [slot for start, size in held for slot in range(start, start + size)]
        assert len(set(slots)) == len(slots) == num_slots - memory.num_free
        assert all(start % size == 0 and start + size <= num_slots for start, size in held)
    for start, size in held:
        memory.give_back(start, size)
    whole = 1 << (num_slots.bit_length() - 1)
    assert memory.num_free == num_slots and memory.take(whole) == 0


def test_contiguous_memory_in_its_four_parts() -> None:
    """R209: 32 slots, a request of 10 that will stop at 6 and holds 2: 2 used, 4 reserved, 10 of 16 never used; the other
    16 are lost only when no waiting request fits in."""
    tenant = ContiguousRequest(ContiguousDemand(1, 10), (2,), 6)
    assert contiguous.place([tenant], [], 32) == ContiguousMemory(2, 4, 10, 0, 1)
    assert contiguous.place([tenant], [ContiguousDemand(1, 16)], 32).external == 0
    lost = contiguous.place([tenant], [ContiguousDemand(1, 17), ContiguousDemand(2, 16)], 32)
    assert lost == ContiguousMemory(2, 4, 10, 16, 1)
    assert lost.shares() == {"used": 2 / 32, "reserved": 4 / 32, "internal": 10 / 32, "external": 16 / 32}
    assert set(ContiguousMemory(0, 0, 0, 0).shares().values()) == {0.0}


def test_holes_between_regions_are_external() -> None:
    """R209: 16 slots are free in two holes of 8, and a request of 9 fits into neither."""
    server = ContiguousServer(32)
    for name in "abcd":
        assert server.enter(name, ContiguousDemand(1, 8))
    server.leave("a")
    server.leave("c")
    staying = [ContiguousRequest(ContiguousDemand(1, 8), (8,), 8)] * 2
    assert server.report(staying, [ContiguousDemand(1, 9)]).external == 16
    assert server.report(staying, [ContiguousDemand(1, 9), ContiguousDemand(2, 8)]).external == 0
    server.leave("b")
    assert server.enter("e", ContiguousDemand(1, 9))


def test_samples_enter_together_or_not_at_all() -> None:
    """R209: a request needs a region for each sample; what finds no place is left out and waits."""
    server = ContiguousServer(32)
    assert not server.enter("a", ContiguousDemand(3, 16)) and server.enter("b", ContiguousDemand(1, 32))
    tenants = [
        ContiguousRequest(ContiguousDemand(1, 16), (3,), 16),
        ContiguousRequest(ContiguousDemand(2, 16), (1, 1), 16),
    ]
    assert contiguous.place(tenants, [], 32) == ContiguousMemory(3, 13, 0, 16, 1, num_left_out=2)


@given(st.lists(st.tuples(st.integers(1, 3), st.integers(1, 40), st.integers(1, 40)), max_size=8), st.integers(1, 400))
def test_shares_add_up_to_one(requests: list[tuple[int, int, int]], num_slots: int) -> None:
    """R209: every slot that is taken or lost is counted in exactly one of the four, and no more than there are."""
    tenants = [ContiguousRequest(ContiguousDemand(n, max(a, b)), (min(a, b),) * n, max(a, b)) for n, a, b in requests]
    memory = contiguous.place(tenants, [ContiguousDemand(1, 7)], num_slots)
    assert min(memory.used, memory.reserved, memory.internal, memory.external) >= 0
    assert memory.num_slots <= num_slots
    assert sum(memory.shares().values()) == pytest.approx(1.0 if memory.num_slots else 0.0)
