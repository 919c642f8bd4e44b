"""States of sequences in blocks of the pool, and checkpoints of them (blocks of 4 tokens)."""

from typing import Any

import pytest

from block_manager import integrity
from block_manager.cache_rules import AllocStatus, PrefixHit, StateBlocks, StateMoves
from block_manager.rules.grouped_rules import GroupedQuireRules, GroupedRules
from block_manager.rules.per_rank import PerRankRules
from block_manager.rules.v1_rules import V1PoolRules
from tests.support.core.sequences import KnownSequence, fork, prompt

SIZE = 4


def make(num_usable: int = 40, *, num_states: int = 2, distance: int = 8, **values: Any) -> GroupedRules[V1PoolRules]:
    """V1's rules of one cache group with states; the null block is not counted."""
    sure = {"max_model_len": 64, "prefix_caching": True, "num_ahead_tokens": 64, "num_cpu_blocks": 0}
    given = sure | {"keeps_unknown": True} | values
    sizes = {"block_size": SIZE, "num_gpu_blocks": num_usable + 1}
    states = {"num_state_blocks": num_states, "checkpoint_tokens": distance}
    return GroupedRules.make([None], **sizes, **states, **given)


def plan(rules: GroupedRules[V1PoolRules], sequence: KnownSequence, num_tokens: int | None = None) -> StateMoves:
    """One step of it: it starts behind its hit, or goes on. None: with all its tokens."""
    if sequence.name not in rules.ledger.tables:
        hit = rules.lookup(sequence)
        num_tokens = len(sequence.token_ids) - hit.num_tokens if num_tokens is None else num_tokens
        assert rules.can_admit([sequence], hit, num_tokens) is AllocStatus.OK
        rules.admit([sequence], hit, num_tokens)
        sequence.num_computed_tokens = hit.num_tokens
    else:
        num_tokens = len(sequence.token_ids) - sequence.num_computed_tokens if num_tokens is None else num_tokens
        rules.extend(sequence, num_tokens)
    sequence.num_scheduled_tokens = num_tokens
    moves = rules.commit([sequence], 0.0)
    assert moves is not None and integrity.check(rules.ledger) == []
    sequence.num_computed_tokens += num_tokens
    return moves


def kept(moves: StateMoves) -> list[int]:
    """After how many tokens checkpoints are taken."""
    return [keep.num_tokens for keep in moves.to_keep]


def test_a_sequence_has_its_states_first_and_they_do_not_grow() -> None:
    """R51: 2 blocks of states and 3 of 9 tokens; a hit of them needs neither."""
    rules = make()
    a = prompt("a/0", range(9))
    assert rules.num_blocks_to_admit([a], PrefixHit(), 9) == 5
    plan(rules, a)
    assert rules.ledger.tables["a/0"] == [1, 2, 3, 4, 5]
    a.token_ids += range(20)
    assert rules.num_blocks_needed(a, 20) == 5
    plan(rules, a)
    assert rules.ledger.tables["a/0"][:2] == [1, 2] and len(rules.ledger.tables["a/0"]) == 2 + 8
    ledger = rules.ledger
    assert (ledger.room("a/0"), ledger.room("b/0"), ledger.blocks_behind("a/0", 25)) == (
        32,
        0,
        ledger.tables["a/0"][8:],
    )
    assert [ledger.blocks_for(n) for n in (0, 1, 9)] == [0, 3, 5] and ledger.most_blocks(9) == 7
    assert ledger.most_blocks(9, 2) == 2 * 5 + 2 and ledger.num_shared_tokens("a/0") == 0


def test_states_count_in_what_fits_alone() -> None:
    """R197: of 7 blocks 5 are left for tokens."""
    rules = make(7)
    assert rules.capacity_tokens == 20
    assert rules.can_admit([prompt("a/0", range(20))], PrefixHit(), 20) is AllocStatus.OK
    assert rules.can_admit([prompt("a/0", range(21))], PrefixHit(), 1) is AllocStatus.NEVER
    assert make(2).capacity_tokens == 0


def test_checkpoints_are_at_multiples_and_at_the_last_block_of_the_prompt() -> None:
    """R137: of 31 tokens a repetition can hit 28; none is taken twice, and none before the prefix of one is computed."""
    rules = make(distance=12)
    a = prompt("a/0", range(31))
    assert [kept(plan(rules, a, n)) for n in (11, 1, 15, 4)] == [[], [12], [24], [28]]
    b = prompt("b/0", range(31))
    moves = plan(rules, b)
    assert moves.to_read[0][:2] == ("b/0", 28) and b.num_scheduled_tokens == 3 and not moves.to_keep
    c = prompt("c/0", [*range(27), 99])
    assert plan(rules, c).to_read[0].num_tokens == 24
    a.token_ids += range(100, 110)
    assert kept(plan(rules, a)) == [36], "of outputs as well"
    assert rules.lookup(prompt("d/0", [*range(31), *range(100, 110)])).num_tokens == 36


