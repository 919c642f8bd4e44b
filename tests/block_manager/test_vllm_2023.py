"""Cache rules of the 2023 manager, by hand (sections 4.6, 4.7, 5, 6 of the requirements: BM1, S2, S4). Blocks of 4 tokens."""

import pytest

from block_manager import integrity
from block_manager.cache_rules import AllocStatus, Growth, PrefixHit
from block_manager.rules.vllm_2023 import Vllm2023Rules
from tests.block_manager.sequences import KnownSequence, prompt

OK, LATER, NEVER = AllocStatus.OK, AllocStatus.LATER, AllocStatus.NEVER


def make(num_gpu: int = 16, num_cpu: int = 16, *, caching: bool = False, **more: int) -> Vllm2023Rules:
    return Vllm2023Rules.make(
        block_size=4,
        num_gpu_blocks=num_gpu,
        num_cpu_blocks=num_cpu,
        max_model_len=64,
        prefix_caching=caching,
        **more,
    )


def can_admit(rules: Vllm2023Rules, *sequences: KnownSequence) -> AllocStatus:
    return rules.can_admit(sequences, PrefixHit(), len(sequences[0].token_ids))


def compute(rules: Vllm2023Rules, *sequences: KnownSequence, now: float = 1.0) -> None:
    """The rest of a step that computes all they know."""
    for sequence in sequences:
        sequence.num_scheduled_tokens = len(sequence.token_ids) - sequence.num_computed_tokens
    rules.commit(sequences, now)
    for sequence in sequences:
        sequence.num_computed_tokens = len(sequence.token_ids)
    assert integrity.check(rules.ledger) == []


def begin(rules: Vllm2023Rules, *sequences: KnownSequence, now: float = 1.0) -> None:
    """A step that starts them."""
    assert can_admit(rules, *sequences) is OK
    rules.admit(sequences, PrefixHit(), len(sequences[0].token_ids))
    compute(rules, *sequences, now=now)


def append(rules: Vllm2023Rules, sequence: KnownSequence, *tokens: int) -> list[Growth]:
    """Steps that compute one new token of it each."""
    grown = []
    for token in tokens:
        sequence.token_ids.append(token)
        assert rules.can_extend([sequence], 1)
        grown.append(rules.extend(sequence, 1))
        compute(rules, sequence, now=2.0)
    return grown


def fork(rules: Vllm2023Rules, parent: KnownSequence, name: str) -> KnownSequence:
    child = KnownSequence(name, list(parent.token_ids), parent.num_prompt_tokens, parent.num_computed_tokens)
    rules.fork(parent, child)
    return child


def tables(rules: Vllm2023Rules) -> dict[str, list[int]]:
    return rules.ledger.tables


# --- plain blocks -------------------------------------------------------------------------------------------------------


def test_the_highest_block_first_then_the_last_freed() -> None:
    """R99, R17: popped from the end of the list of free blocks; freed in table order."""
    rules = make()
    a = prompt("a", range(9))
    begin(rules, a)
    assert tables(rules) == {"a": [15, 14, 13]}
    rules.release(a)
    begin(rules, prompt("b", range(5)))
    assert tables(rules) == {"b": [13, 14]}


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
    assert append(rules, a, 1, 1) == [Growth(), Growth(added=[13])]


@pytest.mark.parametrize("caching", [False, True])
def test_copy_on_write_of_two_samples(caching: bool) -> None:
    """R19, R20, R114: the article's case. The first writer copies the partial block, the last one writes in it."""
    rules, a = make(caching=caching), prompt("a", range(6))
    begin(rules, a)
    shared = tables(rules)["a"][1]
    b = fork(rules, a, "b")
    [growth] = append(rules, a, 8)
    assert growth == Growth(copies=[(shared, tables(rules)["a"][1])], rewritten=True)
    assert append(rules, b, 9) == [Growth()]
    assert tables(rules)["a"][0] == tables(rules)["b"][0] and tables(rules)["b"][1] == shared


