"""Checks how a checkpoint's weights are stored, from config.json and file headers, before any weight is read.

Supported are plain floating-point weights, and FP8 by its dequantized values: each value times the scale of its
block (or matrix), in the compute dtype. Does not import torch, so that commands can use it too.
"""

import json
import struct
from collections.abc import Iterable, Iterator, Mapping
from math import prod
from pathlib import Path
from typing import Any

TO_DO = (
    "take the model's unquantized checkpoint (--quantization int8 or int4 makes its weights small on a CPU), or one in FP8 "
    "(quant_method 'fp8')"
)
_LENGTH = struct.Struct("<Q")
_MAX_HEADER = 100_000_000
_PLAIN = {"F64", "F32", "F16", "BF16"}
_FP8 = "F8_E4M3"
_SCALES = "_scale_inv"
_DEFAULT_BLOCK = [128, 128]
_FIELDS = ("quantization_config", "compression_config")
_FILES = {"hf_quant_config.json": "modelopt", "quantize_config.json": "gptq"}
# FP8 config fields and their allowed values; None = any value, since dequantized values do not depend on it.
_FP8_FIELDS: dict[str, tuple[object, ...] | None] = {
    "quant_method": ("fp8",),
    "fmt": (None, "e4m3"),
    "expert_dtype": (None, "fp8"),
    "scale_fmt": (None, "float", "ue8m0"),
    "modules_to_convert": (None, []),
    "activation_scheme": None,
    "weight_block_size": None,
    "modules_to_not_convert": None,
    "ignored_layers": None,
    "dequantize": None,
}

Entries = dict[str, dict[str, Any]]


def header_of(path: Path) -> tuple[Entries, int]:
    """Entries by tensor name (`dtype`, `shape`, `data_offsets`), and the offset of the first tensor.

    Raises ValueError if the file is not safetensors.
    """
    with path.open("rb") as file:
        (length,) = _LENGTH.unpack(file.read(_LENGTH.size).ljust(_LENGTH.size, b"\0"))
        if not 2 <= length <= _MAX_HEADER:
            raise ValueError(f"{path} is not a safetensors file")
        entries = json.loads(file.read(length))
    entries.pop("__metadata__", None)
    return entries, _LENGTH.size + length


def entries_of(files: Iterable[Path]) -> Entries:
    """Header entries of all files."""
    return {name: entry for file in files for name, entry in header_of(file)[0].items()}


def num_elements(entries: Entries) -> int:
    """Number of weight elements of a checkpoint, without quantization scales."""
    return sum(prod(entry["shape"]) for name, entry in entries.items() if not name.endswith(_SCALES))


# --- config.json --------------------------------------------------------------------------------------------------------


def quantization(config: Mapping[str, Any], folder: Path) -> Any:
    """The quantization settings from config.json, its text part or a file beside it; None if there are none."""
    parts = [config, *(part for part in config.values() if isinstance(part, dict))]
    said = [part[field] for part in parts for field in _FIELDS if part.get(field) is not None]
    beside = [{"quant_method": method} for name, method in _FILES.items() if (folder / name).is_file()]
    return next(iter(said + beside), None)


def problem_of(said: Any) -> str:
    """Why weights with this `quantization` cannot be served; empty if they can."""
    if said is None:
        return ""
    method = said.get("quant_method") if isinstance(said, dict) else None
    if method is None:
        return "has a quantization_config without quant_method, so the format of its weights is unknown"
    if method != "fp8":
        return f"has weights quantized with quant_method {method!r}, which is not supported"
    block = _block_of(said)
    if block is not None and not (
        isinstance(block, list) and len(block) == 2 and all(_is_size(size) for size in block)
    ):
        return f"has FP8 weights with weight_block_size={block!r} in quantization_config: it must be two sizes or null"
    for field, value in said.items():
        allowed = _FP8_FIELDS.get(field, (None,))
        if allowed is not None and value not in allowed:
            return f"has FP8 weights with {field}={value!r} in quantization_config, which is not supported"
    return ""


def _block_of(said: Mapping[str, Any]) -> Any:
    """Rows and columns of a block; None if a matrix has one scale."""
    return said.get("weight_block_size", _DEFAULT_BLOCK)


def _is_size(value: object) -> bool:
    return isinstance(value, int) and value > 0


# --- file headers -------------------------------------------------------------------------------------------------------


def problem_of_weights(said: Any, entries: Entries) -> str:
    """Why weights stored this way cannot be served under this `quantization`; empty if they can."""
    if said is None:
        odd = (name for name in entries if name.endswith(".weight") and entries[name]["dtype"] not in _PLAIN)
        return next((f"stores {name} as {entries[name]['dtype']}, and nothing says how to read it" for name in odd), "")
    return next(_problems_of_fp8(_block_of(said), entries), "")


def _problems_of_fp8(block: Any, entries: Entries) -> Iterator[str]:
    for name, entry in entries.items():
        scales = entries.get(f"{name}{_SCALES}")
        if entry["dtype"] == _FP8 and scales is None:
            yield f"has no scales for {name}, which is stored as {_FP8}"
        elif entry["dtype"] == _FP8 and scales is not None and not _fits(entry["shape"], scales["shape"], block):
            size = "one for the matrix" if block is None else f"blocks of {' x '.join(map(str, block))}"
            yield f"has scales of {scales['shape']} for {name} of {entry['shape']}: not {size}"
        elif name.endswith(".weight") and entry["dtype"] not in {*_PLAIN, _FP8}:
            yield f"stores {name} as {entry['dtype']}, beside weights in FP8"


def _fits(shape: list[int], scales: list[int], block: Any) -> bool:
    """True if scales match the shape.

    Whole blocks only: otherwise transformers guesses the block size from the number of scales.
    """
    if block is None:
        return prod(scales) == prod(shape[:-2])
    return len(scales) == len(shape) and [of * size for of, size in zip(scales[-2:], block, strict=True)] == shape[-2:]
