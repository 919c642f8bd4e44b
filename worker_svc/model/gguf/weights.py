"""Weights of a GGUF file for transformers' class."""

from collections.abc import Callable, Mapping
from functools import partial

import numpy as np
import torch
from gguf.gguf_reader import ReaderTensor
from gguf.quants import dequantize
from transformers import PreTrainedConfig, PreTrainedModel

from paged_kernels.quantized import QuantizedWeight
from worker_svc.model import rotary
from worker_svc.model.gguf.blocks import quantized_weight
from worker_svc.model.gguf.header import QUANTIZED, ROPE_FACTORS, GgufHeader, model_name
from worker_svc.model.weight_reader import Value

_PERMUTED = "llama"
"""Architecture whose queries and keys llama.cpp stores with the two elements of a rotated pair side by side."""


class GgufWeights:
    """`WeightReader` of a file."""

    def __init__(self, header: GgufHeader, config: PreTrainedConfig) -> None:
        self._header, self._config = header, config
        self.num_elements = header.num_elements
        self.is_quantized = self.has_integers = header.is_quantized

    def tensors(self, dtype: torch.dtype) -> Mapping[str, Callable[[], Value]]:
        """See WeightReader."""
        named = {name: tensor for name, tensor in self._header.tensors.items() if model_name(name) is not None}
        return {str(model_name(name)): partial(self._read, name, tensor, dtype) for name, tensor in named.items()}

    def float_shapes(self) -> Mapping[str, tuple[int, int]]:
        """See WeightReader."""
        return {}

    def finish(self, model: PreTrainedModel) -> None:
        """See WeightReader."""
        factors = self._header.tensors.get(ROPE_FACTORS)
        if factors is not None:
            rotary.divide_frequencies(model, torch.from_numpy(np.array(factors.data, np.float32)))

    def _read(self, name: str, tensor: ReaderTensor, dtype: torch.dtype) -> Value:
        return self._in_order(name, _value(tensor, dtype))

    def _in_order(self, name: str, value: Value) -> Value:
        """Undo the order of queries and keys."""
        part = name.split(".")[-2]
        if self._header.architecture != _PERMUTED or part not in {"attn_q", "attn_k"}:
            return value
        heads = self._config.num_attention_heads if part == "attn_q" else self._config.num_key_value_heads
        rows = value.columns if isinstance(value, QuantizedWeight) else len(value)
        order = torch.arange(rows).view(heads, -1, 2).transpose(1, 2).flatten()
        return value.rows(order) if isinstance(value, QuantizedWeight) else value[order]


def _value(tensor: ReaderTensor, dtype: torch.dtype) -> Value:
    if tensor.tensor_type in QUANTIZED and len(tensor.shape) > 1:
        return quantized_weight(tensor.data, tensor.tensor_type, dtype)
    values = dequantize(tensor.data, tensor.tensor_type)
    return torch.from_numpy(np.array(values, np.float32)).to(dtype)
