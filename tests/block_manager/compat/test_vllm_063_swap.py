"""Cache rules of 0.6.3, by hand: swap (sections 4.7, 5, 16 of the requirements)."""

import pytest

from block_manager import integrity
from tests.block_manager.compat.v0_moves import LATER, NEVER, OK, append, begin, fork
from tests.block_manager.compat.v0_moves import make_063 as make
from tests.support.core.sequences import prompt


def test_plain_swap_loses_sharing() -> None:
    """R73, R74, R104, R204: sequence by sequence; a block shared by two makes two pairs. Ids count from zero on each device."""
    rules, a = make(), prompt("a", range(6))
    begin(rules, a)
    b = fork(rules, a, "b")
    assert rules.can_swap_out([a, b])
    assert rules.swap_out([a, b]) == [(0, 0), (1, 1), (0, 2), (1, 3)]
    assert rules.ledger.tables == {} and rules.ledger.host_tables == {"a": [0, 1], "b": [2, 3]}
    assert rules.ledger.named_tables()["b"] == ["c2", "c3"]
    assert (rules.num_free_gpu, rules.num_free_cpu) == (16, 12)
    assert rules.can_swap_in([a, b]) is OK
    assert rules.swap_in([a, b]) == [(0, 1), (1, 0), (2, 2), (3, 3)]
    assert rules.num_free_cpu == 16 and integrity.check(rules.ledger) == []


@pytest.mark.parametrize(("num_cpu", "fits"), [(6, True), (5, False)])
def test_swap_out_counts_full_blocks_of_every_sequence(num_cpu: int, fits: bool) -> None:
    """R72, R75, R204: 2 touched by the next append + 2 full blocks of each, not joined; the host has no watermark."""
    rules, a = make(num_cpu=num_cpu, watermark_blocks=3), prompt("a", range(8))
    begin(rules, a)
    b = fork(rules, a, "b")
    for sequence in (a, b):
        sequence.token_ids.append(1)
    assert rules.can_swap_out([a, b]) is fits


def test_swap_in_says_now_later_or_never() -> None:
    """R69, R72: full blocks + touched ones above the watermark; NEVER when the whole device is too small."""
    rules, a = make(6, watermark_blocks=1), prompt("a", range(10))
    begin(rules, a)
    rules.swap_out([a])
    a.token_ids.append(1)
    assert rules.can_swap_in([a]) is OK
    b = prompt("b", range(9))
    begin(rules, b)
    assert rules.can_swap_in([a]) is LATER, "3 of 3 free would break the watermark"
    rules.release(b)
    assert rules.can_swap_in([a], num_lookahead=9) is OK, "5 of 6"
    assert rules.can_swap_in([a], num_lookahead=13) is OK, "nothing runs that the watermark would protect"
    assert rules.can_swap_in([a], num_lookahead=14) is NEVER


def test_cached_swap_shares_what_the_other_side_knows() -> None:
    """R72, R74, R117, R119: contents still known on the device cost no copy of their own and count as hits."""
    rules, a, b = make(8, caching=True), prompt("a", range(9)), prompt("b", range(9))
    begin(rules, a)
    begin(rules, b)
    assert rules.swap_out([a]) == [(0, 0), (1, 1), (2, 2)]
    assert rules.hits == (4, 2), "the host's lookups are its own"
    assert rules.swap_in([a]) == [(0, 0), (1, 1), (2, 2)]
    assert rules.hits == (6, 4) and rules.ledger.tables == {"a": [0, 1, 2], "b": [0, 1, 3]}
    rules.swap_out([a])
    rules.swap_out([b])
    assert rules.ledger.host_tables["a"][:2] == rules.ledger.host_tables["b"][:2]


def test_a_swapped_sequence_can_end() -> None:
    """R206, R97: its host blocks are freed; access times of device blocks with the same ids are left alone."""
    rules, a = make(caching=True), prompt("a", range(8))
    begin(rules, a, now=9.0)
    rules.swap_out([a])
    b = prompt("b", range(8))
    begin(rules, b, now=10.0)
    before = list(rules.ledger.gpu.last_accessed)
    rules.release(a)
    assert rules.num_free_cpu == 16 and rules.ledger.gpu.last_accessed == before
    assert integrity.check(rules.ledger) == []


def test_a_window_survives_a_swap() -> None:
    """R105, R73: what was dropped is not moved and stays dropped."""
    rules, a = make(sliding_window=4), prompt("a", range(20))
    begin(rules, a)
    append(rules, a, 1)
    null = rules.ledger.tables["a"][0]
    assert rules.ledger.tables["a"][:2] == [null, null]
    assert len(rules.swap_out([a])) == 4 and len(rules.ledger.host_tables["a"]) == 4
    rules.swap_in([a])
    assert rules.ledger.tables["a"][:2] == [null, null] and len(rules.ledger.tables["a"]) == 6
    assert integrity.check(rules.ledger) == []
