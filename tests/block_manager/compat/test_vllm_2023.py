"""Cache rules of the 2023 manager, by hand: admission, growth, copy-on-write, swap (sections 4.6, 4.7, 5 of the requirements)."""

import pytest

from block_manager import integrity
from block_manager.cache_rules import Growth
from tests.block_manager.compat.v0_moves import LATER, NEVER, OK, append_each, begin, can_admit, fork
from tests.block_manager.compat.v0_moves import make_2023 as make
from tests.support.core.sequences import KnownSequence, prompt


def test_the_highest_block_first_then_the_last_freed() -> None:
    """R99, R17: popped from the end of the list of free blocks; freed in table order."""
    rules = make()
    a = prompt("a", range(9))
    begin(rules, a)
    assert rules.ledger.tables == {"a": [15, 14, 13]}
    rules.release(a)
    begin(rules, prompt("b", range(5)))
    assert rules.ledger.tables == {"b": [13, 14]}


def test_admission_says_now_later_or_never() -> None:
    """R51, R52, R120: above the watermark, as if nothing were cached."""
    for caching in (False, True):
        rules = make(10, watermark_blocks=2, caching=caching)
        assert can_admit(rules, prompt("a", range(33))) is NEVER
        begin(rules, prompt("b", range(20)))
        assert can_admit(rules, prompt("a", range(12))) is OK
        assert can_admit(rules, prompt("b", range(13))) is LATER
        assert rules.capacity_tokens == 32
    assert make(250).capacity_tokens == 248 * 4


def test_growth_needs_a_free_block_for_each_sequence() -> None:
    """R65: whether it will take one or not."""
    rules, a = make(3), prompt("a", range(5))
    begin(rules, a)
    b = fork(rules, a, "b")
    assert rules.can_extend([a], 1) and not rules.can_extend([a, b], 1)


def test_one_block_is_added_when_the_table_is_short() -> None:
    """R67, R16: else the last one takes the token."""
    rules, a = make(), prompt("a", range(7))
    begin(rules, a)
    assert append_each(rules, a, 1, 1) == [Growth(), Growth(added=[13])]


@pytest.mark.parametrize("caching", [False, True])
def test_copy_on_write_of_two_samples(caching: bool) -> None:
    """R19, R20, R114: the article's case. The first writer copies the partial block, the last one writes in it."""
    rules, a = make(caching=caching), prompt("a", range(6))
    begin(rules, a)
    shared = rules.ledger.tables["a"][1]
    b = fork(rules, a, "b")
    [growth] = append_each(rules, a, 8)
    assert growth == Growth(copies=[(shared, rules.ledger.tables["a"][1])], rewritten=True)
    assert append_each(rules, b, 9) == [Growth()]
    assert rules.ledger.tables["a"][0] == rules.ledger.tables["b"][0] and rules.ledger.tables["b"][1] == shared


@pytest.mark.parametrize("num_sharers", [2, 3, 5])
def test_one_copy_less_than_sharers(num_sharers: int) -> None:
    """R20: n sharers make n - 1 copies."""
    rules, first = make(), prompt("s0", range(6))
    begin(rules, first)
    samples = [first, *(fork(rules, first, f"s{i}") for i in range(1, num_sharers))]
    assert sum(len(growth.copies) for s in samples for growth in append_each(rules, s, 9)) == num_sharers - 1


def test_release_and_fork_without_a_table() -> None:
    """R97, R102, R103: no-ops, also the second time."""
    rules, a = make(), prompt("a", range(4))
    rules.fork(a, prompt("b", range(4)))
    begin(rules, a)
    rules.release(a)
    rules.release(a)
    rules.forget(a)
    assert rules.num_free_gpu == 16 and rules.ledger.tables == {}


@pytest.mark.parametrize("caching", [False, True])
def test_several_live_sequences_start_together(caching: bool) -> None:
    """R100, R203: the full blocks of the prompt are shared with the first, each has its own behind them."""
    rules = make(6, caching=caching)
    a, b = (KnownSequence(name, [*range(6), *[n] * n], 6) for name, n in (("a", 3), ("b", 7)))
    assert can_admit(rules, a, b) is OK
    begin(rules, a, b)
    assert rules.ledger.tables["a"][0] == rules.ledger.tables["b"][0] and rules.num_free_gpu == 0
    assert can_admit(make(5), a, b) is NEVER


# --- swap ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("caching", [False, True])
def test_swap_keeps_sharing(caching: bool) -> None:
    """R73, R74, R104: one destination for each distinct block, its references counted; ids from zero on each device."""
    rules, a = make(caching=caching), prompt("a", range(6))
    begin(rules, a)
    b = fork(rules, a, "b")
    append_each(rules, a, 7)
    assert rules.can_swap_out([a, b])
    pairs = rules.swap_out([a, b])
    assert len(pairs) == 3 and len({source for source, _ in pairs}) == len({target for _, target in pairs}) == 3
    host = rules.ledger.host_tables
    assert host["a"][0] == host["b"][0] and host["a"][1] != host["b"][1]
    assert (rules.num_free_gpu, rules.num_free_cpu) == (16, 13)
    assert rules.can_swap_in([a, b]) is OK
    assert len(rules.swap_in([a, b])) == 3
    assert rules.ledger.tables["a"][0] == rules.ledger.tables["b"][0]
    assert rules.num_free_cpu == 16 and integrity.check(rules.ledger) == []


def test_a_swapped_block_is_found_again_where_it_was() -> None:
    """R74, R109: also a partial one, by the private hash it keeps."""
    rules, a = make(caching=True), prompt("a", range(5))
    begin(rules, a)
    append_each(rules, a, 1, 1, 1, 1)
    before = list(rules.ledger.tables["a"])
    queries, hits = rules.hits
    rules.swap_out([a])
    rules.swap_in([a])
    assert rules.ledger.tables["a"] == before and rules.hits == (queries + 3, hits + 3)


def test_swap_counts_distinct_blocks() -> None:
    """R72, R75: out: one host block each; in: one more for each sequence, above the watermark; NEVER if too many."""
    a = prompt("a", range(6))
    for num_cpu, fits in ((2, True), (1, False)):
        rules = make(num_cpu=num_cpu)
        begin(rules, a)
        assert rules.can_swap_out([a, fork(rules, a, "b")]) is fits
    rules = make(5, 5, watermark_blocks=1)
    begin(rules, a)
    b = fork(rules, a, "b")
    rules.swap_out([a, b])
    assert rules.can_swap_in([a, b]) is OK
    c = prompt("c", range(4))
    begin(rules, c)
    assert rules.can_swap_in([a, b]) is LATER
    rules.release(c)
    tight = make(3, 5)
    begin(tight, a)
    d = fork(tight, a, "d")
    tight.swap_out([a, d])
    assert tight.can_swap_in([a, d]) is NEVER


def test_the_watermark_protects_only_running_sequences() -> None:
    """R72: on an idle device a group above the watermark comes back; it would wait for ever."""
    rules, a = make(4, watermark_blocks=1), prompt("a", range(10))
    begin(rules, a)
    rules.swap_out([a])
    assert rules.can_swap_in([a]) is OK


def test_a_swapped_sequence_can_end() -> None:
    """R103, R206: each distinct block is freed on its own device."""
    rules, a = make(caching=True), prompt("a", range(6))
    begin(rules, a)
    b = fork(rules, a, "b")
    rules.swap_out([a, b])
    rules.release(a)
    assert rules.num_free_cpu == 14
    rules.release(b)
    assert rules.num_free_cpu == 16 and integrity.check(rules.ledger) == []
