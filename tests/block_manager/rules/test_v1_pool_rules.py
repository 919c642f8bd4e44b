"""V1's cache rules on worked examples: blocks on demand, sharing, copy-on-write, prefixes (blocks of 4 tokens)."""

from functools import partial

import pytest

from block_manager import integrity
from block_manager.cache_rules import AllocStatus, CacheRules, PrefixHit, try_reset_prefixes
from block_manager.rules.quire_rules import QuireRules
from block_manager.rules.v1_rules import V1PoolRules
from tests.support.core.sequences import KnownSequence, fork, go_on, prompt, start

SIZE = 4


def make(
    num_usable: int = 20, *, caching: bool = True, max_model_len: int = 64, window: int | None = None
) -> V1PoolRules:
    """V1 rules whose device has that many blocks besides the null block."""
    return V1PoolRules.make(
        block_size=SIZE,
        num_gpu_blocks=num_usable + 1,
        num_cpu_blocks=0,
        max_model_len=max_model_len,
        prefix_caching=caching,
        window=window,
    )


def table(rules: CacheRules, sequence: KnownSequence) -> list[int]:
    return rules.ledger.tables[sequence.name]


def refs(rules: CacheRules, sequence: KnownSequence) -> list[int]:
    return [rules.ledger.gpu.refs[b] for b in table(rules, sequence)]


# --- blocks on demand ------------------------------------------------------------------------------------------------


def test_a_block_is_taken_when_the_last_is_full_and_waste_stays_below_one() -> None:
    """R15, R16: tables hold ceil(tokens / block size) blocks at every length, so less than one block is empty."""
    rules = make()
    a = prompt("a/0", range(6))
    start(rules, a)
    for _ in range(20):
        waste = len(table(rules, a)) * SIZE - len(a.token_ids)
        assert 0 <= waste < SIZE
        was_full = waste == 0
        growth = go_on(rules, a)
        assert len(growth.added) == was_full
        assert not growth.copies
        assert not growth.rewritten
    assert len(set(table(rules, a))) == len(table(rules, a)) == 7


def test_blocks_return_at_once_and_only_once() -> None:
    """R17, R97, R101, R103: tables are of all groups; release empties one, again or of a stranger it is a no-op."""
    rules = make()
    a, b = prompt("a/0", range(9)), prompt("b/0", range(50, 60))
    start(rules, a)
    start(rules, b)
    assert list(rules.ledger.tables) == ["a/0", "b/0"]
    rules.release(a)
    assert (rules.num_free_gpu, list(rules.ledger.tables)) == (17, ["b/0"])
    rules.release(a)
    rules.release(prompt("c/0", [1]))
    assert rules.num_free_gpu == 17
    rules.release(b)
    assert rules.num_free_gpu == 20
    assert not integrity.check(rules.ledger)


def test_needs_count_lookahead_up_to_the_model_length() -> None:
    """R136: ceil(min(computed + hits + n + lookahead, max_model_len) / block size) blocks, less those owned."""
    rules = make(2, max_model_len=8)
    a = prompt("a/0", range(6))
    assert rules.can_admit([a], PrefixHit(), 6, num_lookahead=9) is AllocStatus.OK
    rules.admit([a], PrefixHit(), 4, num_lookahead=1)
    assert len(table(rules, a)) == 2
    a.num_computed_tokens = 4
    assert rules.can_extend([a], 2, num_lookahead=9)
    assert rules.extend(a, 2, num_lookahead=9).added == []
    b = prompt("b/0", [1])
    assert rules.can_admit([b], PrefixHit(), 1) is AllocStatus.LATER
    assert make(2).can_admit([a], PrefixHit(), 6, num_lookahead=3) is AllocStatus.NEVER


def test_spare_blocks_of_one_are_none_of_another() -> None:
    """R16, R136: a sequence with lookahead blocks left over does not pay for one whose last block is full."""
    rules = make(4)
    a, b = prompt("a/0", range(4)), prompt("b/0", range(50, 54))
    rules.admit([a], PrefixHit(), 4, num_lookahead=8)
    start(rules, b)
    a.num_computed_tokens = 4
    assert rules.can_extend([a], 1)
    assert not rules.can_extend([a, b], 1)


