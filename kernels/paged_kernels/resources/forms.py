"""The launches of a step, by shape: attention of a decoding sequence and of a prompt, moves of blocks, draws of tokens."""

from dataclasses import dataclass

import numpy as np
import torch

from paged_kernels.backend import AttentionBatch, AttentionRule, CacheShape, written_dtype
from paged_kernels.decoder import FixedColumns, KeptRows
from paged_kernels.gpu import row_kernels, token_draws
from paged_kernels.gpu.backend import TritonBackend
from paged_kernels.gpu.products import Products, pack_float8
from paged_kernels.gpu.tile_plan import Sharing
from paged_kernels.program import Embed, HeadNorm, Norm, RotateAndStore, Rows
from paged_kernels.quantized import FLOAT8, QuantizedWeight
from paged_kernels.resources.launches import Launch, launches

_H200 = Sharing(4 * 132, 32 * 1024)
_PROMPT = 100


@dataclass(frozen=True, slots=True)
class _Rows:
    """See DrawRows."""

    temperatures: torch.Tensor
    top_ks: torch.Tensor
    top_ps: torch.Tensor
    seeds: torch.Tensor
    sequence_indexes: torch.Tensor
    positions: torch.Tensor
    min_ps: torch.Tensor | None


def attention_launches(
    shape: CacheShape, group: int, dtype: torch.dtype, rule: AttentionRule, cache_dtype: torch.dtype | None = None
) -> list[Launch]:
    """What a step with a decoding sequence and a prompt launches for one layer.

    `group`: query heads of a kv head; `cache_dtype`: `dtype` by default.
    """
    cache_dtype = cache_dtype or dtype
    tokens = 1 + _PROMPT
    kv = torch.zeros(tokens, shape.num_kv_heads, shape.head_dim, dtype=dtype)
    batch = AttentionBatch(
        torch.zeros(tokens, dtype=torch.int32),
        torch.zeros(tokens, dtype=torch.int32),
        torch.zeros(tokens, dtype=torch.int64),
        torch.zeros(2, 16, dtype=torch.int32),
        np.array([0, 1, tokens], np.int32),
    )
    cache, backend = _cache(shape, cache_dtype), TritonBackend(_H200)
    with launches() as found:
        backend.write_kv(*[kv.to(written_dtype(cache_dtype))] * 2, cache, batch.slots, shape)
        backend.paged_attention(kv.repeat(1, group, 1), cache, batch, shape, rule)
    return found


def rotation_launches(
    shape: CacheShape, group: int, dtype: torch.dtype, cache_dtype: torch.dtype | None = None
) -> list[Launch]:
    """Rotation with the cache write, without norms of heads and with them."""
    tokens, heads = 4, group * shape.num_kv_heads
    ids = torch.zeros(tokens, dtype=torch.int64)
    batch = AttentionBatch(ids.int(), ids.int(), ids, torch.zeros(tokens, 16, dtype=torch.int32), np.arange(tokens + 1))
    angles, of_head = torch.zeros(64, shape.head_dim, dtype=dtype), torch.zeros(shape.head_dim, dtype=dtype)
    packed = torch.zeros(tokens, (heads + 2 * shape.num_kv_heads) * shape.head_dim, dtype=dtype)
    with launches() as found:
        for norm in (None, HeadNorm(of_head, of_head, 1e-5, one_plus=False)):
            op = RotateAndStore(0, angles, angles, norm)
            row_kernels.rotate_and_store(op, packed, heads, _cache(shape, cache_dtype or dtype), batch, shape)
    return found


def _cache(shape: CacheShape, dtype: torch.dtype) -> torch.Tensor:
    return torch.zeros(2, 8, shape.block_elements(dtype), dtype=dtype)


def decoder_launches(shape: CacheShape, group: int, dtype: torch.dtype, width: int) -> list[Launch]:
    """What one layer launches between its products and attention, for rows of this width; the lookup, and inputs of a step."""
    tokens = 4
    ids = torch.zeros(tokens, dtype=torch.int64)
    batch = AttentionBatch(ids.int(), ids.int(), ids, torch.zeros(tokens, 16, dtype=torch.int32), np.arange(tokens + 1))
    rows, weight = torch.zeros(tokens, width, dtype=dtype), torch.zeros(width, dtype=dtype)
    with launches() as found:
        row_kernels.embed(Embed(rows, 1.0), ids)
        row_kernels.norm(Norm(Rows.STREAM, Rows.NORMED, weight, 1e-5), rows, rows)
        row_kernels.gated(torch.zeros(tokens, 2 * width, dtype=dtype), "silu")
        row_kernels.gated(torch.zeros(tokens, 2 * width, dtype=dtype), "gelu_tanh")
        columns, kept = FixedColumns(tokens, ids.device), KeptRows.zeros(tokens, 16, ids.device)
        row_kernels.begin_step(columns, kept, ids, batch, ids[None], ids, shape.block_size)
    return found + rotation_launches(shape, group, dtype)


def product_launches(dtype: torch.dtype) -> list[Launch]:
    """Products of few rows, of some and of many with E4M3 weights."""
    columns, depth = 4096, 4096
    numbers, scales = torch.zeros(columns, depth, dtype=FLOAT8), torch.ones(columns, depth // 128)
    weights = pack_float8(QuantizedWeight(numbers, scales, None, 8, 128, dtype), None)
    with launches() as found:
        for count in (1, 40, 300):
            Products(upcast=False).linear(torch.zeros(count, depth, dtype=dtype), weights)
    return found


def other_launches(dtype: torch.dtype, vocab_size: int) -> list[Launch]:
    """Copies of blocks of that type, and draws of tokens with their log probabilities."""
    rows, ones = 4, torch.ones(4, dtype=torch.int64)
    floats = torch.ones(rows)
    parameters = _Rows(floats, ones, floats, ones, ones, ones, torch.zeros(rows))
    with launches() as found:
        TritonBackend(_H200).blocks.copy(torch.zeros(2, 2, 4, 1024, dtype=dtype), [(0, 1)])
        token_draws.choose(torch.zeros(rows, vocab_size))
        token_draws.draw(torch.zeros(rows, vocab_size), parameters, ones.bool())
        columns, kept = FixedColumns(rows, ones.device), KeptRows.zeros(rows, 16, ones.device)
        token_draws.draw_chosen(torch.zeros(rows, vocab_size), ones, columns, kept, ones, ones.bool())
        token_draws.chosen_logprobs(torch.zeros(rows, vocab_size), ones, ones.bool())
    return found