@pytest.mark.parametrize("num_sharers", [2, 3, 5])
def test_one_copy_less_than_sharers(num_sharers: int) -> None:
    """R20: n sharers make n - 1 copies."""
    rules, first = make(), prompt("s0", range(6))
    begin(rules, first)
    samples = [first, *(fork(rules, first, f"s{i}") for i in range(1, num_sharers))]
    assert sum(len(growth.copies) for s in samples for growth in append(rules, s, 9)) == num_sharers - 1


def test_release_and_fork_without_a_table() -> None:
    """R97, R102, R103: no-ops, also the second time."""
    rules, a = make(), prompt("a", range(4))
    rules.fork(a, prompt("b", range(4)))
    begin(rules, a)
    rules.release(a)
    rules.release(a)
    rules.forget(a)
    assert rules.num_free_gpu == 16 and tables(rules) == {}


@pytest.mark.parametrize("caching", [False, True])
def test_several_live_sequences_start_together(caching: bool) -> None:
    """R100, R203: the full blocks of the prompt are shared with the first, each has its own behind them."""
    rules = make(6, caching=caching)
    a, b = (KnownSequence(name, [*range(6), *[n] * n], 6) for name, n in (("a", 3), ("b", 7)))
    assert can_admit(rules, a, b) is OK
    begin(rules, a, b)
    assert tables(rules)["a"][0] == tables(rules)["b"][0] and rules.num_free_gpu == 0
    assert can_admit(make(5), a, b) is NEVER


# --- blocks by contents -------------------------------------------------------------------------------------------------


def test_seq0_and_seq1_share_equal_prefixes() -> None:
    """R22, R107, R108: the article's case. Blocks are shared as long as everything from position 0 on is equal."""
    rules = make(caching=True)
    begin(rules, prompt("seq0", range(10)))
    begin(rules, prompt("seq1", [*range(10), 99]))
    assert tables(rules) == {"seq0": [0, 1, 2], "seq1": [0, 1, 3]}
    begin(rules, prompt("shifted", [9, *range(10)]))
    assert not set(tables(rules)["shifted"]) & {0, 1, 2, 3}
    assert rules.hits == (9, 2)


def test_equal_prompts_share_the_partial_tail() -> None:
    """R112: the article's M, N block: 14 tokens of 16 hashed, num_tokens 16; the first to write copies it (R20)."""
    rules = make(caching=True)
    a, b = prompt("a", range(14)), prompt("b", range(14))
    begin(rules, a)
    begin(rules, b)
    assert tables(rules)["a"] == tables(rules)["b"] == [0, 1, 2, 3]
    assert rules.ledger.gpu.num_hashed_tokens[3] == 16
    assert append(rules, a, 50)[0].copies == [(3, 4)]
    assert append(rules, b, 51) == [Growth()]


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
    append(rules, a, 6, 7)
    begin(rules, prompt("prompt", range(8)))
    assert tables(rules) == {"a": [0, 1], "prompt": [0, 2]}
    b = prompt("b", range(6))
    begin(rules, b)
    assert append(rules, b, 6, 7)[1] == Growth(rewritten=True)
    assert tables(rules)["b"] == [0, 1]


def test_a_block_that_gets_full_is_known_or_becomes_known() -> None:
    """R113: promotion to contents in use, and to contents in the evictor; the own block is given back."""
    rules = make(caching=True)
    a, b = prompt("a", range(5)), prompt("b", range(5))
    begin(rules, a)
    begin(rules, b)
    append(rules, a, 5, 6, 7)
    known = tables(rules)["a"][1]
    grown = append(rules, b, 5, 6, 7)
    assert grown[-1].rewritten and tables(rules)["b"][1] == known
    for sequence in (a, b):
        rules.release(sequence)
    c = prompt("c", range(5))
    begin(rules, c)
    append(rules, c, 5, 6)
    assert tables(rules)["c"][1] != known
    append(rules, c, 7)
    assert tables(rules)["c"][1] == known


