"""Which quantization_config is read by what. Does not import torch."""

from collections.abc import Callable, Mapping
from typing import Any

from worker_svc.model.formats.awq import awq
from worker_svc.model.formats.compressed_tensors import compressed_tensors
from worker_svc.model.formats.forms import UnsupportedWeights, WeightFormat
from worker_svc.model.formats.fp8 import fp8
from worker_svc.model.formats.gptq import gptq

_READERS: dict[str, Callable[[Mapping[str, Any]], WeightFormat]] = {
    "fp8": fp8,
    "awq": awq,
    "gptq": gptq,
    "compressed-tensors": compressed_tensors,
}
_EXPERTS = "mxfp4"  # of gpt-oss


def format_of(given: Any) -> WeightFormat:
    """The format that a quantization_config describes. Raises UnsupportedWeights."""
    method = given.get("quant_method") if isinstance(given, dict) else None
    if method is None:
        raise UnsupportedWeights(
            "has a quantization_config without quant_method, so the format of its weights is unknown"
        )
    if method == _EXPERTS:
        raise UnsupportedWeights(
            f"has experts quantized with quant_method {method!r}, in fused tensors (*_blocks, *_scales) that are not supported"
        )
    if method not in _READERS:
        raise UnsupportedWeights(f"has weights quantized with quant_method {method!r}, which is not supported")
    return _READERS[method](given)
