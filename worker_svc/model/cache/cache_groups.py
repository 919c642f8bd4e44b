"""Cache groups: layers with the same attention window, which have block tables of their own.

All groups have equally many layers, so that a block, of one group's layers, is equally large whichever group takes it, and
all take theirs from one pool; a group with too few layers leaves a part of its blocks unused. As vLLM's hybrid KV cache manager.
"""

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

FULL = 0
"""The window of layers that attend to the whole sequence."""
_MOST_UNUSED = 0.05
_MOST_GROUPS = 32


class LayerPlace(NamedTuple):
    """Where a layer's keys and values are: its cache group, and its index in the pool's first dimension."""

    group: int
    index: int


@dataclass(frozen=True, slots=True)
class CacheGroups:
    """Layers by group, in order, and each group's window in tokens, FULL = the whole sequence.

    `num_layers`: of a block, and of the pool's first dimension; no group has more.
    """

    windows: tuple[int, ...]
    layers: tuple[tuple[int, ...], ...]

    @property
    def num_layers(self) -> int:
        """See the class."""
        return max(map(len, self.layers))

    @property
    def places(self) -> dict[int, LayerPlace]:
        """Where each layer's keys and values are."""
        return {
            layer: LayerPlace(group, index)
            for group, layers in enumerate(self.layers)
            for index, layer in enumerate(layers)
        }

    def num_blocks(self, num_tokens: int, block_size: int) -> int:
        """Blocks of a decoding sequence of so many tokens, in all groups."""
        return sum(_num_blocks(window, num_tokens, block_size) for window in self.windows)

    def longest(self, num_blocks: int, block_size: int, most: int) -> int:
        """Tokens, up to `most`, of the longest sequence that so many blocks hold."""
        lengths = range(0, most + block_size, block_size)
        return min(most, lengths[bisect_right(lengths, num_blocks, key=lambda n: self.num_blocks(n, block_size)) - 1])


def one_group(layers: Sequence[int]) -> CacheGroups:
    """One block table for all layers: blocks behind a window are kept if a layer attends to the whole sequence."""
    return CacheGroups((FULL,), (tuple(layers),))


def groups_of(windows: Mapping[int, int | None], block_size: int, max_model_len: int) -> CacheGroups:
    """The groups of layers with these windows (None = the whole sequence); one if all windows are the same.

    Their size is the largest for which at most 5 % of the blocks' memory is unused, whatever a sequence's length: fewer
    groups have fewer tables. A window that covers the longest sequence is none.
    """
    kinds: dict[int, list[int]] = {}
    for layer, window in sorted(windows.items()):
        in_force = FULL if window is None or window >= max_model_len else window
        kinds.setdefault(in_force, []).append(layer)
    if len(kinds) == 1:
        return one_group(sorted(windows))
    sizes = range(max(map(len, kinds.values())), 0, -1)
    most = max(_MOST_GROUPS, len(kinds))
    candidates = [made for size in sizes if len((made := _divided(kinds, size)).layers) <= most]
    lengths = {min(max_model_len, max(kinds)), max_model_len}
    unused = [max(_share_unused(made, length, block_size) for length in lengths) for made in candidates]
    return next(
        (made for made, share in zip(candidates, unused, strict=True) if share <= _MOST_UNUSED),
        candidates[unused.index(min(unused))],
    )


def _divided(kinds: Mapping[int, list[int]], size: int) -> CacheGroups:
    """Groups of up to `size` layers; whole-sequence ones first."""
    parts = [(w, layers[i : i + size]) for w, layers in sorted(kinds.items()) for i in range(0, len(layers), size)]
    return CacheGroups(tuple(window for window, _ in parts), tuple(tuple(layers) for _, layers in parts))


def _share_unused(made: CacheGroups, num_tokens: int, block_size: int) -> float:
    """Memory of a sequence's blocks that no layer uses, relative to what its layers use."""
    held = [_num_blocks(window, num_tokens, block_size) for window in made.windows]
    used = sum(count * len(layers) for count, layers in zip(held, made.layers, strict=True))
    return sum(held) * made.num_layers / used - 1


def _num_blocks(window: int, num_tokens: int, block_size: int) -> int:
    whole = -(-num_tokens // block_size)
    # As the scheduler counts (block_manager/rules/cache_groups): a window begins anywhere in a block.
    return whole if window == FULL else min(whole, -(-(window - 1) // block_size) + 1)
