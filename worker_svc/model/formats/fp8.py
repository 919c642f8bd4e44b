"""quantization_config of FP8 checkpoints (quant_method "fp8"), as DeepSeek and transformers write it."""

from collections.abc import Mapping
from typing import Any

from worker_svc.model.formats.fields import Allowed, check_fields
from worker_svc.model.formats.forms import Layout, MatrixForm, UniformFormat, UnsupportedWeights

_WHAT = "FP8 weights"
_DEFAULT_BLOCK = [128, 128]
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
    """The format. Raises UnsupportedWeights naming the field that is not supported."""
    block = given.get("weight_block_size", _DEFAULT_BLOCK)
    if block is not None and not _is_block(block):
        raise UnsupportedWeights(
            f"has {_WHAT} with weight_block_size={block!r} in quantization_config: it must be two sizes or null"
        )
    check_fields(given, _FIELDS, _WHAT)
    return UniformFormat("fp8", MatrixForm(Layout.FP8_BLOCKS, 8, (0, 0) if block is None else (block[0], block[1])))


def _is_block(value: object) -> bool:
    return isinstance(value, list) and len(value) == 2 and all(isinstance(size, int) and size > 0 for size in value)
