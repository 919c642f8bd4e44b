"""FlashInfer's wrapper of paged attention: flashinfer-python 0.7.2.post1, flashinfer/prefill.py."""

from typing import ClassVar

import torch

from tests.support.attention_packages.in_torch import attend, paged

_OWN_BYTES = 8 * 1024 * 1024 + 4 * 32768


class BatchPrefillWithPagedKVCacheWrapper:
    """Planned once for a step, then run for each of its layers. `PLANS`: how often any was planned."""

    PLANS: ClassVar[list[int]] = []

    def __init__(
        self,
        float_workspace_buffer,
        kv_layout="NHD",
        use_cuda_graph=False,
        qo_indptr_buf=None,
        paged_kv_indptr_buf=None,
        paged_kv_indices_buf=None,
        paged_kv_last_page_len_buf=None,
        custom_mask_buf=None,
        mask_indptr_buf=None,
        backend="auto",
        jit_args=None,
        jit_kwargs=None,
        variant_owns_mask=False,
    ):
        assert kv_layout == "HND" and not use_cuda_graph
        self._memory = float_workspace_buffer
        self._own = torch.empty(_OWN_BYTES, dtype=torch.uint8, device=float_workspace_buffer.device)

    def plan(
        self,
        qo_indptr,
        paged_kv_indptr,
        paged_kv_indices,
        paged_kv_last_page_len,
        num_qo_heads,
        num_kv_heads,
        head_dim_qk,
        page_size,
        head_dim_vo=None,
        custom_mask=None,
        packed_custom_mask=None,
        causal=False,
        pos_encoding_mode="NONE",
        use_fp16_qk_reduction=False,
        sm_scale=None,
        window_left=-1,
        logits_soft_cap=None,
        rope_scale=None,
        rope_theta=None,
        q_data_type="float16",
        kv_data_type=None,
        o_data_type=None,
        non_blocking=True,
        prefix_len_ptr=None,
        token_pos_in_items_ptr=None,
        token_pos_in_items_len=0,
        max_item_len_ptr=None,
        seq_lens=None,
        seq_lens_q=None,
        block_tables=None,
        max_token_per_sequence=None,
        max_sequence_kv=None,
        fixed_split_size=None,
        disable_split_kv=False,
        uniform_q_len=None,
    ):
        """Lengths are on the host: the real one would wait for the device."""
        assert causal and head_dim_vo is None
        on_host = (qo_indptr, paged_kv_indptr, paged_kv_last_page_len)
        assert all(type(x) is torch.Tensor and x.device.type == "cpu" and x.dtype == torch.int32 for x in on_host)
        assert paged_kv_indices.dtype == torch.int32 and paged_kv_indices.device == self._memory.device
        assert ((paged_kv_last_page_len >= 1) & (paged_kv_last_page_len <= page_size)).all()
        assert len(paged_kv_indices) == int(paged_kv_indptr[-1])
        self._ends, self._page_ends = qo_indptr.tolist(), paged_kv_indptr.tolist()
        self._last, self._ids, self._page_size = paged_kv_last_page_len.tolist(), paged_kv_indices, page_size
        self._heads, self._types = (num_qo_heads, num_kv_heads, head_dim_qk), (q_data_type, kv_data_type)
        self._rule = (sm_scale, window_left, logits_soft_cap or 0.0)
        self.PLANS.append(1)

    def run(
        self,
        q,
        paged_kv_cache,
        *args,
        q_scale=None,
        k_scale=None,
        v_scale=None,
        out=None,
        lse=None,
        return_lse=False,
        lse_base="log2",
        lse_layout="NH",
        enable_pdl=None,
        window_left=None,
        sinks=None,
        kv_cache_sf=None,
        skip_softmax_threshold_scale_factor=None,
        use_fp16_softmax=None,
        uses_spcompress=None,
    ):
        """Attention of all planned tokens, into `out`."""
        keys, values = paged_kv_cache
        assert q.shape == (self._ends[-1], self._heads[0], self._heads[2]) and q.stride(-1) == 1
        assert keys.shape == values.shape and keys.shape[1:] == (self._heads[1], self._page_size, self._heads[2])
        assert (q.dtype, keys.dtype) == self._types and out is not None and out.is_contiguous()
        scale, window, softcap = self._rule
        for i, last in enumerate(self._last):
            ids = self._ids[self._page_ends[i] : self._page_ends[i + 1]]
            length, rows = (len(ids) - 1) * self._page_size + last, slice(self._ends[i], self._ends[i + 1])
            held = [paged(pool.transpose(1, 2), ids, length) for pool in (keys, values)]
            out[rows] = attend(q[rows], *held, scale, window, softcap)
        return out
