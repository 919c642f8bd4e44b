"""Cache groups: layers with the same attention window, which have block tables of their own.

All groups have equally many layers, so that a block, of one group's layers, is equally large whichever group takes it, and all
take theirs from one pool; a group with too few layers leaves a part of its blocks unused. As vLLM's hybrid KV cache manager.
Layers of a narrower shape count as parts of one: several of them have one index in the pool.
"""

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import NamedTuple

FULL = 0
"""The window of layers that attend to the whole sequence."""
_MOST_UNUSED = 0.05
_MOST_GROUPS = 32


class LayerPlace(NamedTuple):
    """Where a layer's keys and values are: its cache group, its index in the pool's first dimension, and which of the equal
    parts there.
    """

    group: int
    index: int
    part: int = 0
    num_parts: int = 1


@dataclass(frozen=True, slots=True)
class CacheGroups:
    """Layers by group, in order, and each group's window in tokens, FULL = the whole sequence.

    `num_parts`: of narrower layers, how many of them have one index in the pool.
    """

    windows: tuple[int, ...]
    layers: tuple[tuple[int, ...], ...]
    num_parts: Mapping[int, int] = field(default_factory=dict)

    @property
    def num_layers(self) -> int:
        """Layers of a block, parts counted as one, and the pool's first dimension; no group has more."""
        return max(1 + max(place.index for place in self._places(group)) for group in range(len(self.layers)))

    @property
    def places(self) -> dict[int, LayerPlace]:
        """Where each layer's keys and values are."""
        found: dict[int, LayerPlace] = {}
        for group, layers in enumerate(self.layers):
            found |= zip(self._in_order(layers), self._places(group), strict=True)
        return found

    def num_used(self, group: int) -> float:
        """Layers of a group, parts counted as parts."""
        return sum(1 / self.num_parts.get(layer, 1) for layer in self.layers[group])

    def _in_order(self, layers: Sequence[int]) -> list[int]:
        return sorted(layers, key=lambda layer: (self.num_parts.get(layer, 1), layer))

    def _places(self, group: int) -> Iterator[LayerPlace]:
        first = 0
        for num_parts, layers in groupby(self.num_parts.get(layer, 1) for layer in self._in_order(self.layers[group])):
            count = len(list(layers))
            yield from (LayerPlace(group, first + i // num_parts, i % num_parts, num_parts) for i in range(count))
            first += -(-count // num_parts)

    def num_blocks(self, num_tokens: int, block_size: int) -> int:
        """Blocks of a decoding sequence of so many tokens, in all groups."""
        return sum(_num_blocks(window, num_tokens, block_size) for window in self.windows)

    def longest(self, num_blocks: int, block_size: int, most: int) -> int:
        """Tokens, up to `most`, of the longest sequence that so many blocks hold."""
        lengths = range(0, most + block_size, block_size)
        return min(most, lengths[bisect_right(lengths, num_blocks, key=lambda n: self.num_blocks(n, block_size)) - 1])


def one_group(layers: Sequence[int], num_parts: Mapping[int, int] | None = None) -> CacheGroups:
    """One block table for all layers: blocks behind a window are kept if a layer attends to the whole sequence."""
    return CacheGroups((FULL,), (tuple(layers),), num_parts or {})


_Kinds = Mapping[tuple[int, int], list[int]]
"""Layers by window and number of parts."""


def groups_of(
    windows: Mapping[int, int | None], block_size: int, max_model_len: int, num_parts: Mapping[int, int] | None = None
) -> CacheGroups:
    """The groups of layers with these windows (None = the whole sequence); one if all windows are the same.

    Their size is the largest for which at most 5 % of the blocks' memory is unused, whatever a sequence's length: fewer
    groups have fewer tables. A window that covers the longest sequence is none. `num_parts`: as in CacheGroups.
    """
    parts = num_parts or {}
    kinds: dict[tuple[int, int], list[int]] = {}
    for layer, window in sorted(windows.items()):
        in_force = FULL if window is None or window >= max_model_len else window
        kinds.setdefault((in_force, parts.get(layer, 1)), []).append(layer)
    found = {window for window, _ in kinds}
    if len(found) == 1:
        return one_group(sorted(windows), parts)
    sizes = range(max(-(-len(layers) // count) for (_, count), layers in kinds.items()), 0, -1)
    most = max(_MOST_GROUPS, len(kinds))
    candidates = [made for size in sizes if len((made := _divided(kinds, size, parts)).layers) <= most]
    lengths = {min(max_model_len, max(found)), max_model_len}
    unused = [max(_share_unused(made, length, block_size) for length in lengths) for made in candidates]
    return next(
        (made for made, share in zip(candidates, unused, strict=True) if share <= _MOST_UNUSED),
        candidates[unused.index(min(unused))],
    )


def _divided(kinds: _Kinds, size: int, num_parts: Mapping[int, int]) -> CacheGroups:
    """Groups of up to `size` layers, parts counted as one; whole-sequence ones first."""
    divided = [
        (window, layers[i : i + size * count])
        for (window, count), layers in sorted(kinds.items())
        for i in range(0, len(layers), size * count)
    ]
    return CacheGroups(tuple(window for window, _ in divided), tuple(tuple(layers) for _, layers in divided), num_parts)


def _share_unused(made: CacheGroups, num_tokens: int, block_size: int) -> float:
    """Memory of a sequence's blocks that no layer uses, relative to what its layers use."""
    held = [_num_blocks(window, num_tokens, block_size) for window in made.windows]
    used = sum(count * made.num_used(group) for group, count in enumerate(held))
    return sum(held) * made.num_layers / used - 1


def _num_blocks(window: int, num_tokens: int, block_size: int) -> int:
    whole = -(-num_tokens // block_size)
    # As the scheduler counts (block_manager/rules/cache_groups): a window begins anywhere in a block.
    return whole if window == FULL else min(whole, -(-(window - 1) // block_size) + 1)
