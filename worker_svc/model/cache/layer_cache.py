"""Where each layer finds its keys and values in the pool, whose layers may differ in shape.

A pool's block has room for the widest layer at each index. Narrower layers share an index: each has an equal part of the room, so
that a block is several smaller blocks of theirs, one after the other, and kernels see a pool of their own shape.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch

from paged_kernels.backend import AttentionBatch, AttentionRule, CacheShape
from svc_common.errors import ConfigError
from worker_svc.model.cache.cache_groups import LayerPlace

_MOST_PARTS = 16


@dataclass(frozen=True, slots=True)
class LayerCache:
    """Where a layer finds keys and values, and by which rule it attends to them. `rule`: a probe's, of which windows, chunks
    and sinks are used. `writes`: false if an earlier layer has written them.
    """

    place: LayerPlace
    shape: CacheShape
    rule: AttentionRule
    writes: bool

    def part_of(self, pool: torch.Tensor) -> torch.Tensor:
        """The layer's part of a pool: [2, blocks, block_elements] of its shape."""
        at, parts = pool[self.place.index], self.place.num_parts
        return at if parts == 1 else at.view(2, at.shape[1] * parts, at.shape[2] // parts)


def of_part(batch: AttentionBatch, part: int, num_parts: int, block_size: int) -> AttentionBatch:
    """The same tokens in one of the equal parts of each block, which count as `num_parts` blocks one after the other."""
    blocks, offsets = batch.slots // block_size, batch.slots % block_size
    slots = torch.where(batch.slots < 0, batch.slots, (blocks * num_parts + part) * block_size + offsets)
    return replace(batch, slots=slots, block_tables=batch.block_tables * num_parts + part, plans={})


def common_cache(shapes: Mapping[int, CacheShape], dtype: torch.dtype) -> tuple[CacheShape, dict[int, int]]:
    """The shape of a pool's blocks for layers of these shapes, and the number of parts of the layers that share an index.

    Raises ConfigError if no block divides into parts for all of them: with scales, parts of half the heads are more than half as
    large.
    """
    widest = max(shapes.values(), key=lambda shape: shape.block_elements(dtype))
    room = math.lcm(*(shape.block_elements(dtype) for shape in shapes.values()))
    num_parts = {layer: room // shape.block_elements(dtype) for layer, shape in shapes.items()}
    if max(num_parts.values()) > _MOST_PARTS:
        sizes = ", ".join(sorted({f"{shape.num_kv_heads} x {shape.head_dim}" for shape in shapes.values()}))
        raise ConfigError(
            f"the model's layers have caches of different shapes (kv heads x elements: {sizes}), which do not divide one "
            f"another with --kv-cache-dtype {str(dtype).removeprefix('torch.')}: use --kv-cache-dtype auto",
            reason="CACHE_SHAPES",
        )
    times = room // widest.block_elements(dtype)
    pool = replace(widest, num_kv_heads=widest.num_kv_heads * times)
    return pool, {layer: parts for layer, parts in num_parts.items() if parts > 1}
