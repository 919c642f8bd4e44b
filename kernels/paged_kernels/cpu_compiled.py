"""Paged attention on CPU by the compiled library: loops over blocks without gathering.

cpu/paged_scan.h describes the block layout and how results are made batch invariant.
"""

import ctypes
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch

from paged_kernels.backend import TORCH_BLOCKS, AttentionBatch, AttentionRule, CacheShape, written_dtype
from paged_kernels.cpu_decoder import CpuDecoders
from paged_kernels.weight_packing import pointer

_POINTER, _I64, _INT, _FLOAT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int, ctypes.c_float
_ATTENTION_TYPES = (
    [_POINTER] * 5 + [_I64] + [_POINTER] * 3 + [_I64] + [_INT] * 4 + [_FLOAT, _INT, _INT, _FLOAT, _POINTER, _INT]
)
_WRITE_TYPES = [_POINTER] * 5 + [_I64] + [_INT] * 4
_NAMES = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}
_ROUNDED = {torch.int8: "int8", torch.float8_e4m3fn: "float8"}
_CACHES = _NAMES | _ROUNDED

Key = TypeVar("Key")


class CompiledCpuBackend:
    """CPU kernels of the compiled library, on torch's current number of threads.

    `decoder`: its kernels for whole decoders. `library`: for `ranks.SharedSums`.
    """

    name = "cpu"
    invariant = True
    blocks = TORCH_BLOCKS

    def __init__(self, library: ctypes.CDLL) -> None:
        library.quire_use_threads(_parallel_region())
        names = {(dtype, dtype): f"{name}_{name}" for dtype, name in _NAMES.items()}
        names |= {(torch.float32, dtype): f"float32_{name}" for dtype, name in _CACHES.items()}
        names |= {(torch.bfloat16, dtype): f"bfloat16_{name}" for dtype, name in _ROUNDED.items()}
        self._attention = _functions(library, "quire_paged_attention", names, _ATTENTION_TYPES)
        self._write = _functions(library, "quire_write_kv", _CACHES, _WRITE_TYPES)
        self.library = library
        self.decoder = CpuDecoders(library)
        self._greedy = library.quire_choose
        self._greedy.argtypes, self._greedy.restype = [_POINTER, _I64, _I64, _POINTER, _POINTER, _INT], None

    def write_kv(
        self, key: torch.Tensor, value: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor, shape: CacheShape
    ) -> None:
        """See KernelBackend."""
        key, value = key.contiguous(), value.contiguous()
        assert key.dtype == value.dtype == written_dtype(cache.dtype)
        self._write[cache.dtype](
            key.data_ptr(),
            value.data_ptr(),
            cache[0].data_ptr(),
            cache[1].data_ptr(),
            slots.data_ptr(),
            len(slots),
            shape.num_kv_heads,
            shape.head_dim,
            shape.block_size,
            torch.get_num_threads(),
        )

    def greedy(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """See registry.GreedyKernel."""
        logits = logits.contiguous()
        places, finite = torch.empty(len(logits), dtype=torch.int64), torch.empty(len(logits), dtype=torch.bool)
        self._greedy(
            logits.data_ptr(), *logits.shape, places.data_ptr(), finite.data_ptr(), torch.get_num_threads()
        )  # fmt: skip
        return places, finite

    def paged_attention(
        self, query: torch.Tensor, cache: torch.Tensor, batch: AttentionBatch, shape: CacheShape, rule: AttentionRule
    ) -> torch.Tensor:
        """See KernelBackend."""
        if (query.dtype, cache.dtype) not in self._attention:
            return self.paged_attention(query.float(), cache, batch, shape, rule).to(query.dtype)
        query = query.contiguous()
        out = torch.empty_like(query)
        self._attention[query.dtype, cache.dtype](
            query.data_ptr(),
            out.data_ptr(),
            cache[0].data_ptr(),
            cache[1].data_ptr(),
            batch.block_tables.data_ptr(),
            batch.block_tables.stride(0),
            batch.sequences.data_ptr(),
            batch.positions.data_ptr(),
            batch.slots.data_ptr(),
            len(query),
            query.shape[1],
            shape.num_kv_heads,
            shape.head_dim,
            shape.block_size,
            rule.scale,
            rule.sliding_window or 0,
            rule.chunk or 0,
            rule.softcap or 0.0,
            pointer(rule.sinks),
            torch.get_num_threads(),
        )
        return out


def _parallel_region() -> ctypes.c_void_p:
    """GOMP_parallel of the OpenMP runtime that torch is linked to, so that kernels and torch share one thread pool."""
    return ctypes.cast(ctypes.CDLL(torch._C.__file__).GOMP_parallel, ctypes.c_void_p)


def _functions(
    library: ctypes.CDLL, prefix: str, names: Mapping[Key, str], types: Sequence[Any]
) -> dict[Key, Callable[..., None]]:
    functions: dict[Key, Callable[..., None]] = {}
    for key, name in names.items():
        function = library[f"{prefix}_{name}"]
        function.argtypes, function.restype = types, None
        functions[key] = function
    return functions
