"""Cache rules of 0.6.3, by hand: admission, growth, copy-on-write, sliding window (sections 4.6, 5, 16 of the requirements)."""

import pytest

from block_manager import integrity
from block_manager.cache_rules import Growth, PrefixHit
from tests.block_manager.compat.v0_moves import LATER, NEVER, OK, append, begin, can_admit, fork
from tests.block_manager.compat.v0_moves import make_063 as make
from tests.support.core.sequences import KnownSequence, prompt


def test_blocks_are_taken_from_zero_up_and_reused_last_freed_first() -> None:
    """R99, R15, R17, R101: one block for every 4 tokens, logical order in the table; freed blocks are free at once."""
    rules = make()
    a, b = prompt("a", range(9)), prompt("b", range(8))
    begin(rules, a)
    begin(rules, b)
    assert rules.ledger.tables == {"a": [0, 1, 2], "b": [3, 4]}
    assert rules.ledger.named_tables() == {"a": ["g0", "g1", "g2"], "b": ["g3", "g4"]}
    rules.release(a)
    assert rules.num_free_gpu == 14
    begin(rules, prompt("c", range(5)))
    assert rules.ledger.tables["c"] == [2, 1]


def test_admission_says_now_later_or_never() -> None:
    """R51, R52: above the watermark; NEVER only where an empty device is too small."""
    rules = make(10, watermark_blocks=2)
    assert can_admit(rules, prompt("a", range(33))) is NEVER
    assert can_admit(rules, prompt("a", range(32))) is OK
    begin(rules, prompt("b", range(20)))
    assert can_admit(rules, prompt("a", range(12))) is OK
    assert can_admit(rules, prompt("a", range(13))) is LATER
    assert rules.capacity_tokens == 32


def test_the_watermark_is_one_percent() -> None:
    """R52: int(0.01 x blocks), 0 below 100."""
    assert make(99).capacity_tokens == 99 * 4
    assert make(299).capacity_tokens == 297 * 4


def test_admission_counts_lookahead_and_ignores_hits() -> None:
    """R51, R91, R120: lookahead slots count for the question, are not taken; cached blocks count as if they were new."""
    rules = make(4, caching=True)
    begin(rules, prompt("a", range(8)))
    assert rules.lookup(prompt("b", range(8))) == PrefixHit()
    assert can_admit(rules, prompt("b", range(8))) is OK
    assert can_admit(rules, prompt("b", range(8)), num_lookahead=1) is LATER
    assert can_admit(rules, prompt("b", range(12))) is LATER


# --- appending ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("num_written", "num_unseen", "num_lookahead", "touched"),
    [(4, 0, 0, 0), (5, 0, 0, 1), (5, 1, 0, 1), (4, 1, 0, 1), (7, 2, 0, 2), (7, 1, 4, 2), (4, 5, 0, 2), (5, 3, 1, 2)],
)
def test_touched_blocks(num_written: int, num_unseen: int, num_lookahead: int, touched: int) -> None:
    """R66: 1 + ceil((unseen + lookahead - room in the last block) / 4); the corner: 0 if exactly full, 1 if partial."""
    rules, a = make(), prompt("a", range(num_written))
    begin(rules, a)
    a.token_ids += range(num_unseen)
    assert rules.num_touched(a, num_lookahead) == touched


def test_growth_is_refused_where_touched_blocks_exceed_free_ones() -> None:
    """R66: summed over the sequences, without watermark; a partial block that needs nothing is refused when none is free."""
    rules = make(3, watermark_blocks=1)
    a = prompt("a", range(8))
    begin(rules, a)
    b = fork(rules, a, "b")
    assert rules.can_extend([a, b], 0)
    a.token_ids.append(1)
    assert rules.can_extend([a, b], 1)
    b.token_ids.append(1)
    assert not rules.can_extend([a, b], 1)
    rules.extend(a, 1)
    assert rules.num_free_gpu == 0 and rules.num_touched(a) == 1 and not rules.can_extend([a], 0)


def test_a_block_is_taken_only_when_the_last_is_full() -> None:
    """R16, R67: on demand, never ahead."""
    rules, a = make(), prompt("a", range(7))
    begin(rules, a)
    assert append(rules, a, 1) == Growth()
    assert append(rules, a, 1) == Growth(added=[2])
    assert append(rules, a, *range(8)) == Growth(added=[3, 4])


def test_lookahead_slots_are_kept_free_behind_the_tokens() -> None:
    """R68: ceil((unseen + lookahead - empty) / 4) blocks more; slots that are there already are used first."""
    rules, a = make(), prompt("a", range(4))
    begin(rules, a)
    assert append(rules, a, 1, num_lookahead=4).added == [1, 2]
    assert append(rules, a, 1, 1, num_lookahead=1).added == []
    assert append(rules, a, 1, num_lookahead=5).added == [3]


