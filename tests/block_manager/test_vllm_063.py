"""Cache rules of 0.6.3, by hand (sections 4.6, 4.7, 5, 6, 16 of the requirements). Blocks of 4 tokens."""

import pytest

from block_manager import integrity
from block_manager.cache_rules import AllocStatus, Growth, PrefixHit
from block_manager.rules.vllm_063 import Vllm063Rules
from tests.block_manager.sequences import KnownSequence, prompt

OK, LATER, NEVER = AllocStatus.OK, AllocStatus.LATER, AllocStatus.NEVER


def make(num_gpu: int = 16, num_cpu: int = 16, *, caching: bool = False, **more: int) -> Vllm063Rules:
    return Vllm063Rules.make(
        block_size=4,
        num_gpu_blocks=num_gpu,
        num_cpu_blocks=num_cpu,
        max_model_len=64,
        prefix_caching=caching,
        **more,
    )


def can_admit(rules: Vllm063Rules, *sequences: KnownSequence, num_lookahead: int = 0) -> AllocStatus:
    return rules.can_admit(sequences, PrefixHit(), len(sequences[0].token_ids), num_lookahead)


def begin(rules: Vllm063Rules, *sequences: KnownSequence, now: float = 1.0) -> None:
    """A step that computes all they know."""
    assert can_admit(rules, *sequences) is OK
    rules.admit(sequences, PrefixHit(), len(sequences[0].token_ids))
    rules.commit(sequences, now)
    for sequence in sequences:
        sequence.num_computed_tokens = len(sequence.token_ids)


def append(rules: Vllm063Rules, sequence: KnownSequence, *tokens: int, num_lookahead: int = 0) -> Growth:
    """A step that computes new tokens of it."""
    sequence.token_ids += tokens
    assert rules.can_extend([sequence], len(tokens), num_lookahead)
    growth = rules.extend(sequence, len(tokens), num_lookahead)
    sequence.num_computed_tokens = len(sequence.token_ids)
    assert integrity.check(rules.ledger) == []
    return growth


def fork(rules: Vllm063Rules, parent: KnownSequence, name: str) -> KnownSequence:
    child = KnownSequence(name, list(parent.token_ids), parent.num_prompt_tokens, parent.num_computed_tokens)
    rules.fork(parent, child)
    return child


# --- admission and the plain pool ---------------------------------------------------------------------------------------


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
    """R105, section 16: the recorded count of 3 blocks and, beside it, the whole prompt and the null block."""
    rules = make(8, sliding_window=4)
    assert can_admit(rules, prompt("a", range(28))) is OK
    assert can_admit(rules, prompt("a", range(29))) is NEVER
    begin(rules, prompt("b", range(8)))
    assert can_admit(rules, prompt("a", range(20))) is OK
    assert can_admit(rules, prompt("a", range(21))) is LATER
    watched = make(8, sliding_window=4, watermark_blocks=4)
    assert can_admit(watched, prompt("a", range(28))) is OK, "only 3 blocks count against the watermark"


# --- prefix caching -----------------------------------------------------------------------------------------------------


def test_equal_prefixes_share_full_blocks() -> None:
    """R22, R107, R112, R117, R119: seq0 and seq1 with 10 equal tokens share two full blocks; partial blocks are private."""
    rules = make(caching=True)
    begin(rules, prompt("seq0", range(10)))
    begin(rules, prompt("seq1", [*range(10), 99]))
    assert rules.ledger.tables == {"seq0": [0, 1, 2], "seq1": [0, 1, 3]}
    assert rules.hits == (4, 2)


def test_a_shifted_copy_shares_nothing() -> None:
    """R107, R108, R116: the hash is chained from position 0, so equal blocks behind another start differ."""
    rules = make(caching=True)
    begin(rules, prompt("a", range(8)))
    begin(rules, prompt("b", [9, 9, 9, 9, 4, 5, 6, 7]))
    begin(rules, prompt("c", range(4, 8)))
    assert rules.hits == (5, 0)


@pytest.mark.parametrize("field", [{"lora_id": 1}, {"cache_salt": "tenant"}])
def test_adapters_and_tenants_share_nothing(field: dict[str, object]) -> None:
    """R107, R138: their KV differs, or must not be shown."""
    rules = make(caching=True)
    begin(rules, prompt("a", range(8)))
    begin(rules, prompt("b", range(8), **field))
    assert rules.hits[1] == 0
    begin(rules, prompt("c", range(8), **field))
    assert rules.hits[1] == 2


def test_who_wants_nothing_cached_gets_nothing() -> None:
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
    rules.commit([a, b], 1.0)
    c = prompt("c", range(8))
    rules.admit([c], PrefixHit(), 8)
    assert rules.num_computed_blocks([c]) == 1


def test_a_gap_lasts_until_the_sequence_is_freed() -> None:
    """R121: who once had a block to compute is never told of more; freed and started again it is."""
    rules = make(caching=True)
    a = prompt("a", range(12))
    begin(rules, a)
    rules.release(a)
    rules.admit([a], PrefixHit(), 12)
    b = prompt("b", [*range(4), *[9] * 8])
    rules.admit([b], PrefixHit(), 12)
    assert (rules.num_computed_blocks([a]), rules.num_computed_blocks([b])) == (2, 1)
    rules.commit([a, b], 2.0)
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
    assert not rules.try_reset_prefixes()
    assert rules.ledger.gpu.lookup(rules.ledger.gpu.hash_of[0]) == 0
    rules.release(a)
    assert rules.try_reset_prefixes()
    begin(rules, prompt("b", range(8)))
    assert rules.hits == (4, 0)


def test_without_caching_nothing_is_counted() -> None:
    """R106, R119: the naive allocator has no hits."""
    rules = make()
    for name in "ab":
        begin(rules, prompt(name, range(8)))
    assert rules.hits == (0, 0) and len({b for t in rules.ledger.tables.values() for b in t}) == 4


# --- swap ---------------------------------------------------------------------------------------------------------------


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
    assert rules.can_swap_in([a], num_lookahead=13) is OK, "nobody runs whom the watermark would protect"
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
