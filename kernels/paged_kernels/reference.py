"""Reference backend: plain torch, one sequence at a time, gathering whole contexts.

The other backends are tested against it.

Block layout: [block_size, kv_heads, head_dim] for keys and for values.
"""

import itertools

import torch

from paged_kernels.backend import TORCH_BLOCKS, AttentionBatch, AttentionRule, CacheShape


class ReferenceBackend:
    """Plain torch on any device. Not invariant: matrix products choose their order by shape."""

    name = "reference"
    invariant = False
    blocks = TORCH_BLOCKS

    def write_kv(
        self, key: torch.Tensor, value: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor, shape: CacheShape
    ) -> None:
        """See KernelBackend."""
        kept = slots >= 0
        flat = _tokens(cache, shape)
        flat[0, slots[kept]] = key[kept]
        flat[1, slots[kept]] = value[kept]

    def paged_attention(
        self, query: torch.Tensor, cache: torch.Tensor, batch: AttentionBatch, shape: CacheShape, rule: AttentionRule
    ) -> torch.Tensor:
        """See KernelBackend. Scores, softmax and sums are in float32."""
        out = torch.zeros_like(query, memory_format=torch.contiguous_format)
        offsets = batch.offsets.tolist()
        for start, end in itertools.pairwise(offsets):
            if start == end:
                continue
            rows, positions = slice(start, end), batch.positions[start:end].long()
            table = batch.block_tables[int(batch.sequences[start])].long()
            first = max(0, int(positions[0]) - rule.sliding_window + 1) if rule.sliding_window is not None else 0
            places = torch.arange(first, int(positions[-1]) + 1, device=table.device)
            slots = table[places // shape.block_size] * shape.block_size + places % shape.block_size
            keys, values = _tokens(cache, shape)[:, slots].float()
            out[rows] = _attend(query[rows].float(), keys, values, positions - first, rule).to(query.dtype)
        return out


def _tokens(cache: torch.Tensor, shape: CacheShape) -> torch.Tensor:
    return cache.view(2, -1, shape.num_kv_heads, shape.head_dim)


def _attend(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, positions: torch.Tensor, rule: AttentionRule
) -> torch.Tensor:
    group = query.shape[1] // keys.shape[1]
    keys, values = keys.repeat_interleave(group, dim=1), values.repeat_interleave(group, dim=1)
    scores = torch.einsum("qhd,khd->hqk", query, keys) * rule.scale
    if rule.softcap is not None:
        scores = torch.tanh(scores / rule.softcap) * rule.softcap
    distance = positions[:, None] - torch.arange(len(keys), device=query.device)[None, :]
    hidden = distance < 0
    if rule.sliding_window is not None:
        hidden |= distance >= rule.sliding_window
    weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
    return torch.einsum("hqk,khd->qhd", weights, values)
