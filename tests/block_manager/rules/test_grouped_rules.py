"""Cache groups over one pool: what a sequence holds, what fits alone, tables and their account (blocks of 4 tokens)."""

import random
from collections import deque
from collections.abc import Sequence

import pytest

from block_manager import integrity
from block_manager.cache_rules import AllocStatus, PrefixHit
from block_manager.rules.grouped_rules import GroupedQuireRules, GroupedRules
from block_manager.rules.per_rank import PerRankRules
from block_manager.rules.v1_rules import V1PoolRules
from tests.support.core.sequences import KnownSequence, fork, go_on, prompt, start

SIZE = 4
Windows = Sequence[int | None]


def make(
    windows: Windows, num_usable: int = 60, *, num_ahead: int = 64, max_model_len: int = 64, caching: bool = True
) -> GroupedRules[V1PoolRules]:
    """V1's rules for these groups; the null block is not counted."""
    sizes = {"block_size": SIZE, "num_gpu_blocks": num_usable + 1, "num_cpu_blocks": 0}
    return GroupedRules.make(
        windows, **sizes, max_model_len=max_model_len, prefix_caching=caching, num_ahead_tokens=num_ahead
    )


def made_with_swap(windows: Windows, num_usable: int, num_host: int, watermark: int | None = 0) -> GroupedQuireRules:
    """Quire's rules for these groups; null blocks are not counted."""
    sizes = {"block_size": SIZE, "num_gpu_blocks": num_usable + 1, "num_cpu_blocks": num_host + 1}
    values = {"max_model_len": 64, "prefix_caching": True, "num_ahead_tokens": 64, "watermark_blocks": watermark}
    return GroupedQuireRules.make(windows, **sizes, **values)


def held(rules: GroupedRules[V1PoolRules], group: int, name: str = "a/0") -> list[int]:
    """Positions of a table that have a block of a group."""
    table = rules.ledger.tables[name][group :: rules.ledger.num_groups]
    return [at for at, block in enumerate(table) if block]


