"""Attention by FlashAttention-3 (Shah et al. 2024) on Hopper GPUs: `flash_attn_with_kvcache` of flash_attn_interface."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from paged_kernels.attention_limits import AttentionLimits
from paged_kernels.backend import AttentionBatch, AttentionRule, CacheShape
from paged_kernels.gpu import library_backend
from paged_kernels.gpu.library_backend import LibraryBackend, StepSequences

NAME = "flash-attn-3"
LIMITS = AttentionLimits(
    head_dims=range(8, 257, 8),
    heads="8 to 256 that are multiples of 8",
    # Pages that are multiples of a tile (64 keys and more) are loaded whole, with what lies behind a sequence's last key.
    block_sizes=range(1, 64),
    blocks="1 to 63",
    dtypes=(torch.float16, torch.bfloat16),
    capabilities=((9, 0), (9, 9)),
)


def make() -> LibraryBackend:
    """Create the backend. Raises ConfigError if FlashAttention-3 or a device that it takes is missing."""
    package = "flash_attn_interface, FlashAttention's folder `hopper`"
    module = library_backend.imported("flash_attn_interface", package, NAME)
    return library_backend.make(FlashAttention3(module.flash_attn_with_kvcache))


@dataclass(frozen=True, slots=True)
class _Plan:
    offsets: torch.Tensor
    lengths: torch.Tensor
    tables: torch.Tensor
    most_tokens: int


class FlashAttention3:
    """See AttentionLibrary. Has no workspace."""

    name, fresh_only, workspace_bytes = NAME, False, 0

    def __init__(self, function: Callable[..., Any]) -> None:
        self.limits = LIMITS
        self._function = function

    def attend(
        self, query: torch.Tensor, out: torch.Tensor, cache: torch.Tensor, batch: AttentionBatch, step: StepSequences,
        shape: CacheShape, rule: AttentionRule,
    ) -> None:  # fmt: skip
        """See AttentionLibrary."""
        window = rule.sliding_window
        key = (NAME, shape.block_size, window)
        if key not in batch.plans:
            batch.plans[key] = _plan(batch, step, shape, window)
        plan: _Plan = batch.plans[key]
        # Strides are free but for the last dimension.
        keys, values = (part.transpose(1, 2) for part in library_backend.pages(cache, shape))
        made = self._function(
            query,
            keys,
            values,
            cache_seqlens=plan.lengths,
            page_table=plan.tables,
            cu_seqlens_q=plan.offsets,
            max_seqlen_q=plan.most_tokens,
            softmax_scale=rule.scale,
            causal=True,
            window_size=(-1, -1) if window is None else (window - 1, 0),
            softcap=rule.softcap or 0.0,
            # Sums of splits would take memory that grows with the step and that the profile step does not show.
            num_splits=1,
        )
        out.copy_(made)


def _plan(batch: AttentionBatch, step: StepSequences, shape: CacheShape, window: int | None) -> _Plan:
    seen = step.seen(shape, window)
    offsets, lengths, begins, firsts = library_backend.uploaded(
        batch.block_tables.device, step.offsets, seen.lengths, step.begins, seen.firsts
    )
    tables = library_backend.page_tables(batch, begins, firsts, int(seen.num_pages.max()))
    return _Plan(offsets, lengths, tables, int(step.counts.max()))
