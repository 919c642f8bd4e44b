"""Cache rules of the 2023 manager, by hand: blocks by contents (section 6 of the requirements)."""

from block_manager.cache_rules import Growth, PrefixHit, try_reset_prefixes
from tests.block_manager.compat.v0_moves import OK, append_each, begin, can_admit, fork
from tests.block_manager.compat.v0_moves import make_2023 as make
from tests.support.core.sequences import KnownSequence, prompt


def test_seq0_and_seq1_share_equal_prefixes() -> None:
    """R22, R107, R108: the article's case. Blocks are shared as long as everything from position 0 on is equal."""
    rules = make(caching=True)
    begin(rules, prompt("seq0", range(10)))
    begin(rules, prompt("seq1", [*range(10), 99]))
    assert rules.ledger.tables == {"seq0": [0, 1, 2], "seq1": [0, 1, 3]}
    begin(rules, prompt("shifted", [9, *range(10)]))
    assert not set(rules.ledger.tables["shifted"]) & {0, 1, 2, 3}
    assert rules.hits == (9, 2)


def test_equal_prompts_share_the_partial_tail() -> None:
    """R112: the article's M, N block: 14 tokens of 16 hashed, num_tokens 16; the first to write copies it (R20)."""
    rules = make(caching=True)
    a, b = prompt("a", range(14)), prompt("b", range(14))
    begin(rules, a)
    begin(rules, b)
    assert rules.ledger.tables["a"] == rules.ledger.tables["b"] == [0, 1, 2, 3]
    assert rules.ledger.gpu.num_hashed_tokens[3] == 16
    assert append_each(rules, a, 50)[0].copies == [(3, 4)]
    assert append_each(rules, b, 51) == [Growth()]


def test_unequal_partial_tails_are_not_shared() -> None:
    """R112: by what is in them: another last token, or one more, has a tail block of its own behind the shared full ones."""
    rules = make(caching=True)
    for name, tokens in (("a", range(14)), ("other", [*range(13), 99]), ("longer", range(15))):
        begin(rules, prompt(name, tokens))
    assert rules.ledger.tables == {"a": [0, 1, 2, 3], "other": [0, 1, 2, 4], "longer": [0, 1, 2, 5]}


def test_adapters_and_tenants_share_nothing() -> None:
    """R107: the adapter's id is part of the hash, and so is the tenant."""
    rules = make(caching=True)
    for i, field in enumerate([{}, {"lora_id": 1}, {"cache_salt": "t"}, {"lora_id": 1, "cache_salt": "t"}]):
        begin(rules, prompt(f"r{i}", range(6), **field))
    assert rules.hits == (8, 0)
    begin(rules, prompt("again", range(6), lora_id=1))
    assert rules.hits == (10, 2)


def test_the_split_in_prompt_and_output_is_part_of_the_key() -> None:
    """R107, the quirk: equal tokens with another split are not found; with the same split they are."""
    rules = make(caching=True)
    a = prompt("a", range(6))
    begin(rules, a)
    append_each(rules, a, 6, 7)
    begin(rules, prompt("prompt", range(8)))
    assert rules.ledger.tables == {"a": [0, 1], "prompt": [0, 2]}
    b = prompt("b", range(6))
    begin(rules, b)
    assert append_each(rules, b, 6, 7)[1] == Growth(rewritten=True)
    assert rules.ledger.tables["b"] == [0, 1]


def test_a_block_that_gets_full_is_known_or_becomes_known() -> None:
    """R113: promotion to contents in use, and to contents in the evictor; the own block is given back."""
    rules = make(caching=True)
    a, b = prompt("a", range(5)), prompt("b", range(5))
    begin(rules, a)
    begin(rules, b)
    append_each(rules, a, 5, 6, 7)
    known = rules.ledger.tables["a"][1]
    grown = append_each(rules, b, 5, 6, 7)
    assert grown[-1].rewritten and rules.ledger.tables["b"][1] == known
    for sequence in (a, b):
        rules.release(sequence)
    c = prompt("c", range(5))
    begin(rules, c)
    append_each(rules, c, 5, 6)
    assert rules.ledger.tables["c"][1] != known
    append_each(rules, c, 7)
    assert rules.ledger.tables["c"][1] == known


def test_a_copy_that_is_full_already_goes_by_its_contents() -> None:
    """R114: copy-on-write of the last token of a block: the new block has the real hash at once."""
    rules = make(caching=True)
    a = prompt("a", range(7))
    begin(rules, a)
    b = fork(rules, a, "b")
    assert append_each(rules, a, 7)[0].copies == [(1, 2)]
    begin(rules, KnownSequence("c", list(range(8)), 7))
    assert rules.ledger.tables["c"] == [0, 2]
    assert append_each(rules, b, 7) == [Growth(rewritten=True)]
    assert rules.ledger.tables["b"] == [0, 2]


