"""Quire's own rules on worked examples: the watermark, and swapping with all that is shared (blocks of 4 tokens)."""

import pytest

from block_manager import integrity
from block_manager.cache_rules import AllocStatus, PrefixHit
from block_manager.rules.quire_rules import QuireRules
from tests.support.core.sequences import KnownSequence, fork, go_on, prompt, start

SIZE = 4


def make(num_usable: int = 20, num_host: int = 20, *, caching: bool = True, watermark: int = 0) -> QuireRules:
    """Rules whose devices have that many blocks, the null block not counted."""
    return QuireRules.make(
        block_size=SIZE,
        num_gpu_blocks=num_usable + 1,
        num_cpu_blocks=num_host,
        max_model_len=64,
        prefix_caching=caching,
        watermark_blocks=watermark,
    )


def two_samples(rules: QuireRules, num_tokens: int = 6) -> list[KnownSequence]:
    """Two samples of one prompt that share all of its blocks."""
    first = prompt("a/0", range(num_tokens))
    start(rules, first)
    return [first, fork(rules, first, "a/1")]


# --- watermark -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("num_tokens", "num_held", "status"),
    [
        (32, 0, AllocStatus.OK),
        (40, 0, AllocStatus.OK),
        (41, 0, AllocStatus.NEVER),
        (20, 3, AllocStatus.OK),
        (21, 3, AllocStatus.LATER),
        (40, 3, AllocStatus.LATER),
        (41, 3, AllocStatus.NEVER),
    ],
)
def test_admission_keeps_the_watermark(num_tokens: int, num_held: int, status: AllocStatus) -> None:
    """R51, R52: of 10 blocks 2 stay free while a request runs: with 3 held 5 fit now, 6 to 10 later, when none runs any more."""
    rules = make(10, watermark=2)
    if num_held:
        start(rules, prompt("a/0", range(100, 100 + SIZE * num_held)))
    assert rules.can_admit([prompt("b/0", range(num_tokens))], PrefixHit(), num_tokens) is status


def test_the_default_watermark_is_one_percent() -> None:
    """R52: int(0.01 x blocks), 0 below 100."""
    for num_blocks, watermark in [(99, 0), (199, 1), (250, 2)]:
        rules = QuireRules.make(
            block_size=SIZE, num_gpu_blocks=num_blocks, num_cpu_blocks=0, max_model_len=9999, prefix_caching=False
        )
        start(rules, prompt("a/0", [1] * SIZE))
        most = (num_blocks - 2 - watermark) * SIZE
        assert rules.can_admit([prompt("b/0", [1] * most)], PrefixHit(), most) is AllocStatus.OK
        assert rules.can_admit([prompt("b/0", [1] * (most + 1))], PrefixHit(), most + 1) is AllocStatus.LATER


def test_a_sequence_grown_into_the_watermark_may_return() -> None:
    """R52: the watermark is no reason to give up a sequence that has outputs; alone on the device it gets it all."""
    rules = make(4, watermark=2)
    a = KnownSequence("a/0", list(range(16)), 8)
    assert rules.can_admit([a], PrefixHit(), 16) is AllocStatus.OK
    start(rules, prompt("b/0", [9]))
    assert rules.can_admit([a], PrefixHit(), 4) is AllocStatus.OK
    assert rules.can_admit([a], PrefixHit(), 5) is AllocStatus.LATER
    assert rules.can_admit([KnownSequence("c/0", list(range(17)), 8)], PrefixHit(), 17) is AllocStatus.NEVER


def test_hits_relieve_the_need() -> None:
    """R134, R51: blocks of a referenced prefix need not be free; a prompt that no pool can hold is never admitted."""
    rules = make(5)
    start(rules, prompt("a/0", range(16)))
    b = prompt("b/0", range(16))
    assert rules.can_admit([b], PrefixHit(), 16) is AllocStatus.LATER
    assert rules.can_admit([prompt("c/0", range(20))], PrefixHit(), 20, num_lookahead=1) is AllocStatus.NEVER
    assert start(rules, b).num_tokens == 12
    assert rules.num_free_gpu == 0


# --- swap ------------------------------------------------------------------------------------------------------------


def test_a_group_moves_with_all_that_it_shares() -> None:
    """R73, R74, R104: every block moves, a shared one once, ids count from zero per device; back it is as it was."""
    rules = make(caching=False)
    group = two_samples(rules)
    group.append(fork(rules, group[0], "a/2"))
    go_on(rules, group[0])
    assert [rules.ledger.tables[s.name] for s in group] == [[1, 3], [1, 2], [1, 2]]
    assert rules.swap_out(group) == [(1, 0), (3, 1), (2, 2)]
    assert rules.ledger.host_tables == {"a/0": [0, 1], "a/1": [0, 2], "a/2": [0, 2]}
    assert rules.ledger.cpu.refs[:3] == [3, 1, 2]
    assert (rules.num_free_gpu, rules.ledger.tables) == (20, {})
    assert not integrity.check(rules.ledger)
    pairs = rules.swap_in(group)
    assert [host for host, _ in pairs] == [0, 1, 2]
    assert list(rules.ledger.tables.values()) == [[dict(pairs)[b] for b in t] for t in ([0, 1], [0, 2], [0, 2])]
    assert (rules.num_free_cpu, rules.num_free_gpu, rules.ledger.host_tables) == (20, 17, {})
    assert not integrity.check(rules.ledger)


def test_the_host_needs_room_for_distinct_blocks() -> None:
    """R72, R204: two samples that share 2 blocks need 2 host blocks, not 4."""
    rules = make(num_host=2, caching=False)
    group = two_samples(rules)
    assert rules.can_swap_out(group)
    go_on(rules, group[0])
    assert not rules.can_swap_out(group)