# --- what is held ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("window", range(1, 14))
@pytest.mark.parametrize("chunk", [1, 3, 4, 7])
def test_each_group_holds_what_its_window_needs(window: int, chunk: int) -> None:
    """R105: after each step, all blocks of the group without a window, and of the other those that the step attended to:
    at most ceil((window - 1) / 4) + 1 and those of the step."""
    rules = make([None, window], caching=False)
    a = prompt("a/0", range(40))
    rules.admit([a], PrefixHit(), chunk)
    for start_at in range(0, 40, chunk):
        num_tokens = min(chunk, 40 - start_at)
        if start_at:
            assert rules.can_extend([a], num_tokens)
            rules.extend(a, num_tokens)
        a.num_computed_tokens = end = start_at + num_tokens
        rules.free_out_of_window([a], [start_at])
        assert held(rules, 0) == list(range(-(-end // SIZE)))
        assert held(rules, 1) == list(range(max(0, start_at - window + 1) // SIZE, -(-end // SIZE)))
        assert len(held(rules, 1)) <= -(-(window - 1) // SIZE) + 1 + -(-num_tokens // SIZE)
        assert rules.num_free_gpu == 60 - len(held(rules, 0)) - len(held(rules, 1))
        assert integrity.check(rules.ledger) == []


def run_alone(rules: GroupedRules[V1PoolRules], num_tokens: int, chunk: int, depth: int, rng: random.Random) -> int:
    """A sequence alone: its prompt in chunks of at most `chunk`, then decode, with `depth` steps in flight. Returns the most
    blocks in use. Fails where blocks run out."""
    a, steps, most = prompt("a/0", range(num_tokens // 2)), deque[int](), 0
    hit = rules.lookup(a)
    first = min(chunk, len(a.token_ids) - hit.num_tokens)
    assert rules.can_admit([a], hit, first) is AllocStatus.OK
    rules.admit([a], hit, first)
    a.num_computed_tokens = hit.num_tokens + first
    steps.append(hit.num_tokens)
    while a.num_computed_tokens < num_tokens:
        if len(steps) == depth:
            rules.free_out_of_window([a], [steps.popleft()])
        if a.num_computed_tokens == len(a.token_ids):
            a.token_ids.append(7)
        step = min(rng.randint(max(1, chunk - 1), chunk), len(a.token_ids) - a.num_computed_tokens)
        assert rules.can_extend([a], step), f"out of blocks after {a.num_computed_tokens} tokens"
        rules.extend(a, step)
        steps.append(a.num_computed_tokens)
        a.num_computed_tokens += step
        most = max(most, 60 - rules.num_free_gpu)
    rules.release(a)
    return most


@pytest.mark.parametrize("windows", [(None, 5), (None, 6, 6), (3, 9), (1, None), (None, None), (4, None, 17)])
@pytest.mark.parametrize(("chunk", "depth"), [(1, 1), (5, 1), (8, 2), (3, 3)])
def test_what_fits_alone_never_runs_out(windows: Windows, chunk: int, depth: int) -> None:
    """R51: a sequence as long as the capacity is served alone in chunks, with steps in flight; one longer is refused."""
    rng = random.Random(f"{windows} {chunk} {depth}")
    for num_usable in range(len(windows), 40):
        rules = make(windows, num_usable, num_ahead=(depth + 1) * chunk)
        capacity = rules.capacity_tokens
        assert rules.ledger.blocks_for(capacity) <= num_usable
        assert capacity >= 64 or rules.ledger.blocks_for(capacity + 1) > num_usable
        for num_tokens in {min(capacity, 64), capacity // 2 + 1} if capacity > 1 else ():
            run_alone(rules, num_tokens, chunk, depth, rng)
        longer = prompt("b/0", range(capacity + 1))
        assert capacity >= 64 or rules.can_admit([longer], PrefixHit(), 1) is AllocStatus.NEVER
        assert (
            not capacity or rules.can_admit([prompt("b/0", range(min(64, capacity)))], PrefixHit(), 1) is AllocStatus.OK
        )


def test_a_window_makes_room_for_longer_sequences() -> None:
    """With steps of 4 tokens, one in flight: a window of 5 holds 4 blocks at most."""
    assert make([None, None], 20).capacity_tokens == 40
    assert make([None, 5], 20, num_ahead=8).capacity_tokens == 64
    assert make([None, 5], 19, num_ahead=8).capacity_tokens == 60
    rules = make([None, 5], 19, num_ahead=8)
    rules.resize(18, 0)
    assert rules.capacity_tokens == 52
    assert [rules.ledger.blocks_for(n) for n in (0, 1, 16, 17, 64)] == [0, 2, 8, 9, 20]
    assert [rules.ledger.most_blocks(n, 2) for n in (1, 64)] == [4, 64]


# --- joint needs -----------------------------------------------------------------------------------------------------


def test_needs_are_summed_over_groups() -> None:
    """R51: 5 blocks are free where two groups need 6; the watermark counts once."""
    rules = make([None, 9], 6)
    a, b = prompt("a/0", range(9)), prompt("b/0", range(100, 102))
    assert rules.num_blocks_to_admit([a], PrefixHit(), 9) == 6
    assert rules.can_admit([a], PrefixHit(), 9) is AllocStatus.OK
    start(rules, b)
    assert rules.can_admit([a], PrefixHit(), 9) is AllocStatus.LATER
    assert rules.num_blocks_needed(b, 2) == 0 and rules.num_blocks_needed(b, 3) == 2
    assert rules.can_extend([b], 10) and not rules.can_extend([b], 11)
    watched = made_with_swap([None, 9], 8, 0, watermark=2)
    start(watched, b)
    assert watched.can_admit([prompt("c/0", range(8))], PrefixHit(), 8) is AllocStatus.OK
    assert watched.can_admit([prompt("c/0", range(9))], PrefixHit(), 9) is AllocStatus.LATER
    assert made_with_swap([None, 9], 299, 0, watermark=None).watermark_blocks == 3


def test_samples_of_one_request_need_all_their_prompt_to_start() -> None:
    """R102: they share the full blocks of the prompt in each group, so all of those are taken at once."""
    rules = make([None, 5], 60, num_ahead=8)
    group = [KnownSequence(f"a/{i}", list(range(30)), 25) for i in range(3)]
    assert rules.num_blocks_to_admit(group, PrefixHit(), 4) == 2 * (6 + 2 + 2)
    rules.admit(group, PrefixHit(), 4)
    assert rules.num_free_gpu == 60 - 20 and integrity.check(rules.ledger) == []
    small = make([None, 5], 21, num_ahead=8)
    assert small.can_admit(group, PrefixHit(), 4) is AllocStatus.NEVER, "8 + 4 blocks without a window, 10 of it"
    assert make([None, 5], 24, num_ahead=8).can_admit(group, PrefixHit(), 4) is AllocStatus.OK


def test_growth_is_flat_and_each_group_copies_what_it_shares() -> None:
    """R102: at each position one block for each group; forks copy the block that they write to, in all groups."""
    rules = make([None, 5], 20, caching=False)
    a = prompt("a/0", range(8))
    start(rules, a)
    assert rules.ledger.tables["a/0"] == [1, 3, 2, 4]
    assert go_on(rules, a).added == [5, 6] and rules.ledger.tables["a/0"] == [1, 3, 2, 4, 5, 6]
    b = fork(rules, a, "b/0")
    assert integrity.check(rules.ledger) == [] and rules.num_blocks_needed(b, 1) == 2
    growth = go_on(rules, b)
    assert (growth.copies, growth.added, growth.rewritten) == ([(5, 7), (6, 8)], [], True)
    assert rules.ledger.tables["b/0"] == [1, 3, 2, 4, 7, 8] and not go_on(rules, a).copies
    rules.free_out_of_window([b], [9])
    assert rules.ledger.tables["b/0"] == [1, 0, 2, 4, 7, 8] and rules.ledger.tables["a/0"] == [1, 3, 2, 4, 5, 6]
    assert integrity.check(rules.ledger) == []


# --- swap ------------------------------------------------------------------------------------------------------------


def test_there_and_back_with_null_blocks() -> None:
    """R73, R105: null blocks are not copied; tables return with the same positions, and a copy where nothing is cached."""
    rules = made_with_swap([None, 5], 20, 20)
    a = prompt("a/0", range(16))
    start(rules, a)
    rules.free_out_of_window([a], [16])
    assert rules.ledger.tables["a/0"] == [1, 0, 2, 0, 3, 0, 4, 8]
    pairs = rules.swap_out([a])
    assert [source for source, _ in pairs] == [1, 2, 3, 4, 8] and rules.num_free_cpu == 15
    assert rules.ledger.named_tables()["a/0"][:4] == ["c1", "c0", "c2", "c0"]
    rules.reset_prefixes()
    assert rules.can_swap_in([a]) is AllocStatus.OK and rules.num_blocks_to_swap_in([a]) == 5
    back = rules.swap_in([a])
    assert [source for source, _ in back] == [target for _, target in pairs]
    assert [bool(block) for block in rules.ledger.tables["a/0"]] == [True, False] * 3 + [True, True]
    assert (rules.num_free_gpu, rules.num_free_cpu) == (15, 20) and integrity.check(rules.ledger) == []


def test_what_the_device_still_caches_returns_without_a_copy_in_all_groups() -> None:
    """R73: the cached blocks of all groups are kept before any group takes a free block."""
    rules = made_with_swap([None, None], 12, 20)
    a, other, third = prompt("a/0", range(13)), prompt("b/0", range(100, 105)), prompt("c/0", range(200, 201))
    start(rules, other)
    start(rules, a)
    rules.swap_out([a])
    start(rules, third)
    rules.release(other)
    order = list(rules.ledger.gpu.free_blocks)
    assert order[:6] == [6, 5, 12, 11, 10, 9], (
        "two of a's in the first group; of the second 12, which was not full, first"
    )
    assert rules.num_blocks_to_swap_in([a]) == 8
    assert [target for _, target in rules.swap_in([a])] == [12, 2, 1]
    assert rules.ledger.tables["a/0"][:6] == [5, 9, 6, 10, 12, 11]
    assert integrity.check(rules.ledger) == []


def test_the_host_has_room_for_all_groups_or_for_none() -> None:
    """R73: 3 + 3 blocks do not fit 5 host blocks; nor does the device ever take back more than it has."""
    rules = made_with_swap([None, 20], 12, 5)
    a = prompt("a/0", range(12))
    start(rules, a)
    assert not rules.can_swap_out([a])
    rules.resize(13, 7)
    assert rules.can_swap_out([a])
    rules.swap_out([a])
    rules.resize(5 + 1, 7)
    assert rules.can_swap_in([a]) is AllocStatus.NEVER
    rules.resize(12 + 1, 7)
    start(rules, prompt("b/0", range(100, 114)))
    assert rules.can_swap_in([a]) is AllocStatus.LATER


# --- the account -----------------------------------------------------------------------------------------------------


def test_the_ledger_answers_by_position() -> None:
    """R200: room, tokens and blocks behind an offset count positions, whatever the number of groups."""
    rules = make([None, 5], 20)
    a = prompt("a/0", range(16))
    start(rules, a)
    rules.free_out_of_window([a], [16])
    ledger = rules.ledger
    assert (ledger.num_groups, ledger.windows, ledger.room("a/0"), ledger.room("b/0")) == (2, (5,), 16, 0)
    assert ledger.blocks_behind("a/0", 13) == [4, 8] and ledger.blocks_behind("a/0", 8) == [3, 0, 4, 8]
    assert ledger.num_shared_tokens("a/0") == 0
    fork(rules, a, "b/0")
    assert ledger.num_shared_tokens("a/0") == 16
    assert ledger.named_tables()["b/0"] == ["g1", "g0", "g2", "g0", "g3", "g0", "g4", "g8"]
    assert ledger.counts()[0].total == 20 and ledger.report().refs == {f"g{b}": 2 for b in (1, 2, 3, 4, 8)}


def test_a_wrong_reference_in_any_group_is_found() -> None:
    """R200: references balance over the tables of all groups."""
    rules = make([None, 5], 20)
    start(rules, prompt("a/0", range(8)))
    rules.ledger.gpu.refs[4] += 1
    assert integrity.check(rules.ledger) == ["device: block 4 has 2 references, 1 tables contain it"]


def test_ranks_of_groups() -> None:
    """R190: a rank has the pool of its groups."""
    rules = PerRankRules([make([None, 5], 10, num_ahead=8), make([None, 5], 10, num_ahead=8)])
    a = prompt("a/0", range(16), lane=1)
    start(rules, a)
    rules.free_out_of_window([a], [16])
    assert rules.has_windows and rules.num_free_of(1) == 5 and rules.capacity_blocks == 10
    assert rules.ledger.named_tables() == {"a/0": ["g1@1", "g0@1", "g2@1", "g0@1", "g3@1", "g0@1", "g4@1", "g8@1"]}
    assert (rules.ledger.num_groups, rules.ledger.blocks_for(40), rules.capacity_tokens) == (2, 14, 24)
    assert integrity.check(rules.ledger) == []
