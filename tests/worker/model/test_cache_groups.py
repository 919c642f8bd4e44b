"""Which layers share block tables, and what a sequence then holds: against the closed form of each model's windows."""

import itertools

import pytest

from block_manager.rules.grouped_rules import GroupedRules
from tests.support.windowed_shapes import SHAPES
from worker_svc.model.cache.cache_groups import FULL, CacheGroups, groups_of, one_group

BLOCK_SIZE = 16
LONGEST = 32_768


def blocks_in_windows(of_layers: dict[int, int | None], num_tokens: int) -> int:
    """Blocks of single layers that a decoding sequence of so many tokens needs: no fewer hold what its next tokens read."""
    whole = -(-num_tokens // BLOCK_SIZE)
    return sum(whole if w is None else min(whole, -(-(w - 1) // BLOCK_SIZE) + 1) for w in of_layers.values())


@pytest.mark.parametrize("name", SHAPES)
def test_memory_is_within_five_percent_of_the_windows(name, record_property):
    """At every length; beside it, how many such requests fit at once where one table for all layers holds one."""
    of_layers = SHAPES[name]
    groups = groups_of(of_layers, BLOCK_SIZE, LONGEST)
    assert sorted(itertools.chain(*groups.layers)) == sorted(of_layers)
    assert all(
        of_layers[layer] == (w or None) for w, each in zip(groups.windows, groups.layers, strict=True) for layer in each
    )
    fits = {}
    for num_tokens in (1, 100, 500, 1_000, 2_000, 4_000, 8_000, 16_000, LONGEST):
        held = groups.num_blocks(num_tokens, BLOCK_SIZE) * groups.num_layers
        assert held <= 1.05 * blocks_in_windows(of_layers, num_tokens)
        fits[num_tokens] = -(-num_tokens // BLOCK_SIZE) * len(of_layers) / held
    assert fits[LONGEST] > 1.5
    shown = ", ".join(f"{num_tokens}: {ratio:.2f}" for num_tokens, ratio in fits.items() if num_tokens >= 1_000)
    record_property(
        "size",
        f"{name}: {len(groups.windows)} groups of {groups.num_layers} layers; requests at once, by tokens: {shown}",
    )


def test_groups_have_equally_many_layers_whole_sequences_first():
    groups = groups_of(SHAPES["gpt-oss-20b"], BLOCK_SIZE, LONGEST)
    assert groups.windows == (FULL, 128)
    assert groups.layers == (tuple(range(1, 24, 2)), tuple(range(0, 24, 2)))
    assert groups.places[5] == (0, 2)
    assert groups.places[4] == (1, 2)
    # 22 windowed layers and 4 others: no larger common size leaves less than 5 % unused.
    assert {len(each) for each in groups_of(SHAPES["gemma-3-1b"], BLOCK_SIZE, LONGEST).layers} == {2}


@pytest.mark.parametrize("block_size", [1, 4, 16, 48])
def test_worker_and_scheduler_count_the_same_blocks(block_size):
    """The worker's limits of lengths are those of the ledger that takes the blocks."""
    sizes = {"block_size": block_size, "num_gpu_blocks": 1, "num_cpu_blocks": 1, "max_model_len": 200}
    scheduled = GroupedRules.make([None, 24, 33], **sizes, prefix_caching=False, num_ahead_tokens=1).ledger
    groups = CacheGroups((FULL, 24, 33), ((0,), (1,), (2,)))
    for num_tokens in range(1, 200):
        assert groups.num_blocks(num_tokens, block_size) == scheduled.blocks_for(num_tokens)


def test_more_windows_than_groups_are_wanted_are_served():
    """Each window needs a group of its own, however many there are."""
    groups = groups_of({layer: layer + 2 for layer in range(40)}, BLOCK_SIZE, LONGEST)
    assert len(groups.windows) == 40


def test_equal_windows_are_one_group():
    assert groups_of({0: 24, 1: 24}, BLOCK_SIZE, 64) == one_group([0, 1])
    assert groups_of({3: None, 4: None}, BLOCK_SIZE, 64) == one_group([3, 4])


def test_windows_that_cover_the_longest_sequence_are_none():
    assert groups_of({0: 64, 1: None}, BLOCK_SIZE, 64) == one_group([0, 1])
    assert len(groups_of({0: 63, 1: None}, BLOCK_SIZE, 64).windows) == 2


def test_the_longest_sequence_fills_the_blocks():
    """`longest` is the inverse of `num_blocks`."""
    for groups in (
        one_group([0]),
        CacheGroups((FULL, 24), ((0,), (1,))),
        CacheGroups((FULL, 24, 24), ((0,), (1,), (2,))),
    ):
        for num_blocks in range(40):
            longest = groups.longest(num_blocks, 4, 100)
            assert groups.num_blocks(longest, 4) <= num_blocks
            assert longest == 100 or groups.num_blocks(longest + 1, 4) > num_blocks