def test_a_request_that_wants_no_hits_gets_private_blocks() -> None:
    """R113: a private hash for every block."""
    rules = make(caching=True)
    begin(rules, prompt("a", range(8)))
    b = prompt("b", range(8), no_cache_reuse=True)
    begin(rules, b)
    append_each(rules, b, 1, 1, 1, 1)
    assert not set(rules.ledger.tables["a"]) & set(rules.ledger.tables["b"]) and rules.hits[1] == 0


def test_freed_contents_wait_in_the_evictor() -> None:
    """R109, R110, R111: never used blocks first; then by access time, longest prefix first."""
    rules = make(5, caching=True)
    a, b = prompt("a", range(8)), prompt("b", range(10, 18))
    begin(rules, a, now=3.0)
    begin(rules, b, now=4.0)
    rules.release(a)
    rules.release(b)
    assert rules.num_free_gpu == 5
    begin(rules, prompt("c", range(20, 28)))
    assert rules.ledger.tables["c"] == [4, 1]
    begin(rules, prompt("d", range(10, 18)))
    assert rules.ledger.tables["d"] == [2, 3]


def test_every_step_writes_access_times() -> None:
    """R93: all blocks of its sequences."""
    rules = make(caching=True)
    begin(rules, prompt("a", range(4)), now=3.0)
    begin(rules, prompt("b", [*range(4), 9]), now=7.0)
    assert rules.ledger.gpu.last_accessed[:3] == [7.0, 7.0, -1.0]


def test_computed_blocks_are_full_ones_of_steps_that_ran() -> None:
    """R93, R115: by computed and scheduled tokens; leading ones, never the last; eviction ends it."""
    rules = make(3, caching=True)
    a = prompt("a", range(10))
    rules.admit([a], PrefixHit(), 10)
    assert rules.num_computed_blocks([a]) == 0
    a.num_scheduled_tokens = 7
    rules.commit([a], 1.0)
    assert rules.num_computed_blocks([a]) == 1, "a chunk of 7 fills one block"
    a.num_computed_tokens, a.num_scheduled_tokens = 7, 3
    rules.commit([a], 2.0)
    assert rules.num_computed_blocks([a]) == 2
    rules.release(a)
    b = prompt("b", range(8))
    rules.admit([b], PrefixHit(), 8)
    assert rules.num_computed_blocks([b]) == 1, "revived with what it holds, the last left out"
    rules.release(b)
    begin(rules, prompt("c", range(50, 62)))
    rules.release(prompt("c", []))
    d = prompt("d", range(4))
    assert can_admit(rules, d) is OK
    rules.admit([d], PrefixHit(), 4)
    assert not rules.num_computed_blocks([d])


def test_computed_blocks_of_a_group_are_the_common_ones() -> None:
    """R115: of those of its sequences that have any."""
    rules = make(caching=True)
    a = prompt("a", range(9))
    begin(rules, a)
    b = fork(rules, a, "b")
    assert rules.num_computed_blocks([a, b]) == 2
    append_each(rules, a, 1, 1, 1, 1)
    append_each(rules, b, 2, 2, 2, 2)
    assert (rules.num_computed_blocks([a]), rules.num_computed_blocks([a, b])) == (3, 2)
    assert make().num_computed_blocks([]) == 0


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
    """R93: what a step promised and never computed is neither found nor computed."""
    rules = make(caching=True)
    a = prompt("a", range(10))
    begin(rules, a)
    rules.retract(a, 5)
    begin(rules, prompt("b", range(10)))
    assert rules.ledger.tables["b"] == [0, 3, 4]
    assert rules.num_computed_blocks([a]) == 1
    rules.release(a)
    rules.retract(a, 0)


def test_reset_forgets_all_contents() -> None:
    """R142: on request only while nothing is in use."""
    rules = make(caching=True)
    a = prompt("a", range(8))
    begin(rules, a)
    assert not try_reset_prefixes(rules)
    rules.release(a)
    assert try_reset_prefixes(rules)
    begin(rules, prompt("b", range(8)))
    assert rules.hits == (4, 0)


def test_without_caching_nothing_is_counted() -> None:
    """R106, R119: plain blocks are never shared between requests."""
    rules = make()
    for name in "ab":
        begin(rules, prompt(name, range(8)))
    assert rules.hits == (0, 0) and rules.num_free_gpu == 12
    assert rules.lookup(prompt("c", range(8))) == PrefixHit()


def test_a_partial_block_that_was_written_on_is_found_no_more() -> None:
    """R113, R200: a request swapped in with the same prompt is not copied over blocks that the other wrote since."""
    rules = make(caching=True)
    a, b = prompt("a", [0]), prompt("b", [0])
    for sequence in (a, b):
        begin(rules, sequence)
        rules.swap_out([sequence])
    [(_, target)] = rules.swap_in([a])
    append_each(rules, a, 5)
    [(_, other)] = rules.swap_in([b])
    assert other != target
    assert rules.ledger.tables == {"a": [target], "b": [other]}
