"""Paged attention on CPU in plain torch, for machines without a compiler: online softmax over fixed tiles of keys.

Gathers one tile at a time, never the whole context. Tiles begin at the same multiples of TILE_KEYS in every
sequence and every sum runs within one row, in an order given by the tile alone, so results do not depend on
batch, chunking or placement. Block layout: keys [kv_heads, block_size, head_elements], values [kv_heads,
head_elements, block_size] (both sums run over the last axis).
"""

import torch

from paged_kernels.backend import TORCH_BLOCKS, AttentionBatch, AttentionRule, CacheShape
from paged_kernels.reference import loaded, stored

TILE_KEYS = 64
_MOST_ROWS = 64


class TiledCpuBackend:
    """Torch operators only, any dtype; several times slower than the compiled backend."""

    name = "cpu"
    invariant = True
    blocks = TORCH_BLOCKS

    def write_kv(
        self, key: torch.Tensor, value: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor, shape: CacheShape
    ) -> None:
        """See KernelBackend."""
        kept = slots >= 0
        blocks, offsets = slots[kept] // shape.block_size, slots[kept] % shape.block_size
        keys, values = _views(cache, shape)
        keys[blocks, :, offsets] = stored(key[kept], cache.dtype)
        values[blocks, :, :, offsets] = stored(value[kept], cache.dtype)

    def paged_attention(
        self, query: torch.Tensor, cache: torch.Tensor, batch: AttentionBatch, shape: CacheShape, rule: AttentionRule
    ) -> torch.Tensor:
        """See KernelBackend."""
        out = torch.zeros(query.shape, dtype=torch.float32)
        rows = (batch.slots >= 0).nonzero().squeeze(1)
        for part in rows.split(_MOST_ROWS):
            out[part] = _attend_rows(query[part].float(), cache, batch, part, shape, rule)
        return out.to(query.dtype)


def _views(cache: torch.Tensor, shape: CacheShape) -> tuple[torch.Tensor, torch.Tensor]:
    elements = shape.head_elements(cache.dtype)
    keys = cache[0].view(-1, shape.num_kv_heads, shape.block_size, elements)
    values = cache[1].view(-1, shape.num_kv_heads, elements, shape.block_size)
    return keys, values


class _Softmax:
    """Running softmax of some rows: highest score [n, h], sum of weights [n, h], weighted values [n, h, d]."""

    def __init__(self, rows: int, heads: int, head_dim: int) -> None:
        self.highest = torch.full((rows, heads), float("-inf"))
        self.total = torch.zeros(rows, heads)
        self.values = torch.zeros(rows, heads, head_dim)

    def add(self, active: torch.Tensor, scores: torch.Tensor, values: torch.Tensor) -> None:
        """Add `scores` [a, h, keys] and `values` [a, h, d, keys] of the rows `active` [a]."""
        before = self.highest[active]
        highest = torch.maximum(before, scores.amax(-1))
        keep = torch.exp(before - highest)
        weights = torch.exp(scores - highest[..., None])
        hidden = torch.isneginf(scores)
        # A hidden key's value may be anything, even NaN: it must not be multiplied, not even by zero.
        products = (weights[:, :, None] * values).masked_fill_(hidden[:, :, None], 0.0)
        self.highest[active] = highest
        self.total[active] = self.total[active] * keep + weights.sum(-1)
        self.values[active] = self.values[active] * keep[..., None] + products.sum(-1)


def _attend_rows(
    query: torch.Tensor,
    cache: torch.Tensor,
    batch: AttentionBatch,
    rows: torch.Tensor,
    shape: CacheShape,
    rule: AttentionRule,
) -> torch.Tensor:
    positions, tables = batch.positions[rows].long(), batch.block_tables[batch.sequences[rows].long()].long()
    first = rule.first_keys(positions)
    state = _Softmax(len(rows), query.shape[1], shape.head_dim)
    blocks_per_tile = -(-TILE_KEYS // shape.block_size)
    width = blocks_per_tile * shape.block_size
    for start in range(0, int(positions.max()) + 1, width):
        active = ((positions >= start) & (first < start + width)).nonzero().squeeze(1)
        if len(active):
            ids = _tile_ids(tables[active], start // shape.block_size, blocks_per_tile)
            keys, values = _gather(cache, ids, shape, query.shape[1])
            scores = _scores(query[active], keys, rule)
            at = torch.arange(start, start + width)
            hidden = (at > positions[active, None]) | (at < first[active, None])
            state.add(active, scores.masked_fill(hidden[:, None], float("-inf")), values)
    total = state.total if rule.sinks is None else state.total + torch.exp(rule.sinks - state.highest)
    return state.values / total[..., None]


def _tile_ids(tables: torch.Tensor, first: int, count: int) -> torch.Tensor:
    ids = tables[:, first : first + count]
    # Past the end of a table any block will do: its keys are hidden.
    return torch.nn.functional.pad(ids, (0, count - ids.shape[1])) if ids.shape[1] < count else ids


def _gather(cache: torch.Tensor, ids: torch.Tensor, shape: CacheShape, heads: int) -> tuple[torch.Tensor, torch.Tensor]:
    rows, group = len(ids), heads // shape.num_kv_heads
    keys, values = _views(cache, shape)
    keys = loaded(keys[ids]).transpose(1, 2).reshape(rows, shape.num_kv_heads, -1, shape.head_dim)
    values = loaded(values[ids].transpose(3, 4)).permute(0, 2, 4, 1, 3)
    values = values.reshape(rows, shape.num_kv_heads, shape.head_dim, -1)
    return keys.repeat_interleave(group, dim=1), values.repeat_interleave(group, dim=1)


def _scores(query: torch.Tensor, keys: torch.Tensor, rule: AttentionRule) -> torch.Tensor:
    scores = (query[:, :, None] * keys).sum(-1) * rule.scale
    return torch.tanh(scores / rule.softcap) * rule.softcap if rule.softcap is not None else scores
