"""Which quantization_config is read by what, and that of FP8 checkpoints, as DeepSeek, transformers and AutoFP8 write it.

Does not import torch.
"""

from collections.abc import Callable, Mapping
from typing import Any

from worker_svc.model.formats.compressed_tensors import compressed_tensors
from worker_svc.model.formats.fields import Allowed, check_fields
from worker_svc.model.formats.forms import Layout, MatrixForm, UniformFormat, UnsupportedWeights, WeightFormat
from worker_svc.model.formats.gptq_and_awq import awq, gptq

_WHAT = "FP8 weights"
_DEFAULT_BLOCK = [128, 128]
_HEAD = "lm_head"
_SKIPPED = ("modules_to_not_convert", "ignored_layers")
_FIELDS: Allowed = {
    "quant_method": ("fp8",),
    "fmt": ("e4m3",),
    "expert_dtype": ("fp8",),
    "scale_fmt": ("float", "ue8m0"),
    "modules_to_convert": (),
    "activation_scheme": None,
    "weight_block_size": None,
    "modules_to_not_convert": None,
    "ignored_layers": None,
    "dequantize": None,
}


def fp8(given: Mapping[str, Any]) -> UniformFormat:
    """The format. Raises UnsupportedWeights naming the field that is not supported.

    Where `weight_block_size` is missing, matrices may have one scale each, as AutoFP8 stores them.
    """
    block = given.get("weight_block_size", _DEFAULT_BLOCK)
    if block is not None and not _is_block(block):
        raise UnsupportedWeights(
            f"has {_WHAT} with weight_block_size={block!r} in quantization_config: it must be two sizes or null"
        )
    check_fields(given, _FIELDS, _WHAT)
    form = MatrixForm(Layout.FP8_BLOCKS, 8, (0, 0) if block is None else (block[0], block[1]))
    skipped = [name for field in _SKIPPED for name in given.get(field) or []]
    instead = None if given.get("weight_block_size") else MatrixForm(Layout.FP8, 8, (0, 0))
    return UniformFormat("fp8", form, (_HEAD, *map(str, skipped)), instead)


def _is_block(value: object) -> bool:
    return isinstance(value, list) and len(value) == 2 and all(isinstance(size, int) and size > 0 for size in value)


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
