"""The backend "cuda": attention and cache writes in Triton, on a GPU, or on CPU tensors in Triton's interpreter.

Setting TRITON_INTERPRET=1 before triton is imported selects the interpreter; it is for tests, thousands of
times slower.
"""

import torch
import triton

from paged_kernels.backend import AttentionBatch, AttentionRule, CacheShape
from paged_kernels.gpu import block_moves, token_draws
from paged_kernels.gpu.attention import attention_kernel, combine_kernel
from paged_kernels.gpu.decoder import TritonDecoders
from paged_kernels.gpu.scaled_cache import form_of, numbers_and_scales
from paged_kernels.gpu.tile_plan import Sharing, TilePlan, heads_together, make_plans, padded_dim, span_of
from svc_common.errors import ConfigError

_WAVES = 4
_MIN_PROGRAM_BYTES = 32 * 1024
_INTERPRETED_PROGRAMS = 16


def is_interpreted() -> bool:
    """True if kernels run in the interpreter, so tensors may be in CPU memory."""
    return not isinstance(attention_kernel, triton.JITFunction)


def sharing_of(device: torch.device) -> Sharing:
    """How finely to split work on `device`: a few waves of programs over its processors."""
    if device.type != "cuda":
        return Sharing(_INTERPRETED_PROGRAMS, 0)
    return Sharing(_WAVES * torch.cuda.get_device_properties(device).multi_processor_count, _MIN_PROGRAM_BYTES)


def make() -> "TritonBackend":
    """Create the backend for this process's device. Raises ConfigError if there is none."""
    if is_interpreted():
        return TritonBackend(sharing_of(torch.device("cpu")))
    if not torch.cuda.is_available():
        raise ConfigError(
            "no CUDA device found: use --backend cpu, or set TRITON_INTERPRET=1 to run the kernels on a CPU for tests",
            reason="NO_CUDA_DEVICE",
        )
    return TritonBackend(sharing_of(torch.device("cuda")))


class TritonBackend:
    """Kernels for one device. Not invariant: how keys are divided among programs depends on the batch."""

    name = "cuda"
    invariant = False

    def __init__(self, sharing: Sharing) -> None:
        self.blocks = block_moves.TritonBlocks()
        self.sharing = sharing
        self._upcast = is_interpreted()
        self.decoder = TritonDecoders(self.attend, upcast=self._upcast)

    def write_kv(
        self, key: torch.Tensor, value: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor, shape: CacheShape
    ) -> None:
        """See KernelBackend."""
        block_moves.write_kv(key, value, cache, slots, shape)

    def paged_attention(
        self, query: torch.Tensor, cache: torch.Tensor, batch: AttentionBatch, shape: CacheShape, rule: AttentionRule
    ) -> torch.Tensor:
        """See KernelBackend."""
        out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
        self.attend(block_moves.tokens_apart(query), out, cache, batch, shape, rule)
        return out

    def attend(
        self, query: torch.Tensor, out: torch.Tensor, cache: torch.Tensor, batch: AttentionBatch, shape: CacheShape,
        rule: AttentionRule,
    ) -> None:  # fmt: skip
        """The same into `out`, contiguous. The heads of a token of `query` are contiguous; tokens may be strided."""
        if (count := int(batch.offsets[-1])) < len(out):
            out[count:] = 0
        for plan in self.plans(query, batch, shape, rule, cache.dtype):
            self._run(plan, query, out, cache, batch, shape, rule)

    def greedy(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """See registry.GreedyKernel."""
        return token_draws.choose(logits)

    def plans(
        self, query: torch.Tensor, batch: AttentionBatch, shape: CacheShape, rule: AttentionRule,
        cache_dtype: torch.dtype | None = None,
    ) -> list[TilePlan]:  # fmt: skip
        """Work division of this step, computed once for all layers with equal attention.

        `query`: [T, heads, head_dim]; the cache has its dtype unless `cache_dtype` is given.
        """
        group = heads_together(shape.head_dim, query.shape[1] // shape.num_kv_heads)
        key = (shape, group, query.dtype, cache_dtype, span := span_of(rule))
        if key not in batch.plans:
            batch.plans[key] = make_plans(batch, shape, group, query.dtype, span, self.sharing, cache_dtype)
        return batch.plans[key]

    def _run(
        self, plan: TilePlan, query: torch.Tensor, out: torch.Tensor, cache: torch.Tensor, batch: AttentionBatch,
        shape: CacheShape, rule: AttentionRule,
    ) -> None:  # fmt: skip
        tile, num_tiles, max_items = plan.shape, plan.tiles.shape[1], plan.items.shape[1]
        group = heads_together(shape.head_dim, query.shape[1] // shape.num_kv_heads)
        groups = query.shape[1] // group
        scratch = (plan.max_parts, groups, tile.rows)
        partial = torch.empty(*scratch, shape.head_dim, dtype=torch.float32, device=query.device)
        logs = torch.empty(scratch, dtype=torch.float32, device=query.device)
        constants = {
            "GROUP": group,
            "GROUPS": groups,
            "HEAD_DIM": shape.head_dim,
            "PADDED_DIM": padded_dim(shape.head_dim),
            "ROWS": tile.rows,
        }
        (keys, values), scales = numbers_and_scales(cache, shape)
        span = span_of(rule)
        has_sinks, sinks = rule.sinks is not None, logs if rule.sinks is None else rule.sinks
        attention_kernel[(max_items, groups)](
            query, query.stride(0), out, keys, values, scales[0], scales[1], batch.block_tables, batch.sequences,
            batch.slots, batch.positions, plan.tiles, plan.items, plan.num_items, partial, logs, num_tiles, max_items,
            batch.block_tables.stride(0), float(rule.scale), float(rule.softcap or 0), span.size,
            sinks, **constants, KV_HEADS=shape.num_kv_heads, BLOCK_SIZE=shape.block_size, KEYS=tile.keys, SPAN=span.kind,
            HAS_SOFTCAP=rule.softcap is not None, HAS_SINKS=has_sinks, FORM=form_of(cache.dtype), UPCAST=self._upcast,
            num_warps=tile.num_warps, num_stages=tile.num_stages, enable_fp_fusion=True,
        )  # fmt: skip
        piece = min(tile.rows, 16 if shape.head_dim <= 512 else 8)
        combine_kernel[(num_tiles, groups, -(-tile.rows // piece))](
            out,
            batch.slots,
            plan.tiles,
            plan.tile_parts,
            partial,
            logs,
            num_tiles,
            sinks,
            **constants,
            PIECE=piece,
            HAS_SINKS=has_sinks,
            num_warps=4,
            enable_fp_fusion=True,
        )
