"""Cached prefixes of several cache groups: the longest of which each group has what the next token attends to."""

import itertools
import random
from collections.abc import Iterable

import pytest

from block_manager import integrity
from block_manager.cache_rules import PrefixHit
from block_manager.rules.cache_groups import longest_hit
from block_manager.rules.grouped_rules import GroupedRules
from block_manager.rules.v1_rules import V1PoolRules
from tests.block_manager.rules.test_grouped_rules import SIZE, Windows, held, make
from tests.support.core.sequences import KnownSequence, prompt, start


def cached(
    windows: Windows, num_tokens: int, *, evicted: Iterable[int] = (), num_usable: int = 60
) -> tuple[GroupedRules[V1PoolRules], list[int]]:
    """Rules that have a prompt in their cache, and its flat table; no block is in use. `evicted`: indexes in the table of
    blocks that are not cached any more."""
    rules = make(windows, num_usable)
    a = prompt("a/0", range(num_tokens))
    start(rules, a)
    table = list(rules.ledger.tables["a/0"])
    for at in evicted:
        rules.ledger.gpu.unregister(table[at])
    rules.release(a)
    return rules, table


def longest(rules: GroupedRules[V1PoolRules], table: list[int], windows: Windows) -> int:
    """By trying all lengths: a group without a window needs all blocks, the others those of the next token's window."""
    pool, step = rules.ledger.gpu, len(windows)
    for length in range(len(table) // step, 0, -1):
        needed = [
            table[at * step + group]
            for group, window in enumerate(windows)
            for at in range(0 if window is None else max(0, length * SIZE - window + 1) // SIZE, length)
        ]
        if all(pool.hash_of[block] is not None for block in needed):
            return length
    return 0


@pytest.mark.parametrize(
    "windows", [(None, 6), (6, None, 9), (5, 13), (3, 9, None, 9), (1, None), (17, 6), (2, 10, 18)]
)
def test_the_longest_hit_is_found_whatever_is_evicted(windows: Windows) -> None:
    """R137: with any blocks evicted, and only blocks that are cached are shared, null blocks in front of them."""
    rng, lengths = random.Random(str(windows)), set[int]()
    for _ in range(150):
        evicted = rng.sample(range(10 * len(windows)), rng.choice([0, 1, 2, 3, 8, 20]))
        rules, table = cached(windows, 40, evicted=evicted)
        b = prompt("b/0", range(44))
        hit = rules.lookup(b)
        expected = longest(rules, table, windows)
        assert hit.num_tokens == expected * SIZE == rules.num_cached_tokens(b)
        assert len(hit.block_ids) == expected * len(windows)
        for number, block in enumerate(hit.block_ids):
            window = windows[number % len(windows)]
            behind = 0 if window is None else max(0, hit.num_tokens - window + 1) // SIZE
            assert block == (table[number] if number // len(windows) >= behind else 0)
        lengths.add(expected)
        before = rules.num_free_gpu
        needed = rules.num_blocks_to_admit([b], hit, 44 - hit.num_tokens)
        start(rules, b)
        assert before - rules.num_free_gpu == needed and rules.ledger.gpu.refs[0] == 0
        assert integrity.check(rules.ledger) == [] and rules.ledger.gpu.hash_of[0] is None
    assert len(lengths) > 2


def test_the_longest_run_of_a_window() -> None:
    """Against all lengths, for all patterns of eight blocks."""
    for pattern in itertools.product([None, 1], repeat=8):
        for window in (1, 2, 5, 6, 9, 40):
            lengths = (n for n in range(8, -1, -1) if None not in pattern[max(0, n * SIZE - window + 1) // SIZE : n])
            assert longest_hit(pattern, window, SIZE) == next(lengths)


def test_blocks_of_one_group_are_no_hit_for_another() -> None:
    """Equal tokens have other KV in each group: two keys for each block, and the first of the group without a window."""
    rules, table = cached([5, None], 8)
    assert rules.ledger.gpu.num_prefixes == 4
    key = rules.first_key(prompt("b/0", range(8)))
    assert key is not None and rules.ledger.gpu.lookup(key) == table[1]
    rules.ledger.gpu.unregister(table[3])
    assert rules.lookup(prompt("b/0", range(12))).block_ids == (table[0], table[1])


def test_a_hit_behind_an_evicted_front_takes_only_what_it_needs() -> None:
    """R137: the first blocks of the window are gone; those of the group without one, and the window's last, are shared."""
    rules, table = cached([None, 5], 16, evicted=[1, 3, 5])
    b = prompt("b/0", range(17))
    assert rules.lookup(b).block_ids == (table[0], 0, table[2], 0, table[4], 0, table[6], table[7])
    assert rules.num_blocks_to_admit([b], rules.lookup(b), 1) == 5 + 2
    start(rules, b)
    assert held(rules, 1, "b/0") == [3, 4]
    rules.release(b)
    assert rules.num_free_gpu == 60 and rules.hits == (3 + 4, 4)


def test_no_group_takes_what_another_hits() -> None:
    """R137: the hits of all groups are referenced before a block is allocated, though they come first in order of reuse."""
    rules, table = cached([None, 5], 16, num_usable=10)
    b = prompt("b/0", range(20))
    start(rules, prompt("c/0", [99]))
    assert list(rules.ledger.gpu.free_blocks) == [4, 3, 2, 1, 8, 7, 6, 5]
    start(rules, b)
    assert rules.ledger.tables["b/0"] == [table[0], 0, table[2], 0, table[4], 0, table[6], table[7], 7, 6]


def test_a_younger_sample_shares_what_the_older_one_still_has() -> None:
    """R19: without registered blocks, of the prompt; null blocks of the older one are not shared."""
    rules = make([None, 6], caching=False)
    older = prompt("a/0", range(22))
    start(rules, older)
    younger = prompt("a/1", range(22), sibling_names=("a/0",))
    assert rules.lookup(younger).num_tokens == 20
    rules.free_out_of_window([older], [17])
    table = rules.ledger.tables["a/0"]
    assert table[1::2][:3] == [0, 0, 0]
    assert rules.lookup(younger).block_ids == (*table[:6], table[6], table[7], table[8], table[9])
    rules.free_out_of_window([older], [22])
    assert held(rules, 1) == [4, 5]
    assert rules.lookup(younger) == PrefixHit(), "16 tokens need block 2, which is gone, and 20 need block 3"


def test_samples_behind_a_hit_register_no_null_block() -> None:
    """R102: they share the null blocks in front too."""
    rules, _ = cached([None, 5], 16, evicted=[1])
    group = [KnownSequence(f"b/{i}", [*range(16), 7], 16) for i in range(2)]
    hit = rules.lookup(group[0])
    rules.admit(group, hit, 1)
    for sequence in group:
        sequence.num_computed_tokens = 16
        rules.extend(sequence, 1)
        sequence.num_computed_tokens = 17
        rules.commit_sampled(sequence)
    assert rules.ledger.gpu.hash_of[0] is None and integrity.check(rules.ledger) == []


def test_a_hit_ends_in_the_prompt_that_siblings_share() -> None:
    """R102: the first sample knows more than the prompt; the others go on behind the prompt, where null blocks would be in
    their windows.
    """
    rules, table = cached([None, 5], 24)
    group = [KnownSequence(f"b/{i}", [*range(24), 7], 8, has_siblings=True) for i in range(2)]
    hit = rules.lookup(group[0])
    assert hit.block_ids == (table[0], 0, table[2], table[3]) and hit.num_tokens == 8
    rules.admit(group, hit, 4)
    assert held(rules, 1, "b/1") == [1, 2, 3, 4, 5, 6], "what token 8 attends to, and its own"
    group[0].has_siblings = False
    assert rules.lookup(group[0]).num_tokens == 24


def test_blocks_that_results_fill_are_hits_in_all_groups() -> None:
    """R137: registered when their tokens are known, in each group; those whose KV was not computed are dropped in each."""
    rules = make([None, 5])
    a = prompt("a/0", range(6))
    start(rules, a)
    rules.extend(a, 2)
    a.token_ids += [6, 7]
    a.num_computed_tokens = 8
    assert rules.lookup(prompt("b/0", range(9))).num_tokens == 4
    rules.commit_sampled(a)
    assert rules.lookup(prompt("b/0", range(9))).num_tokens == 8
    rules.retract(a, 4)
    assert rules.lookup(prompt("b/0", range(9))).num_tokens == 4 and rules.ledger.gpu.num_prefixes == 2