def test_a_hit_ends_at_a_checkpoint_and_the_rest_is_computed_into_new_blocks() -> None:
    """R137: the KV of 20 tokens is cached, the states of 16."""
    rules = make(distance=16)
    a = prompt("a/0", range(9))
    plan(rules, a)
    a.token_ids += range(9, 22)
    plan(rules, a)
    b = prompt("b/0", range(22))
    hit = rules.lookup(b)
    assert hit.num_tokens == 16 and hit.block_ids[2:] == tuple(rules.ledger.tables["a/0"][2:6])
    assert rules.num_cached_tokens(b) == 16
    plan(rules, b)
    table_a, table_b = rules.ledger.tables["a/0"], rules.ledger.tables["b/0"]
    assert set(table_a) & set(table_b) == set(table_a[2:6])


def test_what_a_step_reads_is_not_taken_in_the_same_plan() -> None:
    """A checkpoint is referenced until the plan is complete: 2 of its own, 2 of the checkpoint, then 2 are left for others."""
    rules = make(12)
    plan(rules, (a := prompt("a/0", range(9))))
    rules.release(a)
    b, c = prompt("b/0", range(9)), prompt("c/0", range(50, 60))
    hit = rules.lookup(b)
    assert hit.num_tokens == 8 and rules.num_blocks_to_admit([b], hit, 1) == 2 + 2 + 2 + 1
    rules.admit([b], hit, 1)
    b.num_computed_tokens, b.num_scheduled_tokens = 8, 1
    assert rules.num_free_gpu == 5 and integrity.check(rules.ledger) == []
    rules.admit([c], PrefixHit(), 10)
    c.num_scheduled_tokens = 10
    assert rules.num_free_gpu == 0
    moves = rules.commit([b, c], 0.0)
    assert moves == StateMoves([StateBlocks("b/0", 8, hit.block_ids[:2])], [])
    assert rules.num_free_gpu == 2 and rules.lookup(prompt("d/0", range(9))).num_tokens == 8


def test_a_sequence_goes_on_in_the_checkpoint_where_there_is_no_room_for_both() -> None:
    """R51: so a hit never needs more blocks than none. 8 are free, 2 of them are the watermark's; both would take 8."""
    rules = make(11, distance=64)
    plan(rules, prompt("d/0", range(90, 93)))
    plan(rules, a := prompt("a/0", range(13)))
    rules.release(a)
    b = prompt("b/0", range(13))
    hit = rules.lookup(b)
    assert hit.num_tokens == 12 and rules.num_blocks_to_admit([b], hit, 1) == 8 == rules.num_free_gpu
    rules.watermark_blocks = 2
    assert rules.num_blocks_to_admit([b], hit, 1) == 6 == rules.num_blocks_to_admit([b], PrefixHit(), 13)
    moves = plan(rules, b)
    assert not moves.to_read and rules.ledger.tables["b/0"][:2] == list(hit.block_ids[:2])
    assert rules.lookup(prompt("c/0", range(13))).num_tokens == 0, "it is no checkpoint any more"


def test_a_fork_copies_the_states_before_it_computes_and_the_last_one_does_not() -> None:
    """R102: two blocks of states and the last one of KV."""
    rules = make(prefix_caching=False)
    plan(rules, a := prompt("a/0", range(6)))
    b = fork(rules, a, "b/0")
    for sequence in (a, b):
        sequence.token_ids.append(7)
    assert rules.num_blocks_needed(b, 1) == 3 and rules.num_to_extend([a, b], 1) == 3
    growth = rules.extend(b, 1)
    assert [source for source, _ in growth.copies] == [1, 2, 4] and growth.rewritten
    assert rules.extend(a, 1).copies == [] and rules.ledger.tables["a/0"] == [1, 2, 3, 4]
    assert rules.ledger.tables["b/0"] == [5, 6, 3, 7] and integrity.check(rules.ledger) == []


def test_states_move_with_their_sequence_and_are_never_found_on_the_device() -> None:
    """R73: KV returns without a copy where it is cached; states change, so they do not."""
    sizes = {"block_size": SIZE, "num_gpu_blocks": 21, "num_cpu_blocks": 20, "max_model_len": 64}
    states = {"num_state_blocks": 2, "checkpoint_tokens": 8}
    rules = GroupedQuireRules.make([None], **sizes, **states, prefix_caching=True, num_ahead_tokens=9)
    plan(rules, a := prompt("a/0", range(8)))
    b = fork(rules, a, "b/0")
    assert len(rules.swap_out([a, b])) == 4 and rules.num_free_cpu == 16
    c = fork(rules, b, "c/0")
    assert rules.ledger.host_tables["c/0"] == rules.ledger.host_tables["a/0"] and rules.num_free_cpu == 16
    assert rules.num_blocks_to_swap_in([a, b, c]) == 2 + 2 * 2 + 2, "states, their copies, cached blocks"
    pairs = rules.swap_in([a, b, c])
    assert [target for _, target in pairs] == rules.ledger.tables["a/0"][:2] and len(pairs) == 2
    assert integrity.check(rules.ledger) == [] and rules.num_free_cpu == 20


