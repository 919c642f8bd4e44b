"""Reference backend: plain torch, one sequence at a time, gathering whole contexts.

The other backends are tested against it.

Block layout: [block_size, kv_heads, head_elements] for keys and for values.
"""

import itertools

import torch

from paged_kernels.backend import SCALED_MOST, TORCH_BLOCKS, AttentionBatch, AttentionRule, CacheShape, scale_bytes

_LEAST = 1e-30


def stored(heads: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """What a cache of `dtype` holds of keys or values [..., head_dim]: [..., head_elements].

    int8 and float8_e4m3fn: the numbers of that type nearest to x / scale, ties to even, then the bytes of the
    scale, a float32: the largest magnitude / 127 (int8), / 448 (E4M3). So an element is off by at most scale / 2 (int8),
    by a sixteenth of itself or scale / 1024 (E4M3). The scale is NaN if an element is not finite; heads below 1e-30
    become zero.
    """
    if dtype not in SCALED_MOST:
        return heads
    size = heads.abs().amax(-1, keepdim=True)
    used = size.isfinite() & (size > _LEAST)
    most = torch.full_like(size, SCALED_MOST[dtype])  # torch rounds number / tensor twice
    scale = torch.where(used, size / most, torch.where(size.isfinite(), 0.0, torch.nan))
    factor = torch.where(used, most / size, 0.0)
    return torch.cat([_numbers(heads, factor, dtype), scale.view(dtype)], -1)


def _numbers(heads: torch.Tensor, factor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Integers of the exact products; E4M3 numbers of those rounded to float32."""
    if dtype == torch.int8:
        return (heads.double() * factor.double()).round().nan_to_num().to(dtype)
    return (heads * factor).nan_to_num(posinf=0.0, neginf=0.0).to(dtype)


def loaded(elements: torch.Tensor) -> torch.Tensor:
    """Keys or values [..., head_dim] in float32, from what `stored` made of them."""
    numbers, scale = elements.split([elements.shape[-1] - scale_bytes(elements.dtype), scale_bytes(elements.dtype)], -1)
    return numbers.float() * scale.contiguous().view(torch.float32) if scale.shape[-1] else numbers.float()


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
        flat[0, slots[kept]] = stored(key[kept], cache.dtype)
        flat[1, slots[kept]] = stored(value[kept], cache.dtype)

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
            firsts = rule.first_keys(positions)
            first = int(firsts[0])
            places = torch.arange(first, int(positions[-1]) + 1, device=table.device)
            slots = table[places // shape.block_size] * shape.block_size + places % shape.block_size
            keys, values = loaded(_tokens(cache, shape)[:, slots])
            out[rows] = _attend(query[rows].float(), keys, values, positions - first, firsts - first, rule).to(
                query.dtype
            )
        return out


def _tokens(cache: torch.Tensor, shape: CacheShape) -> torch.Tensor:
    return cache.view(2, -1, shape.num_kv_heads, shape.head_elements(cache.dtype))


def _attend(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    positions: torch.Tensor,
    firsts: torch.Tensor,
    rule: AttentionRule,
) -> torch.Tensor:
    """`positions`, `firsts`: places of each query's own key and of the first that it sees."""
    group = query.shape[1] // keys.shape[1]
    keys, values = keys.repeat_interleave(group, dim=1), values.repeat_interleave(group, dim=1)
    scores = torch.einsum("qhd,khd->hqk", query, keys) * rule.scale
    if rule.softcap is not None:
        scores = torch.tanh(scores / rule.softcap) * rule.softcap
    places = torch.arange(len(keys), device=query.device)
    hidden = (places > positions[:, None]) | (places < firsts[:, None])
    scores = scores.masked_fill(hidden, float("-inf"))
    if rule.sinks is not None:
        sinks = rule.sinks[:, None, None].expand(-1, len(query), 1)
        weights = torch.cat([scores, sinks], -1).softmax(-1)[..., :-1]
    else:
        weights = scores.softmax(-1)
    return torch.einsum("hqk,khd->qhd", weights, values)