def test_a_group_comes_back_when_it_can_go_on() -> None:
    """R69, R72: 1 shared full and 1 shared partial block, a copy of that for the second writer: 3 blocks, exactly."""
    rules = make(6, caching=False)
    group = two_samples(rules)
    for sample in group:
        sample.token_ids.append(9)
    rules.swap_out(group)
    start(rules, prompt("b/0", range(12)))
    assert rules.can_swap_in(group) is AllocStatus.OK
    assert rules.can_swap_in(group, num_lookahead=2) is AllocStatus.LATER
    start(rules, prompt("c/0", [1]))
    assert rules.can_swap_in(group) is AllocStatus.LATER
    assert rules.can_swap_in(group, num_lookahead=9) is AllocStatus.NEVER


def test_it_comes_back_behind_the_watermark_unless_the_device_is_empty() -> None:
    """R52, R72: with another on the device 2 blocks must stay free; alone it may take the last."""
    rules = make(4, caching=False, watermark=2)
    a = KnownSequence("a/0", list(range(12)), 4)
    start(rules, a)
    rules.swap_out([a])
    assert rules.can_swap_in([a]) is AllocStatus.OK
    start(rules, prompt("b/0", [1]))
    assert rules.can_swap_in([a]) is AllocStatus.LATER
    rules.release(prompt("b/0", [1]))
    a.token_ids += range(12, 17)
    assert rules.can_swap_in([a]) is AllocStatus.NEVER


def test_full_blocks_that_the_device_still_holds_are_not_copied() -> None:
    """R72, R74: of 2 full and 1 partial block only the partial one moves back; overwritten ones do; others find all."""
    rules = make(4)
    a = prompt("a/0", range(10))
    start(rules, a)
    old = list(rules.ledger.tables["a/0"])
    rules.swap_out([a])
    [(host, _)] = rules.swap_in([a])
    assert (host, rules.ledger.tables["a/0"][:2]) == (2, old[:2])
    assert not integrity.check(rules.ledger)
    rules.swap_out([a])
    b = prompt("b/0", range(50, 65))
    start(rules, b)
    assert rules.can_swap_in([a]) is AllocStatus.LATER
    rules.release(b)
    assert len(rules.swap_in([a])) == 3
    assert rules.lookup(prompt("c/0", range(10))).block_ids == tuple(rules.ledger.tables["a/0"][:2])


def test_what_the_device_still_holds_is_exactly_what_is_not_needed() -> None:
    """R72, R136: of 3 blocks 2 are known: held by another they cost nothing, free ones cost themselves."""
    rules = make(4)
    a, alike = prompt("a/0", range(10)), prompt("b/0", range(10))
    start(rules, a)
    rules.swap_out([a])
    start(rules, alike)
    assert rules.num_free_gpu == 1
    assert rules.can_swap_in([a]) is AllocStatus.OK
    rules.release(alike)
    start(rules, prompt("c/0", range(50, 56)))
    assert (rules.num_free_gpu, rules.lookup(a).num_tokens) == (2, 8)
    assert rules.can_swap_in([a]) is AllocStatus.LATER


def test_free_blocks_that_are_kept_are_not_overwritten_on_the_way_back() -> None:
    """R74, R137: the block of the second sample is next in the free queue when the first needs one; it is passed over."""
    rules = make(4)
    group = two_samples(rules, 4)
    for i, sample in enumerate(group):
        for token in range(10 * i, 10 * i + 4):
            go_on(rules, sample, token)
    assert [rules.ledger.tables[s.name] for s in group] == [[1, 2], [1, 3]]
    rules.swap_out(group)
    b = prompt("b/0", range(50, 55))
    start(rules, b)
    assert rules.ledger.tables["b/0"] == [4, 2]
    rules.release(b)
    assert next(iter(rules.ledger.gpu.free_blocks)) == 3
    assert rules.swap_in(group) == [(1, 2)]
    assert [rules.ledger.tables[s.name] for s in group] == [[1, 2], [1, 3]]
    assert not integrity.check(rules.ledger)


def test_tokens_in_flight_are_not_taken_for_known() -> None:
    """R151: a block that a result has yet to confirm is copied back, not looked up, and not to be found after that."""
    rules = make(3, caching=True)
    a = prompt("a/0", range(8))
    start(rules, a)
    a.num_placeholders = 1
    rules.swap_out([a])
    assert [host for host, _ in rules.swap_in([a])] == [1]
    rules.swap_out([a])
    other = prompt("b/0", range(50, 62))
    start(rules, other)
    rules.release(other)
    assert len(rules.swap_in([a])) == 2
    assert rules.lookup(prompt("c/0", range(9))).num_tokens == 4


def test_room_is_needed_for_the_tokens_in_flight() -> None:
    """R69, R151: 2 full blocks and a token on its way need 3 blocks to come back to."""
    rules = make(3, caching=False)
    a = prompt("a/0", range(8))
    start(rules, a)
    rules.swap_out([a])
    start(rules, prompt("b/0", [1]))
    assert rules.can_swap_in([a]) is AllocStatus.OK
    a.num_placeholders = 1
    assert rules.can_swap_in([a]) is AllocStatus.LATER


def test_blocks_on_the_host_are_given_back_too() -> None:
    """R97, R103, R17: the end of a swapped sequence frees its host blocks, a shared one with its last owner."""
    rules = make()
    group = two_samples(rules)
    rules.swap_out(group)
    rules.release(group[0])
    assert rules.num_free_cpu == 18
    rules.release(group[1])
    rules.release(group[1])
    assert (rules.num_free_cpu, rules.num_free_gpu) == (20, 20)