def test_a_copy_that_is_full_already_goes_by_its_contents() -> None:
    """R114: copy-on-write of the last token of a block: the new block has the real hash at once."""
    rules = make(caching=True)
    a = prompt("a", range(7))
    begin(rules, a)
    b = fork(rules, a, "b")
    assert append(rules, a, 7)[0].copies == [(1, 2)]
    begin(rules, KnownSequence("c", list(range(8)), 7))
    assert tables(rules)["c"] == [0, 2]
    assert append(rules, b, 7) == [Growth(rewritten=True)]
    assert tables(rules)["b"] == [0, 2]


def test_who_wants_nothing_cached_gets_private_blocks() -> None:
    """R113: a private hash for every block."""
    rules = make(caching=True)
    begin(rules, prompt("a", range(8)))
    b = prompt("b", range(8), no_cache_reuse=True)
    begin(rules, b)
    append(rules, b, 1, 1, 1, 1)
    assert not set(tables(rules)["a"]) & set(tables(rules)["b"]) and rules.hits[1] == 0


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
    assert tables(rules)["c"] == [4, 1]
    begin(rules, prompt("d", range(10, 18)))
    assert tables(rules)["d"] == [2, 3]


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
    append(rules, a, 1, 1, 1, 1)
    append(rules, b, 2, 2, 2, 2)
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
    assert tables(rules)["b"] == [0, 3, 4]
    assert rules.num_computed_blocks([a]) == 1
    rules.release(a)
    rules.retract(a, 0)


def test_reset_forgets_all_contents() -> None:
    """R142: on request only while nothing is in use."""
    rules = make(caching=True)
    a = prompt("a", range(8))
    begin(rules, a)
    assert not rules.try_reset_prefixes()
    rules.release(a)
    assert rules.try_reset_prefixes()
    begin(rules, prompt("b", range(8)))
    assert rules.hits == (4, 0)


def test_without_caching_nothing_is_counted() -> None:
    """R106, R119: plain blocks are never shared between requests."""
    rules = make()
    for name in "ab":
        begin(rules, prompt(name, range(8)))
    assert rules.hits == (0, 0) and rules.num_free_gpu == 12
    assert rules.lookup(prompt("c", range(8))) == PrefixHit()


# --- swap ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("caching", [False, True])
def test_swap_keeps_sharing(caching: bool) -> None:
    """R73, R74, R104: one destination for each distinct block, its references counted; ids from zero on each device."""
    rules, a = make(caching=caching), prompt("a", range(6))
    begin(rules, a)
    b = fork(rules, a, "b")
    append(rules, a, 7)
    assert rules.can_swap_out([a, b])
    pairs = rules.swap_out([a, b])
    assert len(pairs) == 3 and len({source for source, _ in pairs}) == len({target for _, target in pairs}) == 3
    host = rules.ledger.host_tables
    assert host["a"][0] == host["b"][0] and host["a"][1] != host["b"][1]
    assert (rules.num_free_gpu, rules.num_free_cpu) == (16, 13)
    assert rules.can_swap_in([a, b]) is OK
    assert len(rules.swap_in([a, b])) == 3
    assert tables(rules)["a"][0] == tables(rules)["b"][0]
    assert rules.num_free_cpu == 16 and integrity.check(rules.ledger) == []


def test_a_swapped_block_is_found_again_where_it_was() -> None:
    """R74, R109: also a partial one, by the private hash it keeps."""
    rules, a = make(caching=True), prompt("a", range(5))
    begin(rules, a)
    append(rules, a, 1, 1, 1, 1)
    before = list(tables(rules)["a"])
    queries, hits = rules.hits
    rules.swap_out([a])
    rules.swap_in([a])
    assert tables(rules)["a"] == before and rules.hits == (queries + 3, hits + 3)


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


def test_the_watermark_protects_only_those_who_run() -> None:
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
