"""The placeholder rules say yes to everything and hold nothing (R34)."""

from block_manager import integrity
from block_manager.cache_rules import AllocStatus, CacheRules, Growth, PrefixHit, try_reset_prefixes
from block_manager.rules.no_blocks import NoBlocks
from tests.support.core.sequences import prompt


def test_everything_is_possible_and_nothing_is_taken() -> None:
    """R34: a life through every operation, tables stay empty and move with their group."""
    rules: CacheRules = NoBlocks(max_model_len=1000)
    a, b = prompt("a/0", range(500)), prompt("a/1", range(500))
    assert rules.capacity_tokens == 1000
    assert rules.lookup(a) == PrefixHit()
    assert rules.can_admit([a], PrefixHit(), 500) is AllocStatus.OK
    rules.fork(a, b)
    assert rules.ledger.tables == {}
    rules.admit([a], PrefixHit(), 500)
    rules.fork(a, b)
    assert rules.ledger.tables == {"a/0": [], "a/1": []}
    assert rules.can_extend([a, b], 10**6)
    assert rules.fits_exactly([a, b], 10**6)
    assert rules.extend(a, 10**6) == Growth()
    rules.commit([a, b], 1.0)
    rules.commit_sampled(a)
    rules.retract(a, 0)
    assert rules.num_computed_blocks([a, b]) == rules.num_common_prefix_blocks([a, b]) == 0
    assert rules.can_swap_out([a, b])
    assert rules.swap_out([a, b]) == []
    assert (rules.ledger.tables, rules.ledger.host_tables) == ({}, {"a/0": [], "a/1": []})
    assert rules.can_swap_in([a, b]) is AllocStatus.OK
    assert rules.swap_in([a]) == []
    assert try_reset_prefixes(rules)
    for sequence in (a, b, a):
        rules.release(sequence)
        rules.forget(sequence)
    assert (rules.ledger.tables, rules.ledger.host_tables) == ({}, {})
    assert (rules.num_free_gpu, rules.num_free_cpu, rules.hits) == (0, 0, (0, 0))
    assert integrity.check(rules.ledger) == []
