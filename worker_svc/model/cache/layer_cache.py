"""Where each layer finds its keys and values in a pool for layers that may differ in shape.

A pool has one shape of blocks. A layer with more kv heads than that is several layers of the pool, each with some of its heads.
Where heads do not divide, several narrow layers are one layer of the pool, each with an equal part of its blocks: a block is then
several smaller blocks one after the other, and kernels see a pool of the narrow shape.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from paged_kernels.backend import AttentionBatch, AttentionRule, CacheShape
from svc_common.errors import ConfigError
from worker_svc.model.cache.cache_groups import LayerPlace

_MOST_PARTS = 16


class Spot(NamedTuple):
    """A layer of the pool, and which of its equal parts; `num_parts` 1: all of it."""

    pool_layer: int
    part: int = 0
    num_parts: int = 1


@dataclass(frozen=True, slots=True)
class PoolLayers:
    """The shape of a pool's blocks, the window of each of its layers, and where in it each layer of the model is.

    A layer's spots have equally many of its kv heads, in order. A pool for layers of one shape has their numbers.
    """

    shape: CacheShape
    windows: Mapping[int, int | None]
    spots: Mapping[int, Sequence[Spot]]


def pool_layers(shapes: Mapping[int, CacheShape], windows: Mapping[int, int | None], dtype: torch.dtype) -> PoolLayers:
    """A pool for layers of these shapes with these windows (None = the whole sequence).

    Raises ConfigError if there is none: numbers with scales, for example, are more than twice as large for heads that are twice
    as many and half as wide.
    """
    if len({*shapes.values()}) == 1:
        return PoolLayers(next(iter(shapes.values())), dict(windows), {layer: [Spot(layer)] for layer in shapes})
    sizes = {layer: shape.block_elements(dtype) for layer, shape in shapes.items()}
    narrow, wide = (find(shapes, key=sizes.__getitem__) for find in (min, max))
    cuts = {layer: size / sizes[narrow] for layer, size in sizes.items()}
    if all(
        count <= _MOST_PARTS and count.is_integer() and shapes[layer].num_kv_heads % count == 0
        for layer, count in cuts.items()
    ):
        return _cut(shapes[narrow], {layer: int(count) for layer, count in cuts.items()}, windows)
    sharing = {layer: sizes[wide] / size for layer, size in sizes.items()}
    if all(count <= _MOST_PARTS and count.is_integer() for count in sharing.values()):
        return _shared(shapes[wide], {layer: int(count) for layer, count in sharing.items()}, windows)
    found = ", ".join(sorted({f"{shape.num_kv_heads} x {shape.head_dim}" for shape in shapes.values()}))
    raise ConfigError(
        f"the model's layers have caches of different shapes (kv heads x elements: {found}), which do not divide one another "
        f"with --kv-cache-dtype {str(dtype).removeprefix('torch.')}: use --kv-cache-dtype auto",
        reason="CACHE_SHAPES",
    )


def _cut(shape: CacheShape, cuts: Mapping[int, int], windows: Mapping[int, int | None]) -> PoolLayers:
    """Each layer is as many layers of the pool as `cuts` says."""
    spots: dict[int, list[Spot]] = {}
    of_pool: dict[int, int | None] = {}
    for layer, count in cuts.items():
        spots[layer] = [Spot(number) for number in range(len(of_pool), len(of_pool) + count)]
        of_pool |= {spot.pool_layer: windows[layer] for spot in spots[layer]}
    return PoolLayers(shape, of_pool, spots)


def _shared(shape: CacheShape, sharing: Mapping[int, int], windows: Mapping[int, int | None]) -> PoolLayers:
    """As many layers with the same window as `sharing` says are in one layer of the pool."""
    spots: dict[int, list[Spot]] = {}
    of_pool: dict[int, int | None] = {}
    kinds: dict[tuple[int | None, int], list[int]] = {}
    for layer, count in sharing.items():
        kinds.setdefault((windows[layer], count), []).append(layer)
    for (window, count), layers in kinds.items():
        for place, layer in enumerate(layers):
            if place % count == 0:
                of_pool[len(of_pool)] = window
            spots[layer] = [Spot(len(of_pool) - 1, place % count, count)]
    return PoolLayers(shape, of_pool, spots)


@dataclass(frozen=True, slots=True)
class LayerCache:
    """Where a layer, or some of its kv heads, find keys and values, and by which rule they attend to them.

    `rule`: a probe's, of which windows, chunks and sinks are used. `writes`: false if an earlier layer has written them.
    `place`: of the pool's layer in which `spot` is.
    """

    place: LayerPlace
    shape: CacheShape
    rule: AttentionRule
    writes: bool
    spot: Spot

    def part_of(self, pool: torch.Tensor) -> torch.Tensor:
        """The part of a pool: [2, blocks, block_elements] of its shape."""
        at, count = pool[self.place.index], self.spot.num_parts
        return at if count == 1 else at.view(2, at.shape[1] * count, at.shape[2] // count)


def of_part(batch: AttentionBatch, part: int, num_parts: int, block_size: int) -> AttentionBatch:
    """The same tokens in one of the equal parts of each block, which count as `num_parts` blocks one after the other."""
    blocks, offsets = batch.slots // block_size, batch.slots % block_size
    slots = torch.where(batch.slots < 0, batch.slots, (blocks * num_parts + part) * block_size + offsets)
    return replace(batch, slots=slots, block_tables=batch.block_tables * num_parts + part, plans={})
