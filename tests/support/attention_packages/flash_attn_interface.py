"""FlashAttention-3's interface, hopper/flash_attn_interface.py at commit 01afd16d248c4c7d0f9aed1914084f16c490eaed."""

import itertools

import torch

from tests.support.attention_packages.in_torch import attend, paged


def flash_attn_with_kvcache(
    q,
    k_cache,
    v_cache,
    k=None,
    v=None,
    qv=None,
    rotary_cos=None,
    rotary_sin=None,
    cache_seqlens=None,
    cache_batch_idx=None,
    cache_leftpad=None,
    page_table=None,
    cu_seqlens_q=None,
    cu_seqlens_k_new=None,
    max_seqlen_q=None,
    rotary_seqlens=None,
    q_descale=None,
    k_descale=None,
    v_descale=None,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
    attention_chunk=0,
    softcap=0.0,
    rotary_interleaved=True,
    scheduler_metadata=None,
    num_splits=0,
    pack_gqa=None,
    sm_margin=0,
    return_softmax_lse=False,
):
    """Causal attention over paged keys and values [blocks, page, kv_heads, d] of sequences of any length."""
    assert causal and num_splits == 1 and not return_softmax_lse and window_size[1] == (-1 if window_size[0] < 0 else 0)
    assert q.stride(-1) == k_cache.stride(-1) == v_cache.stride(-1) == 1
    assert k_cache.shape == v_cache.shape and k_cache.shape[1] % 64, "pages that would be loaded whole"
    assert page_table.dtype == cache_seqlens.dtype == cu_seqlens_q.dtype == torch.int32
    assert page_table.stride(-1) == 1 and len(page_table) == len(cache_seqlens) == len(cu_seqlens_q) - 1
    ends, lengths = cu_seqlens_q.tolist(), cache_seqlens.tolist()
    assert max_seqlen_q == max(b - a for a, b in itertools.pairwise(ends))
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    for i, length in enumerate(lengths):
        ids = page_table[i, : -(-length // k_cache.shape[1])]
        keys, values = paged(k_cache, ids, length), paged(v_cache, ids, length)
        rows = slice(ends[i], ends[i + 1])
        out[rows] = attend(q[rows], keys, values, softmax_scale, window_size[0], softcap)
    return out