def test_copy_on_write_of_two_samples() -> None:
    """R19, R20: the article's case. Prompt of 7 in blocks 0, 1; the first copies the partial block, the last writes in it."""
    rules, a = make(), prompt("a", range(7))
    begin(rules, a)
    b = fork(rules, a, "b")
    assert rules.ledger.gpu.refs[:2] == [2, 2]
    assert append(rules, a, 8) == Growth(copies=[(1, 2)], rewritten=True)
    assert append(rules, b, 9) == Growth()
    assert rules.ledger.tables == {"a": [0, 2], "b": [0, 1]}
    assert rules.ledger.gpu.refs[:3] == [2, 1, 1]


@pytest.mark.parametrize("num_sharers", [2, 3, 5])
def test_one_copy_less_than_sharers(num_sharers: int) -> None:
    """R20: n sharers make n - 1 copies."""
    rules, first = make(), prompt("s0", range(6))
    begin(rules, first)
    samples = [first, *(fork(rules, first, f"s{i}") for i in range(1, num_sharers))]
    assert sum(len(append(rules, s, 9).copies) for s in samples) == num_sharers - 1


def test_beams_free_what_only_they_held() -> None:
    """R21: the loser's own block goes, the prompt stays with the survivors and their forks."""
    rules, a = make(), prompt("a", range(8))
    begin(rules, a)
    b = fork(rules, a, "b")
    append(rules, a, 1)
    append(rules, b, 2)
    rules.release(b)
    c = fork(rules, a, "c")
    assert rules.ledger.tables == {"a": [0, 1, 2], "c": [0, 1, 2]}
    assert rules.num_free_gpu == 13
    assert append(rules, c, 3).copies == [(2, 3)]


def test_release_and_fork_without_a_table() -> None:
    """R97, R102, R103: no-ops, also the second time."""
    rules, a = make(), prompt("a", range(4))
    rules.fork(a, prompt("b", range(4)))
    rules.release(a)
    begin(rules, a)
    rules.release(a)
    rules.release(a)
    rules.forget(a)
    assert rules.num_free_gpu == 16 and rules.ledger.tables == {}


def test_several_live_sequences_start_together() -> None:
    """R203, R100: the full blocks of the prompt are shared with the first, each has its own behind them."""
    rules = make(7)
    a, b = (KnownSequence(name, [*range(6), *range(n)], 6) for name, n in (("a", 3), ("b", 7)))
    assert can_admit(rules, a, b) is OK
    begin(rules, a, b)
    assert rules.ledger.tables == {"a": [0, 1, 2], "b": [0, 3, 4, 5]}
    assert integrity.check(rules.ledger) == []
    assert can_admit(make(5), a, b) is NEVER


# --- sliding window -----------------------------------------------------------------------------------------------------


def test_blocks_out_of_the_window_become_one_null_block() -> None:
    """R105: 6 tokens are 6 // 4 + 2 = 3 blocks; what lies more than 3 before the computed ones is freed, lowest first."""
    rules, a = make(sliding_window=6), prompt("a", range(16))
    begin(rules, a)
    assert append(rules, a, 1) == Growth([0], rewritten=True), "null is 4; 0 was freed last"
    assert rules.ledger.tables["a"] == [4, 1, 2, 3, 0]
    append(rules, a, 1, 1, 1)
    assert append(rules, a, 1).added == [1]
    assert rules.ledger.tables["a"] == [4, 4, 2, 3, 0, 1]


def test_the_null_block_is_taken_at_the_first_append_for_good() -> None:
    """R105: free is one lower from then on; it is shared by all tables and never freed."""
    rules, a = make(8, sliding_window=4), prompt("a", range(3))
    begin(rules, a)
    assert rules.num_free_gpu == 7
    append(rules, a, 1)
    assert rules.num_free_gpu == 6
    rules.release(a)
    assert rules.num_free_gpu == 7 and rules.capacity_tokens == 7 * 4
    assert integrity.check(rules.ledger) == []


def test_admission_under_a_window_counts_what_is_taken() -> None:
    """R105, section 16: the recorded count of 3 blocks and, beside it, the whole prompt; the null block as soon as it is needed."""
    rules = make(8, sliding_window=4)
    assert can_admit(rules, prompt("a", range(28))) is OK
    assert can_admit(rules, prompt("a", range(29))) is NEVER
    begin(rules, prompt("b", range(8)))
    assert can_admit(rules, prompt("a", range(24))) is OK
    assert can_admit(rules, prompt("a", range(25))) is LATER
    watched = make(8, sliding_window=4, watermark_blocks=4)
    assert can_admit(watched, prompt("a", range(28))) is OK, "only 3 blocks count against the watermark"