# --- samples and forks -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_samples", [1, 2, 3, 5])
@pytest.mark.parametrize("caching", [True, False])
def test_n_sharers_of_a_partial_block_make_n_minus_1_copies(num_samples: int, caching: bool) -> None:
    """R19, R20: the prompt is stored once with n references; each writer but the last copies its last block."""
    rules = make(1 + num_samples, caching=caching)
    first = prompt("a/0", range(6))
    start(rules, first)
    samples = [first, *(fork(rules, first, f"a/{i}") for i in range(1, num_samples))]
    assert refs(rules, first) == [num_samples, num_samples]
    assert rules.num_free_gpu == num_samples - 1
    shared, partial_block = table(rules, first)
    assert rules.can_extend(samples, 1)
    growths = [go_on(rules, s, token=70 + i) for i, s in enumerate(samples)]
    assert [len(g.copies) for g in growths] == [1] * (num_samples - 1) + [0]
    assert [g.rewritten for g in growths] == [True] * (num_samples - 1) + [False]
    assert all(g.copies[0] == (partial_block, table(rules, s)[1]) for g, s in zip(growths, samples[:-1], strict=False))
    assert table(rules, samples[-1]) == [shared, partial_block]
    assert len({table(rules, s)[1] for s in samples}) == num_samples
    assert rules.ledger.gpu.refs[shared] == num_samples
    assert rules.num_free_gpu == 0
    assert not integrity.check(rules.ledger)


def test_copies_are_counted_before_they_are_made() -> None:
    """R20: three sharers need two blocks; one writer of three needs one, and owners that do not write keep the source."""
    rules = make(3)
    first = prompt("a/0", range(6))
    start(rules, first)
    samples = [first, fork(rules, first, "a/1"), fork(rules, first, "a/2")]
    assert rules.num_free_gpu == 1
    assert not rules.can_extend(samples, 1)
    assert rules.can_extend(samples[:1], 1)
    go_on(rules, first)
    assert refs(rules, samples[1]) == [3, 2]


def test_a_full_last_block_is_never_copied() -> None:
    """R20: after a prompt of whole blocks every sample takes a block of its own and writes no shared one."""
    rules = make(5)
    first = prompt("a/0", range(8))
    start(rules, first)
    samples = [first, fork(rules, first, "a/1"), fork(rules, first, "a/2")]
    growths = [go_on(rules, s) for s in samples]
    assert [(len(g.added), g.copies) for g in growths] == [(1, [])] * 3
    assert refs(rules, first) == [3, 3, 1]


def test_forks_outlive_their_parent() -> None:
    """R102: a child shares every block; the parent's end frees nothing of it; without a table nothing is forked."""
    rules = make()
    parent = prompt("a/0", range(10))
    rules.fork(parent, prompt("a/1", range(10)))
    assert not rules.ledger.tables
    start(rules, parent)
    child = fork(rules, parent, "a/1")
    assert table(rules, child) == table(rules, parent)
    assert table(rules, child) is not table(rules, parent)
    rules.release(parent)
    assert refs(rules, child) == [1, 1, 1]
    assert go_on(rules, child).copies == []
    rules.release(child)
    assert rules.num_free_gpu == 20


def test_two_children_that_fill_a_block_are_found_by_their_own_tokens() -> None:
    """R20, R107: what a fork makes of a shared partial block is cached under its own prefix."""
    rules = make()
    parent = prompt("a/0", range(7))
    start(rules, parent)
    child = fork(rules, parent, "a/1")
    go_on(rules, parent, token=50)
    go_on(rules, child, token=60)
    assert rules.lookup(prompt("b/0", [*range(7), 50, 1])).block_ids == tuple(table(rules, parent))
    assert rules.lookup(prompt("c/0", [*range(7), 60, 1])).block_ids == tuple(table(rules, child))


def test_a_group_starts_again_sharing_the_full_blocks_of_its_prompt() -> None:
    """R100, R19: three sequences of 10, 11 and 14 tokens over a prompt of 9: 2 shared blocks and 1, 1 and 2 of their own."""
    rules = make(6, caching=False)
    group = [KnownSequence(f"a/{i}", [*range(9), *range(90, 90 + n)], 9) for i, n in enumerate([1, 2, 5])]
    assert rules.can_admit(group, PrefixHit(), 10) is AllocStatus.OK
    rules.admit(group, PrefixHit(), 10)
    assert [refs(rules, s) for s in group] == [[3, 3, 1], [3, 3, 1], [3, 3, 1, 1]]
    assert rules.num_free_gpu == 0
    assert not integrity.check(rules.ledger)


