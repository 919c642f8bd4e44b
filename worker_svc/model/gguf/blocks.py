"""Blocks of GGUF's quantized tensors as `QuantizedWeight`. Every mapping is exact: the same numbers, scales and offsets."""

from collections.abc import Callable

import numpy as np
import torch
from gguf import GGML_QUANT_SIZES
from numpy.typing import NDArray

from paged_kernels.quantized import QuantizedWeight
from worker_svc.model.gguf.header import TensorType

Bytes = NDArray[np.uint8]
Blocks = tuple[NDArray[np.int8], NDArray[np.float32], NDArray[np.float32] | None]
"""Of blocks: numbers [blocks, size], scales [blocks, groups] and offsets, or None."""
_SUPER = 256
_EIGHT_BITS = frozenset({TensorType.Q8_0, TensorType.Q5_0, TensorType.Q5_1, TensorType.Q5_K, TensorType.Q6_K})


def quantized_weight(data: Bytes, kind: TensorType, dtype: torch.dtype) -> QuantizedWeight:
    """The weights of a quantized matrix. `data`: uint8 [columns, bytes of a column]."""
    size, num_bytes = GGML_QUANT_SIZES[kind]
    columns = len(data)
    numbers, scales, offsets = _READERS[kind](np.ascontiguousarray(data).reshape(-1, num_bytes))
    return QuantizedWeight(
        torch.from_numpy(numbers.reshape(columns, -1)),
        torch.from_numpy(scales.reshape(columns, -1)),
        None if offsets is None else torch.from_numpy(offsets.reshape(columns, -1)),
        bits=8 if kind in _EIGHT_BITS else 4,
        group=size // scales.shape[1],
        dtype=dtype,
    )


def _half(data: Bytes) -> NDArray[np.float32]:
    """float16 numbers of 2 bytes each."""
    return data.view(np.float16).astype(np.float32)


def _nibbles(data: Bytes) -> NDArray[np.uint8]:
    """[blocks, n] bytes to [blocks, 2n]: the low halves, then the high ones."""
    return np.concatenate([data & 0x0F, data >> 4], axis=1)


def _fifth_bits(data: Bytes) -> NDArray[np.uint8]:
    """4 bytes to 32 bits, each as 0 or 16."""
    return np.unpackbits(data, axis=1, bitorder="little") << 4


def _q8_0(data: Bytes) -> Blocks:
    return data[:, 2:].view(np.int8).copy(), _half(data[:, :2].copy()), None


def _q4_0(data: Bytes) -> Blocks:
    return _nibbles(data[:, 2:]).astype(np.int8) - np.int8(8), _half(data[:, :2].copy()), None


def _q4_1(data: Bytes) -> Blocks:
    return _nibbles(data[:, 4:]).astype(np.int8), _half(data[:, :2].copy()), _half(data[:, 2:4].copy())


def _q5_0(data: Bytes) -> Blocks:
    numbers = (_nibbles(data[:, 6:]) | _fifth_bits(data[:, 2:6])).astype(np.int8) - np.int8(16)
    return numbers, _half(data[:, :2].copy()), None


def _q5_1(data: Bytes) -> Blocks:
    numbers = (_nibbles(data[:, 8:]) | _fifth_bits(data[:, 4:8])).astype(np.int8)
    return numbers, _half(data[:, :2].copy()), _half(data[:, 2:4].copy())


def _k_factors(data: Bytes) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Scales and offsets [blocks, 8] of Q4_K and Q5_K: two numbers of 6 bits for each group, times one of the block."""
    packed = data[:, 4:16]
    first, second, third = packed[:, 0:4], packed[:, 4:8], packed[:, 8:12]
    scales = np.concatenate([first & 63, (third & 0x0F) | (first >> 6 << 4)], axis=1)
    offsets = np.concatenate([second & 63, (third >> 4) | (second >> 6 << 4)], axis=1)
    of_scales, of_offsets = _half(data[:, :2].copy()), _half(data[:, 2:4].copy())
    return of_scales * scales, -(of_offsets * offsets)


def _k_nibbles(data: Bytes) -> NDArray[np.uint8]:
    """128 bytes to 256 halves: of each 32 bytes the low ones, then the high ones."""
    pieces = data.reshape(-1, 4, 1, 32)
    return np.concatenate([pieces & 0x0F, pieces >> 4], axis=2).reshape(-1, _SUPER)


def _q4_k(data: Bytes) -> Blocks:
    return _k_nibbles(data[:, 16:]).astype(np.int8), *_k_factors(data)


def _q5_k(data: Bytes) -> Blocks:
    fifth = (data[:, None, 16:48] >> np.arange(8, dtype=np.uint8)[:, None] & 1) << 4
    numbers = _k_nibbles(data[:, 48:]) | fifth.reshape(-1, _SUPER)
    return numbers.astype(np.int8), *_k_factors(data)


def _q6_k(data: Bytes) -> Blocks:
    low, high = data[:, :128].reshape(-1, 2, 1, 64), data[:, 128:192].reshape(-1, 2, 1, 32)
    low = np.concatenate([low & 0x0F, low >> 4], axis=2).reshape(-1, 2, 4, 32)
    high = high >> np.array([0, 2, 4, 6], np.uint8)[:, None] & 3
    numbers = (low | high << 4).reshape(-1, _SUPER).astype(np.int8) - np.int8(32)
    return numbers, _half(data[:, 208:].copy()) * data[:, 192:208].view(np.int8), None


_READERS: dict[TensorType, Callable[[Bytes], Blocks]] = {
    TensorType.Q8_0: _q8_0,
    TensorType.Q4_0: _q4_0,
    TensorType.Q4_1: _q4_1,
    TensorType.Q5_0: _q5_0,
    TensorType.Q5_1: _q5_1,
    TensorType.Q4_K: _q4_k,
    TensorType.Q5_K: _q5_k,
    TensorType.Q6_K: _q6_k,
}
