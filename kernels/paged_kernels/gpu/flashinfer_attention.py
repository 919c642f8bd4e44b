"""Attention by FlashInfer (Ye et al. 2025): one wrapper for each rule of the model, planned once per step from lengths on the host.

Source of the calls: flashinfer-python 0.7.2, `BatchPrefillWithPagedKVCacheWrapper`, which computes decode rows too.
"""

from collections.abc import Hashable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy as np
import torch

from paged_kernels.attention_limits import ANY_BLOCK_SIZE, ANY_LATER, WORKSPACES, AttentionLimits
from paged_kernels.backend import AttentionBatch, AttentionRule, CacheShape
from paged_kernels.gpu import library_backend
from paged_kernels.gpu.library_backend import LibraryBackend, SeenKeys, StepSequences

NAME = "flashinfer"
LIMITS = AttentionLimits(
    head_dims=(64, 128, 256),
    heads="64, 128 or 256",
    block_sizes=ANY_BLOCK_SIZE,
    blocks="1 to 1024",
    dtypes=(torch.float16, torch.bfloat16),
    capabilities=((8, 0), ANY_LATER),
)
WORKSPACE = WORKSPACES[NAME]


def make() -> LibraryBackend:
    """Create the backend. Raises ConfigError if FlashInfer or a device that it takes is missing."""
    return library_backend.make(FlashInfer(library_backend.imported(NAME, "the package flashinfer-python", NAME)))


@dataclass(slots=True)
class _Wrapper:
    """`planned`: stands for the step that it is planned for, in `plans` of its batch."""

    inner: Any
    planned: object = None
    copied: torch.cuda.Event | None = None


class FlashInfer:
    """See AttentionLibrary."""

    name, fresh_only = NAME, False

    def __init__(self, module: ModuleType) -> None:
        self.limits = LIMITS
        self._module = module
        self._memory: torch.Tensor | None = None
        self._wrappers: dict[Hashable, _Wrapper] = {}

    @property
    def workspace_bytes(self) -> int:
        """See AttentionLibrary."""
        return 0 if self._memory is None else WORKSPACE.num_bytes(len(self._wrappers))

    def attend(
        self, query: torch.Tensor, out: torch.Tensor, cache: torch.Tensor, batch: AttentionBatch, step: StepSequences,
        shape: CacheShape, rule: AttentionRule,
    ) -> None:  # fmt: skip
        """See AttentionLibrary."""
        wrapper = self._planned(query, batch, step, shape, rule)
        wrapper.run(query, library_backend.pages(cache, shape), out=out)

    def _planned(
        self, query: torch.Tensor, batch: AttentionBatch, step: StepSequences, shape: CacheShape, rule: AttentionRule
    ) -> Any:
        key = (NAME, shape, query.shape[1], query.dtype, rule)
        wrapper = self._wrappers.get(key) or self._wrappers.setdefault(key, self._wrapper(query.device))
        if wrapper.planned is None or batch.plans.get(key) is not wrapper.planned:
            _plan(wrapper, query, batch, step, shape, rule)
            wrapper.planned = batch.plans[key] = object()
        return wrapper.inner

    def _wrapper(self, device: torch.device) -> _Wrapper:
        if self._memory is None:
            self._memory = torch.empty(WORKSPACE.shared_bytes, dtype=torch.uint8, device=device)
        return _Wrapper(self._module.BatchPrefillWithPagedKVCacheWrapper(self._memory, "HND"))


def _plan(
    wrapper: _Wrapper, query: torch.Tensor, batch: AttentionBatch, step: StepSequences, shape: CacheShape,
    rule: AttentionRule,
) -> None:  # fmt: skip
    # plan() writes to pinned memory that the copy of an earlier plan may still read.
    if wrapper.copied is not None:
        wrapper.copied.synchronize()
    window = rule.sliding_window
    seen = step.seen(shape, window)
    wrapper.inner.plan(
        torch.from_numpy(step.offsets),
        torch.from_numpy(np.concatenate([[0], np.cumsum(seen.num_pages)]).astype(np.int32)),
        _page_ids(batch, step, seen),
        torch.from_numpy(seen.lengths - (seen.num_pages - 1) * shape.block_size),
        query.shape[1],
        shape.num_kv_heads,
        shape.head_dim,
        shape.block_size,
        causal=True,
        sm_scale=rule.scale,
        window_left=-1 if window is None else window - 1,
        logits_soft_cap=rule.softcap or 0.0,
        q_data_type=query.dtype,
        kv_data_type=query.dtype,
    )
    if torch.cuda.is_available():
        wrapper.copied = torch.cuda.Event()
        wrapper.copied.record()


def _page_ids(batch: AttentionBatch, step: StepSequences, seen: SeenKeys) -> torch.Tensor:
    """int32 [pages of all sequences]: block ids, made on the device."""
    ends, device = np.cumsum(seen.num_pages, dtype=np.int32), batch.block_tables.device
    counts, starts, begins, firsts = library_backend.uploaded(
        device, seen.num_pages, ends - seen.num_pages, step.begins, seen.firsts
    )
    tables = library_backend.page_tables(batch, begins, firsts, int(seen.num_pages.max()))
    total = int(ends[-1])
    rows = torch.arange(len(counts), device=device).repeat_interleave(counts, output_size=total)
    return tables[rows, torch.arange(total, device=device) - starts[rows]]
