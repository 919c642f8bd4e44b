"""Cache rules of 0.6.3, by hand: prefix caching (section 6 of the requirements)."""

import pytest

from block_manager.cache_rules import Growth, PrefixHit, try_reset_prefixes
from block_manager.hashing import HashChain, little_endian
from tests.block_manager.compat.v0_moves import append, begin, compute, fork
from tests.block_manager.compat.v0_moves import make_063 as make
from tests.support.core.sequences import prompt


def test_equal_prefixes_share_full_blocks() -> None:
    """R22, R107, R112, R117, R119: seq0 and seq1 with 10 equal tokens share two full blocks; partial blocks are private."""
    rules = make(caching=True)
    begin(rules, prompt("seq0", range(10)))
    begin(rules, prompt("seq1", [*range(10), 99]))
    assert rules.ledger.tables == {"seq0": [0, 1, 2], "seq1": [0, 1, 3]}
    assert rules.hits == (4, 2)
    begin(rules, prompt("twin", range(10)))
    assert rules.ledger.tables["twin"] == [0, 1, 4], "equal partial blocks are private too"


def test_a_shifted_copy_shares_nothing() -> None:
    """R107, R108, R116: the hash is chained from position 0, so equal blocks behind another start differ."""
    rules = make(caching=True)
    begin(rules, prompt("a", range(8)))
    begin(rules, prompt("b", [9, 9, 9, 9, 4, 5, 6, 7]))
    begin(rules, prompt("c", range(4, 8)))
    assert rules.hits == (5, 0)


def test_blocks_hashed_one_by_one_are_chained_too() -> None:
    """R107, R116: a block that fills while generating has the hash that a prompt with these tokens finds, and no other has."""
    first, second, shifted = [1, 2, 3, 4], [5, 6, 7, 8], [9, 9, 9, 9]
    chains = []
    for tokens in (first, second), (shifted, second), (second, second):
        chain = HashChain(4)
        one_by_one = [chain.block(i, little_endian(block)) for i, block in enumerate(tokens)]
        assert one_by_one == HashChain(4).upto([*tokens[0], *tokens[1]], 2)
        chains += one_by_one
    assert len(set(chains)) == len(chains)


@pytest.mark.parametrize("field", [{"lora_id": 1}, {"cache_salt": "tenant"}])
def test_adapters_and_tenants_share_nothing(field: dict[str, object]) -> None:
    """R107, R138: their KV differs, or must not be shown."""
    rules = make(caching=True)
    begin(rules, prompt("a", range(8)))
    begin(rules, prompt("b", range(8), **field))
    assert rules.hits[1] == 0
    begin(rules, prompt("c", range(8), **field))
    assert rules.hits[1] == 2


def test_a_request_that_wants_no_hits_gets_none() -> None:
    """R117: without reuse known blocks are not taken, and nothing is asked."""
    rules = make(caching=True)
    begin(rules, prompt("a", range(8)))
    begin(rules, prompt("b", range(8), no_cache_reuse=True))
    assert rules.ledger.tables == {"a": [0, 1], "b": [2, 3]} and rules.hits == (2, 0)


def test_freed_contents_wait_in_the_evictor() -> None:
    """R110, R117: blank blocks first, then the least recently accessed; what is evicted is not found again."""
    rules = make(4, caching=True)
    a, b = prompt("a", range(4)), prompt("b", range(10, 14))
    begin(rules, a, now=5.0)
    begin(rules, b, now=6.0)
    rules.release(a)
    rules.release(b)
    assert rules.num_free_gpu == 4 and rules.ledger.gpu.counts().cached == 2
    c = prompt("c", range(20, 32))
    begin(rules, c)
    assert rules.ledger.tables["c"] == [2, 3, 0]
    rules.release(c)
    begin(rules, prompt("d", range(10, 14)))
    assert rules.ledger.tables["d"] == [1] and rules.hits == (6, 1)


def test_access_times_are_written_when_a_sequence_ends() -> None:
    """R93, R117: its last step's time goes to its blocks, whatever they said; without a step they say nothing."""
    rules = make(caching=True)
    a, b = prompt("a", range(5)), prompt("b", range(5))
    begin(rules, a, now=3.0)
    begin(rules, b, now=4.0)
    assert rules.ledger.gpu.last_accessed[0] == -1.0
    rules.release(b)
    assert rules.ledger.gpu.last_accessed[0] == 4.0
    rules.release(a)
    assert rules.ledger.gpu.last_accessed[0] == 3.0


def test_a_block_that_gets_full_is_known_or_becomes_known() -> None:
    """R113, R118: promotion. The second to fill it gives its own block up for the known one."""
    rules = make(caching=True)
    a, b = prompt("a", range(7)), prompt("b", range(7))
    begin(rules, a)
    begin(rules, b)
    assert append(rules, a, 7) == Growth()
    assert append(rules, b, 7) == Growth(rewritten=True)
    assert rules.ledger.tables == {"a": [0, 1], "b": [0, 1]} and rules.num_free_gpu == 14
    c = prompt("c", range(8))
    begin(rules, c)
    assert rules.ledger.tables["c"] == [0, 1]


