"""Attention of fresh prompts by torch's own flash attention (`torch.nn.attention.varlen`); other steps are Triton's.

The step's keys and values are read back from the cache, a small copy beside the attention of a long prompt. cuDNN's attention
is not used: through torch it takes one length per call, and compiles for each new one.
"""

import inspect
from collections.abc import Callable
from typing import Any

import torch

from paged_kernels.attention_limits import ANY_BLOCK_SIZE, ANY_LATER, AttentionLimits
from paged_kernels.backend import AttentionBatch, AttentionRule, CacheShape
from paged_kernels.gpu import library_backend
from paged_kernels.gpu.library_backend import LibraryBackend, StepSequences
from svc_common.errors import ConfigError

NAME = "torch"
LIMITS = AttentionLimits(
    head_dims=range(8, 257, 8),
    heads="8 to 256 that are multiples of 8",
    block_sizes=ANY_BLOCK_SIZE,
    blocks="1 to 1024",
    dtypes=(torch.float16, torch.bfloat16),
    capabilities=((8, 0), ANY_LATER),
    softcap=False,
)
_NEEDED = {"scale", "window_size", "enable_gqa"}


def make() -> LibraryBackend:
    """Create the backend. Raises ConfigError if torch is too old or the device is not taken."""
    module = library_backend.imported("torch.nn.attention.varlen", "a newer torch", NAME)
    if missing := _NEEDED - inspect.signature(module.varlen_attn).parameters.keys():
        raise ConfigError(
            f"--attention-backend {NAME} needs {', '.join(sorted(missing))} of torch's varlen_attn, and this is torch "
            f"{torch.__version__}: install torch 2.13 or later, or use --attention-backend auto",
            reason="NO_ATTENTION_LIBRARY",
        )
    return library_backend.make(TorchAttention(module.varlen_attn))


class TorchAttention:
    """See AttentionLibrary. Has no workspace."""

    name, fresh_only, workspace_bytes = NAME, True, 0

    def __init__(self, function: Callable[..., Any]) -> None:
        self.limits = LIMITS
        self._function = function

    def attend(
        self, query: torch.Tensor, out: torch.Tensor, cache: torch.Tensor, batch: AttentionBatch, step: StepSequences,
        shape: CacheShape, rule: AttentionRule,
    ) -> None:  # fmt: skip
        """See AttentionLibrary."""
        if NAME not in batch.plans:
            batch.plans[NAME] = library_backend.uploaded(query.device, step.offsets)[0]
        offsets, longest = batch.plans[NAME], int(step.counts.max())
        slots = batch.slots[: len(query)]
        blocks = cache.view(2, -1, shape.num_kv_heads, shape.block_size, shape.head_dim)
        both = blocks[:, slots // shape.block_size, :, slots % shape.block_size]  # [T, 2, kv_heads, head_dim]
        window = rule.sliding_window
        made = self._function(
            query,
            both[:, 0],
            both[:, 1],
            offsets,
            offsets,
            longest,
            longest,
            scale=rule.scale,
            window_size=(-1 if window is None else window - 1, 0),
            enable_gqa=query.shape[1] > shape.num_kv_heads,
        )
        out.copy_(made)