def test_a_group_too_large_for_the_pool_never_starts_whatever_part_of_it_would() -> None:
    """R100, R136: its first sequence may start with one token, in 2 shared blocks and 3 of the others, but all its tokens need
    6; behind a window, where it frees blocks while it goes on, only the start counts."""
    group = [KnownSequence(f"a/{i}", [*range(9), *range(90, 90 + n)], 9) for i, n in enumerate([1, 2, 5])]
    busy = make(6, caching=False)
    start(busy, prompt("b/0", [1]))
    assert busy.can_admit(group, PrefixHit(), 10) is AllocStatus.LATER
    assert make(5, caching=False).can_admit(group, PrefixHit(), 1) is AllocStatus.NEVER
    assert make(5, caching=False, window=8).can_admit(group, PrefixHit(), 1) is AllocStatus.OK
    assert make(5, caching=False, window=8).can_admit(group, PrefixHit(), 10) is AllocStatus.NEVER
    assert make(4, caching=False, window=8).can_admit(group, PrefixHit(), 1) is AllocStatus.NEVER


def test_the_first_of_a_group_computes_the_shared_prompt_in_place() -> None:
    """R100, R20: a prompt computed in chunks goes into the blocks that all share, without a copy."""
    rules = make()
    group = [KnownSequence(f"a/{i}", [*range(9), 90 + i], 9) for i in range(2)]
    rules.admit(group, PrefixHit(), 3)
    group[0].num_computed_tokens = 3
    assert refs(rules, group[0]) == [2, 2]
    growth = rules.extend(group[0], 7)
    assert (len(growth.added), growth.copies) == (1, [])
    assert table(rules, group[0])[:2] == table(rules, group[1])[:2]


# --- siblings: samples that are groups of their own ------------------------------------------------------------------


@pytest.mark.parametrize("caching", [True, False])
def test_a_sample_finds_the_prompt_of_an_older_one(caching: bool) -> None:
    """R19: full prompt blocks are stored once, with caching off too, at least one token is left to compute."""
    rules = make(caching=caching)
    older = prompt("a/0", range(9))
    start(rules, older)
    younger = prompt("a/1", range(9), sibling_names=("a/0",))
    assert start(rules, younger) == PrefixHit(tuple(table(rules, older)[:2]), 8)
    assert refs(rules, younger) == [2, 2, 1]
    assert rules.lookup(prompt("a/2", range(8), sibling_names=("a/0",))).num_tokens == 4
    assert rules.lookup(prompt("b/0", range(9))).num_tokens == (8 if caching else 0)
    rules.release(older)
    rules.release(younger)
    assert rules.num_free_gpu == 20


def test_only_what_a_sibling_was_promised_is_found() -> None:
    """R19, R136: as far as planned steps of the sibling reach, never its outputs, nothing that was taken back."""
    rules = make(caching=False)
    older = prompt("a/0", range(9))
    younger = prompt("a/1", range(9), sibling_names=("a/x", "a/0"))
    start(rules, older, 5)
    assert rules.lookup(younger).num_tokens == 4
    rules.extend(older, 4)
    assert rules.lookup(younger).num_tokens == 8
    rules.retract(older, 5)
    assert rules.lookup(younger).num_tokens == 4
    rules.extend(older, 4)
    older.num_computed_tokens = 9
    for _ in range(6):
        go_on(rules, older)
    longer = KnownSequence("a/1", [*range(9), *[7] * 6], 9, sibling_names=("a/0",))
    assert rules.lookup(longer).num_tokens == 8
    child = fork(rules, older, "a/x")
    rules.release(older)
    assert rules.lookup(younger).block_ids == tuple(table(rules, child)[:2])
    rules.release(child)
    assert rules.lookup(younger) == PrefixHit()


# --- prefixes --------------------------------------------------------------------------------------------------------


def test_equal_leading_blocks_are_shared_and_no_others() -> None:
    """R107, R108: seq1 shares with seq0 exactly the blocks before the first other token; a shifted copy shares none."""
    rules = make()
    seq0 = prompt("s/0", range(14))
    start(rules, seq0)
    seq1 = prompt("s/1", [*range(8), 99, *range(9, 14)])
    assert start(rules, seq1).block_ids == tuple(table(rules, seq0)[:2])
    assert not set(table(rules, seq1)[2:]) & set(table(rules, seq0))
    assert rules.lookup(prompt("s/2", [55, *range(13)])) == PrefixHit()
    assert rules.lookup(prompt("s/3", [*range(4, 12), 1])) == PrefixHit()


