"""Null blocks of sliding windows under V1's and Quire's cache rules: what meets a table that has some (blocks of 4 tokens)."""

from block_manager import integrity
from block_manager.rules.quire_rules import QuireRules
from tests.support.core.sequences import KnownSequence, fork, go_on, prompt, start

SIZE, WINDOW = 4, 6


def make(num_usable: int = 12, num_host: int = 12) -> QuireRules:
    return QuireRules.make(
        block_size=SIZE,
        num_gpu_blocks=num_usable + 1,
        num_cpu_blocks=num_host,
        max_model_len=64,
        prefix_caching=True,
        watermark_blocks=0,
        window=WINDOW,
    )


def looked_ahead(rules: QuireRules, num_tokens: int = 18) -> KnownSequence:
    """A prompt all of whose tokens are computed and whose first three blocks are out of sight."""
    a = prompt("a/0", range(num_tokens))
    start(rules, a)
    rules.free_out_of_window([a], [num_tokens])
    assert rules.ledger.tables["a/0"][:3] == [0, 0, 0] and 0 not in rules.ledger.tables["a/0"][3:]
    return a


def test_what_is_behind_the_window_is_free_and_can_still_be_found() -> None:
    """R105, R137: lowest first, so that the oldest is overwritten first; again it is a no-op."""
    rules = make()
    a = looked_ahead(rules)
    assert rules.num_free_gpu == 12 - 2
    rules.free_out_of_window([a], [18])
    assert rules.num_free_gpu == 10 and integrity.check(rules.ledger) == []
    again = prompt("b/0", range(18))
    assert rules.lookup(again).num_tokens == 16
    assert list(rules.ledger.gpu.free_blocks)[-3:] == list(rules.lookup(again).block_ids[:3])


def test_a_table_never_holds_more_than_its_window() -> None:
    """R105: at most window / block + 2 blocks, however long it becomes."""
    rules = make()
    a = prompt("a/0", range(5))
    start(rules, a)
    for _ in range(50):
        computed = a.num_computed_tokens
        go_on(rules, a)
        rules.free_out_of_window([a], [computed])
        assert sum(map(bool, rules.ledger.tables["a/0"])) <= WINDOW // SIZE + 2
    rules.release(a)
    assert rules.num_free_gpu == 12


def test_an_older_sample_has_nothing_to_share_any_more() -> None:
    """R19: blocks that were dropped are not the younger sample's; those that are still known are."""
    rules = make(num_usable=6)
    looked_ahead(rules)
    rules.ledger.gpu.reset_prefixes()
    younger = prompt("a/1", range(18), sibling_names=("a/0",))
    assert rules.lookup(younger).block_ids == ()


def test_there_and_back_without_what_is_out_of_sight() -> None:
    """R73, R105: null blocks are not copied, and stand for the same on both devices; what the device still knows is not theirs."""
    rules = make()
    a = looked_ahead(rules)
    held = rules.ledger.tables["a/0"][3:]
    assert [source for source, _ in rules.swap_out([a])] == held
    assert rules.ledger.host_tables["a/0"][:3] == [0, 0, 0] and rules.num_free_cpu == 11 - 2
    rules.swap_in([a])
    assert rules.ledger.tables["a/0"][:3] == [0, 0, 0] and 0 not in rules.ledger.tables["a/0"][3:]
    assert rules.num_free_gpu == 10 and rules.num_free_cpu == 11 and integrity.check(rules.ledger) == []


def test_nothing_is_found_in_a_null_block() -> None:
    """R107: a request swapped in from the host registers only its own blocks."""
    rules = make()
    a = looked_ahead(rules)
    rules.swap_out([a])
    rules.reset_prefixes()
    rules.swap_in([a])
    assert rules.ledger.gpu.hash_of[0] is None
    assert rules.lookup(prompt("b/0", range(18))).block_ids == ()


def test_without_a_host_block_for_the_null_block_nothing_is_swapped() -> None:
    """Host blocks that were added later: none is reserved, so a sequence with null blocks is recomputed."""
    rules = make(num_host=0)
    a = looked_ahead(rules)
    rules.resize(13, 8)
    assert not rules.can_swap_out([a])


def test_forks_share_what_is_in_sight() -> None:
    """R102: references are of real blocks alone."""
    rules = make()
    a = looked_ahead(rules)
    b = fork(rules, a, "a/1")
    assert rules.ledger.tables["a/1"] == rules.ledger.tables["a/0"]
    rules.release(a)
    assert integrity.check(rules.ledger) == [] and rules.num_free_gpu == 10
    rules.release(b)
    assert rules.num_free_gpu == 12