# --- tokens that are not known yet, and steps that fail -------------------------------------------------------------------


def ahead(rules: GroupedRules[V1PoolRules]) -> KnownSequence:
    """A sequence whose step with token 8, which the one before it is to draw, is planned already."""
    plan(rules, a := prompt("a/0", range(7)))
    a.num_placeholders = 1
    assert kept(plan(rules, a, 1)) == [8]
    return a


LONGER = [*range(7), 99, 1]


def test_no_checkpoint_ends_with_what_may_be_a_draft_token() -> None:
    """R151: tokens of steps in flight may be taken back; the next place that is known is kept."""
    rules = make(distance=4, keeps_unknown=False)
    a = prompt("a/0", range(7))
    assert kept(plan(rules, a)) == [4]
    a.num_placeholders = 3
    assert kept(plan(rules, a, 3)) == []
    a.token_ids += [7, 8]
    a.num_computed_tokens, a.num_placeholders = 8, 0
    assert kept(plan(rules, a)) == []
    a.token_ids += [9, 10, 11]
    assert kept(plan(rules, a)) == [12] and rules.num_free_gpu == 40 - 2 - 3


def test_a_checkpoint_of_tokens_in_flight_is_a_hit_once_they_are_known() -> None:
    """R151: it is free meanwhile, and may be evicted."""
    rules = make(distance=8)
    a = ahead(rules)
    assert rules.num_free_gpu == 40 - 4 and rules.lookup(prompt("b/0", LONGER)).num_tokens == 4
    a.token_ids.append(99)
    a.num_placeholders = 0
    rules.commit_sampled(a)
    assert rules.lookup(prompt("b/0", LONGER)).num_tokens == 8 and integrity.check(rules.ledger) == []


@pytest.mark.parametrize("num_more", [2, 3])
def test_a_checkpoint_of_tokens_in_flight_may_be_lost_before(num_more: int) -> None:
    """Its blocks, or one of them, hold the KV of others when its tokens become known."""
    rules = make(9, distance=8)
    a = ahead(rules)
    plan(rules, prompt("b/0", range(50, 49 + 4 * num_more)))
    a.token_ids.append(99)
    a.num_placeholders = 0
    rules.commit_sampled(a)
    assert rules.lookup(prompt("c/0", LONGER)).num_tokens in (0, 4) and integrity.check(rules.ledger) == []
    assert not rules._states.checkpoint(a, 2)


def test_checkpoints_of_a_step_that_failed_are_dropped_and_those_before_are_not() -> None:
    """R28: known ones and those of tokens in flight."""
    rules = make(distance=4)
    plan(rules, a := prompt("a/0", range(12)), 5)
    assert kept(plan(rules, a, 6)) == [8]
    rules.retract(a, 5)
    assert rules.lookup(prompt("b/0", range(12))).num_tokens == 4
    rules = make(distance=8)
    a = ahead(rules)
    rules.retract(a, 7)
    a.token_ids.append(99)
    a.num_computed_tokens, a.num_placeholders = 8, 0
    rules.commit_sampled(a)
    assert not rules._states.checkpoint(a, 2) and integrity.check(rules.ledger) == []


def test_all_blocks_of_a_failed_checkpoint_are_dropped_where_one_was_there_before() -> None:
    """An evicted checkpoint may have left some of its blocks."""
    rules = make(distance=8)
    plan(rules, a := prompt("a/0", range(9)))
    old = rules._states.checkpoint(a, 2)
    rules.release(a)
    rules.ledger.gpu.share(old[:1])
    rules.ledger.gpu.unregister(old[0])
    rules.ledger.gpu.release(old[:1])
    [keep] = plan(rules, b := prompt("b/0", range(9))).to_keep
    assert rules._states.checkpoint(b, 2) == [keep.block_ids[0], old[1]] != old
    rules.retract(b, 0)
    assert [rules.ledger.gpu.hash_of[block] for block in (*old, *keep.block_ids)] == [None] * 4
    assert integrity.check(rules.ledger) == []


def test_ranks_with_states() -> None:
    """R190: a plan is of one rank, which keeps its own checkpoints."""
    rules = PerRankRules([make(20), make(20)])
    a = prompt("a/0", range(9), lane=1)
    rules.admit([a], PrefixHit(), 9)
    a.num_scheduled_tokens = 9
    moves = rules.commit([a], 0.0)
    assert moves is not None and kept(moves) == [8] and rules.commit([], 0.0) is None
    assert rules.known_tokens(prompt("b/0", range(9))) == [0, 8]
    assert (rules.ledger.num_state_blocks, rules.ledger.most_blocks(8)) == (2, 6) and integrity.check(
        rules.ledger
    ) == []