@pytest.mark.parametrize("other", [{"lora_id": 1}, {"cache_salt": "x"}, {"no_cache_reuse": True}, {"cache_salt": "0"}])
def test_adapter_and_salt_keep_prefixes_apart(other: dict[str, object]) -> None:
    """R107, R138: equal tokens under another adapter or tenant salt, or of a request that wants no hits, hit nothing."""
    rules = make()
    start(rules, prompt("a/0", range(9)))
    assert rules.lookup(prompt("b/0", range(9), **other)) == PrefixHit()
    assert rules.lookup(prompt("c/0", range(9))).num_tokens == 8


def test_one_token_is_always_left_to_compute() -> None:
    """R134: of a prompt of two cached whole blocks one is taken, of one token more both."""
    rules = make()
    start(rules, prompt("a/0", range(8)))
    assert [rules.lookup(prompt("b/0", range(n))).num_tokens for n in (4, 5, 8, 9)] == [0, 4, 4, 8]


def test_outputs_count_for_a_prefix_like_prompts() -> None:
    """R107, R134: plain token equality, wherever prompt ends and output begins."""
    rules = make()
    a = prompt("a/0", range(6))
    start(rules, a)
    for token in (6, 7, 8):
        go_on(rules, a, token)
    assert rules.lookup(prompt("b/0", range(9))).num_tokens == 8


def test_full_blocks_are_known_as_soon_as_they_are_planned() -> None:
    """R136: a second request of the same step hits them; unknown tokens of a lookahead are not registered."""
    rules = make()
    a = prompt("a/0", range(9))
    rules.admit([a], rules.lookup(a), 5, num_lookahead=8)
    b = prompt("b/0", range(9))
    assert rules.lookup(b).num_tokens == 4
    a.num_computed_tokens = 5
    rules.extend(a, 7)
    assert rules.lookup(b).num_tokens == 8


def test_a_hit_on_free_blocks_costs_them() -> None:
    """R136: unreferenced hits count as needed: with 3 free blocks, 2 of them the prefix, 3 blocks fit and 4 do not."""
    rules = make(3)
    a = prompt("a/0", range(9))
    start(rules, a)
    rules.release(a)
    hit = rules.lookup(a)
    assert hit.num_tokens == 8
    assert rules.can_admit([a], hit, 4) is AllocStatus.OK
    assert rules.can_admit([a], hit, 5) is AllocStatus.LATER
    rules.admit([a], hit, 1)
    assert rules.can_admit([prompt("b/0", range(9))], hit, 1) is AllocStatus.LATER


def test_the_end_of_a_prefix_is_overwritten_first() -> None:
    """R137: the null block is never used; freed blocks queue up last block first; the longest freed goes first."""
    rules = make(4)
    a = prompt("a/0", range(13))
    start(rules, a)
    assert table(rules, a) == [1, 2, 3, 4]
    rules.release(a)
    assert [rules.lookup(a).num_tokens, rules.ledger.report().gpu.cached] == [12, 3]
    taken = []
    for i, left in enumerate([12, 8, 4, 0]):
        b = prompt(f"b/{i}", [100 + i])
        start(rules, b)
        taken += table(rules, b)
        assert rules.lookup(a).num_tokens == left
    assert taken == [4, 3, 2, 1]


def test_equal_blocks_are_not_merged() -> None:
    """R137: a sequence that computes the same block keeps its own; the block registered first is found."""
    rules = make()
    a, b = prompt("a/0", range(8)), prompt("b/0", range(8), no_cache_reuse=True)
    start(rules, a)
    start(rules, b)
    assert not set(table(rules, a)) & set(table(rules, b))
    c = prompt("c/0", range(9))
    assert rules.lookup(c).block_ids == tuple(table(rules, a))
    rules.retract(a, 0)
    assert rules.lookup(c).block_ids == tuple(table(rules, b))