def test_a_copied_block_that_gets_full_stays_in_the_copies() -> None:
    """R121: copy-on-write and promotion in one append: the pair is recorded although its target is given back."""
    rules = make(caching=True)
    a = prompt("a", range(7))
    begin(rules, a)
    b = fork(rules, a, "b")
    known = prompt("known", [*range(7), 9])
    begin(rules, known)
    assert append(rules, a, 9) == Growth(copies=[(1, 3)], rewritten=True)
    assert rules.ledger.tables == {"a": [0, 2], "b": [0, 1], "known": [0, 2]}
    assert append(rules, b, 9).copies == []


def test_computed_blocks_never_name_the_last() -> None:
    """R115, R121: known after the step that fills them; at least one block is computed anew."""
    rules = make(caching=True)
    a, b = prompt("a", range(8)), prompt("b", range(8))
    rules.admit([a], PrefixHit(), 8)
    rules.admit([b], PrefixHit(), 8)
    assert (rules.num_computed_blocks([a]), rules.num_computed_blocks([b])) == (0, 0), "touched, not computed"
    compute(rules, a, b)
    c = prompt("c", range(8))
    rules.admit([c], PrefixHit(), 8)
    assert rules.num_computed_blocks([c]) == 1


@pytest.mark.parametrize(("as_recorded", "num_known"), [(False, 1), (True, 3)])
def test_blocks_that_later_chunks_fill(as_recorded: bool, num_known: int) -> None:
    """R93: they do not count as computed yet; in the recordings a prompt's blocks all do with its first chunk."""
    rules = make(caching=True, counts_whole_prompts=as_recorded)
    a, b = prompt("a", range(16), num_scheduled_tokens=4), prompt("b", range(16))
    rules.admit([a], PrefixHit(), 4)
    rules.commit([a], 1.0)
    rules.admit([b], PrefixHit(), 16)
    assert rules.num_computed_blocks([b]) == num_known


def test_a_gap_lasts_until_the_sequence_is_freed() -> None:
    """R121: a sequence that once had a block to compute gets no further hits; freed and started again it does."""
    rules = make(caching=True)
    a = prompt("a", range(12))
    begin(rules, a)
    rules.release(a)
    rules.admit([a], PrefixHit(), 12)
    a.num_computed_tokens = 0
    b = prompt("b", [*range(4), *[9] * 8])
    rules.admit([b], PrefixHit(), 12)
    assert (rules.num_computed_blocks([a]), rules.num_computed_blocks([b])) == (2, 1)
    compute(rules, a, b, now=2.0)
    assert (rules.num_computed_blocks([a]), rules.num_computed_blocks([b])) == (2, 1)
    append(rules, a, 1)
    assert rules.num_computed_blocks([a]) == 3, "without a gap it grows"
    rules.release(b)
    rules.admit([b], PrefixHit(), 12)
    assert rules.num_computed_blocks([b]) == 2


def test_computed_blocks_of_a_group_are_the_common_ones() -> None:
    """R115: of those that have any; a forked child starts with none."""
    rules = make(caching=True)
    a = prompt("a", range(9))
    begin(rules, a)
    rules.release(a)
    begin(rules, a)
    assert rules.num_computed_blocks([a]) == 2
    b = fork(rules, a, "b")
    assert rules.num_computed_blocks([a, b]) == 2
    append(rules, a, 1, 1, 1)
    append(rules, b, 2, 2, 2, 2)
    rules.commit([a, b], 2.0)
    assert rules.num_computed_blocks([a, b]) == 2
    assert make().num_computed_blocks([]) == 0
    assert rules.num_computed_blocks([]) == 0


def test_common_prefix_blocks() -> None:
    """R143: leading blocks of the first that every table holds; none without caching."""
    for caching, expected in ((True, 2), (False, 0)):
        rules = make(caching=caching)
        sequences = [prompt(name, [*range(8), i]) for i, name in enumerate("abc")]
        for sequence in sequences:
            begin(rules, sequence)
        assert rules.num_common_prefix_blocks(sequences) == expected
        assert rules.num_common_prefix_blocks([]) == 0


def test_blocks_of_a_failed_step_are_not_found() -> None:
    """R93: what a step registered and never computed is neither found nor computed."""
    rules = make(caching=True)
    a = prompt("a", range(12))
    begin(rules, a)
    rules.retract(a, 6)
    begin(rules, prompt("b", range(12)))
    assert rules.ledger.tables["b"] == [0, 3, 4]
    assert rules.num_computed_blocks([a]) == 0
    rules.release(a)
    rules.retract(a, 0)


def test_reset_forgets_all_contents() -> None:
    """R142: on request only while nothing is in use."""
    rules = make(caching=True)
    a = prompt("a", range(8))
    begin(rules, a)
    assert not try_reset_prefixes(rules)
    assert rules.ledger.gpu.lookup(rules.ledger.gpu.hash_of[0]) == 0
    rules.release(a)
    assert try_reset_prefixes(rules)
    begin(rules, prompt("b", range(8)))
    assert rules.hits == (4, 0)


def test_without_caching_nothing_is_counted() -> None:
    """R106, R119: the naive allocator has no hits."""
    rules = make()
    for name in "ab":
        begin(rules, prompt(name, range(8)))
    assert rules.hits == (0, 0) and len({b for t in rules.ledger.tables.values() for b in t}) == 4
