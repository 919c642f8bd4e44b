"""Cache rules of data-parallel ranks: a pool for each, one account of all."""

from block_manager import integrity
from block_manager.cache_rules import try_reset_prefixes
from block_manager.rules.per_rank import PerRankRules
from block_manager.rules.v1_rules import V1PoolRules
from tests.support.core.sequences import KnownSequence, go_on, prompt, start


def ranked(num_ranks: int = 2, *, num_blocks: int = 5, caching: bool = False) -> PerRankRules:
    """Pools of four usable blocks of four tokens."""
    sizes = {"block_size": 4, "num_gpu_blocks": num_blocks, "num_cpu_blocks": 0, "max_model_len": 64}
    return PerRankRules([V1PoolRules.make(**sizes, prefix_caching=caching) for _ in range(num_ranks)])


def test_a_rank_is_not_helped_by_the_others() -> None:
    """R190: full is full, though the other rank is empty."""
    rules = ranked()
    a, b = prompt("a/0", range(16), lane=0), prompt("b/0", range(4), lane=0)
    start(rules, a)
    assert rules.num_free_of(0) == 0 and rules.num_free_of(1) == rules.num_free_gpu == 4
    assert rules.num_blocks_to_admit([b], rules.lookup(b), 4) == 1
    assert rules.can_admit([b], rules.lookup(b), 4).value == "later"
    b.lane = 1
    start(rules, b)
    go_on(rules, b)
    assert rules.ledger.tables == {"a/0": [1, 2, 3, 4], "b/0": [1, 2]}
    rules.release(a)
    rules.release(b)
    assert rules.num_free_gpu == 8


def test_prefixes_are_known_where_they_are() -> None:
    """R190: the same prompt is a hit in its own rank only; forgetting is for all, and not while a block is in use."""
    rules = ranked(caching=True)
    start(rules, prompt("a/0", range(8), lane=1))
    assert rules.lookup(prompt("b/0", range(8), lane=0)).num_tokens == 0
    assert rules.lookup(prompt("c/0", range(8), lane=1)).num_tokens == 4
    assert not try_reset_prefixes(rules)
    rules.release(KnownSequence("a/0", [], lane=1))
    assert rules.lookup(prompt("c/0", range(8), lane=1)).num_tokens == 4
    assert try_reset_prefixes(rules)
    assert rules.lookup(prompt("c/0", range(8), lane=1)).num_tokens == 0


def test_the_account_names_ranks() -> None:
    """R200: tables and references by rank; a violation is found in whichever, and says where."""
    rules = ranked()
    start(rules, prompt("a/0", range(4), lane=0))
    start(rules, prompt("b/0", range(4), lane=1))
    assert rules.ledger.named_tables() == {"a/0": ["g1@0"], "b/0": ["g1@1"]}
    assert rules.ledger.report().refs == {"g1@0": 1, "g1@1": 1}
    assert integrity.check(rules.ledger) == []
    rules.ledger.parts()[1].gpu.refs[1] += 1
    [violation] = integrity.check(rules.ledger)
    assert violation.startswith("device of rank 1: block 1 has 2 references")