def test_what_was_never_computed_is_not_found_and_can_be_computed_later() -> None:
    """R136: a failed step takes its promise back, whole blocks from that offset on; computing them makes them known."""
    rules = make()
    a, b = prompt("a/0", range(13)), prompt("b/0", range(13))
    start(rules, a, 6)
    rules.extend(a, 7)
    assert rules.lookup(b).num_tokens == 12
    rules.retract(a, 6)
    assert rules.lookup(b).num_tokens == 4
    rules.extend(a, 7)
    assert rules.lookup(b).num_tokens == 12
    rules.release(a)
    rules.retract(a, 0)
    assert rules.lookup(b).num_tokens == 12


def test_results_make_blocks_known_up_to_what_is_computed_for_sure() -> None:
    """R151: computed less placeholders, never beyond the known tokens; the same again changes nothing; no blocks: no-op."""
    rules = make()
    a = prompt("a/0", range(6))
    start(rules, a)
    probe = partial(rules.lookup, prompt("b/0", [*range(6), 8, 9, 1]))
    a.num_placeholders = 1
    for token in (8, 9):
        rules.extend(a, 1)
        a.num_computed_tokens += 1
        a.token_ids.append(token)
        rules.commit_sampled(a)
        assert probe().num_tokens == 4
    a.num_placeholders = 0
    rules.commit_sampled(a)
    rules.commit_sampled(a)
    assert probe().num_tokens == 8
    a.num_placeholders = 20
    rules.commit_sampled(a)
    assert probe().num_tokens == 8
    rules.release(a)
    rules.reset_prefixes()
    rules.commit_sampled(a)
    assert probe() == PrefixHit()


def test_prefixes_are_forgotten_on_request_only_when_nothing_runs() -> None:
    """R142: refused while any block is in use; then nothing is found any more, and all works on."""
    rules = make()
    a = prompt("a/0", range(9))
    start(rules, a)
    assert not try_reset_prefixes(rules)
    rules.release(a)
    assert rules.lookup(a).num_tokens == 8
    assert try_reset_prefixes(rules)
    assert rules.lookup(a) == PrefixHit()
    start(rules, a)
    assert rules.lookup(prompt("b/0", range(9))).num_tokens == 8
    assert not integrity.check(rules.ledger)


def test_a_block_swapped_to_the_host_is_in_use_too() -> None:
    """R142: the request is refused while a sequence waits on the host."""
    rules = QuireRules.make(block_size=SIZE, num_gpu_blocks=9, num_cpu_blocks=4, max_model_len=64, prefix_caching=True)
    a = prompt("a/0", range(9))
    start(rules, a)
    rules.swap_out([a])
    assert not try_reset_prefixes(rules)
    rules.release(a)
    assert try_reset_prefixes(rules)


def test_blocks_that_all_hold_are_common() -> None:
    """R143: leading blocks of the first with as many references as there are tables; 0 when caching is off."""
    rules = make()
    a, b = prompt("a/0", range(14)), prompt("b/0", [*range(8), 50])
    assert rules.num_common_prefix_blocks([]) == 0
    start(rules, a)
    assert rules.num_common_prefix_blocks([a]) == 4
    start(rules, b)
    assert rules.num_common_prefix_blocks([a, b]) == 2
    start(rules, prompt("c/0", [60]))
    assert rules.num_common_prefix_blocks([a, b]) == 0
    off = make(caching=False)
    start(off, a)
    assert off.num_common_prefix_blocks([a]) == 0


def test_lookups_and_hits_are_counted_in_blocks_of_started_sequences() -> None:
    """R119: asking is not counted; 2 of 3 blocks found make (3, 2) more; nothing with caching off."""
    rules = make()
    start(rules, prompt("a/0", range(13)))
    assert rules.hits == (3, 0)
    b = prompt("b/0", [*range(8), 50, 51, 52, 53, 54])
    rules.lookup(b)
    start(rules, b)
    start(rules, prompt("c/0", range(13), no_cache_reuse=True))
    assert rules.hits == (6, 2)
    off = make(caching=False)
    start(off, prompt("a/0", range(13)))
    assert off.hits == (0, 0)


def test_plain_v1_does_not_swap() -> None:
    """R131: a preempted request is recomputed; a swap is never requested."""
    rules = make()
    a = prompt("a/0", range(9))
    start(rules, a)
    assert not rules.can_swap_out([a])
    assert rules.can_swap_in([a]) is AllocStatus.NEVER
    for move in (rules.swap_out, rules.swap_in):
        with pytest.raises(AssertionError, match="do not swap"):
            move([a])
