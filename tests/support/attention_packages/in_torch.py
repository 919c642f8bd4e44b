"""Attention as the libraries compute it: whole sequences of keys, those hidden from a token multiplied by zero, NaN too."""

import itertools
from typing import Any

import torch


def attend(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float, window_left: int, softcap: float
) -> torch.Tensor:
    """`query` [t, heads, d], the last t tokens of `keys` and `values` [k, kv_heads, d]. Keys more than
    `window_left` before a token are hidden; -1 = none."""
    count, length, group = len(query), len(keys), query.shape[1] // keys.shape[1]
    keys, values = (x.double().repeat_interleave(group, dim=1) for x in (keys, values))
    scores = torch.einsum("qhd,khd->hqk", query.double(), keys) * scale
    if softcap > 0:
        scores = softcap * torch.tanh(scores / softcap)
    ages = torch.arange(length - count, length)[:, None] - torch.arange(length)[None, :]
    hidden = (ages < 0) | ((ages > window_left) if window_left >= 0 else torch.zeros(1, dtype=torch.bool))
    weights = scores.masked_fill(hidden.to(scores.device), float("-inf")).softmax(-1)
    return torch.einsum("hqk,khd->qhd", weights, values).to(query.dtype)


def paged(pool: torch.Tensor, ids: torch.Tensor, length: int) -> torch.Tensor:
    """The first `length` tokens in blocks `ids` of [blocks, page, kv_heads, d]."""
    return pool[ids.long()].flatten(0, 1)[:length]


def varlen_attn(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_seq_q: torch.Tensor,
    cu_seq_k: torch.Tensor | None,
    max_q: int,
    max_k: int,
    *,
    return_aux: Any = None,
    scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
    enable_gqa: bool = False,
    seqused_k: torch.Tensor | None = None,
    block_table: torch.Tensor | None = None,
    num_splits: int | None = None,
) -> torch.Tensor:
    """`torch.nn.attention.varlen.varlen_attn` of torch 2.13, for causal sequences without blocks."""
    assert cu_seq_k is not None and scale is not None and window_size[1] == 0
    assert (return_aux, seqused_k, block_table, num_splits) == (None,) * 4
    assert enable_gqa == (query.shape[1] != key.shape[1])
    assert query.stride(-1) == key.stride(-1) == value.stride(-1) == 1
    ends, key_ends = cu_seq_q.tolist(), cu_seq_k.tolist()
    assert max_q == max(b - a for a, b in itertools.pairwise(ends))
    assert max_k == max(b - a for a, b in itertools.pairwise(key_ends))
    out = torch.empty_like(query, memory_format=torch.contiguous_format)
    for (begin, end), (first, last) in zip(itertools.pairwise(ends), itertools.pairwise(key_ends), strict=True):
        out[begin:end] = attend(query[begin:end], key[first:last], value[first:last], scale, window_size[0], 0.0)
    return out
