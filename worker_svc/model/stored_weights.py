"""Checks how a checkpoint's weights are stored, from config.json and file headers, before any weight is read.

Supported are plain floating-point weights, and the quantized ones of `formats`. Does not import torch, so that
commands can use it too.
"""

import json
import struct
from collections.abc import Iterable, Mapping
from math import prod
from pathlib import Path
from typing import Any

from worker_svc.model.formats.form_checks import matrices_of
from worker_svc.model.formats.forms import UnsupportedWeights
from worker_svc.model.formats.registry import format_of

TO_DO = (
    "take the model's unquantized checkpoint (--quantization int8 or int4 makes its weights small on a CPU), or one in a "
    "format that docs/models.md lists"
)
_LENGTH = struct.Struct("<Q")
_MAX_HEADER = 100_000_000
_PLAIN = {"F64", "F32", "F16", "BF16"}
_FIELDS = ("quantization_config", "compression_config")
_FILES = {"hf_quant_config.json": "modelopt", "quantize_config.json": "gptq", "quant_config.json": "awq"}

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
    """Number of weight elements of an unquantized checkpoint."""
    return sum(prod(entry["shape"]) for entry in entries.values())


# --- config.json --------------------------------------------------------------------------------------------------------


def quantization(config: Mapping[str, Any], folder: Path) -> Any:
    """The quantization settings from config.json or its text part, and files beside it; None if there are none.

    A file adds the fields that config.json leaves out.
    """
    parts = [config, *(part for part in config.values() if isinstance(part, dict))]
    said = next((part[field] for part in parts for field in _FIELDS if part.get(field) is not None), None)
    for name, method in _FILES.items():
        if (folder / name).is_file():
            beside = {"quant_method": method, **_object(folder / name)}
            if said is None or (isinstance(said, dict) and said.get("quant_method") == beside["quant_method"]):
                said = beside | (said or {})
    return said


def _object(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


def problem_of(said: Any) -> str:
    """Why weights with this `quantization` cannot be served; empty if they can."""
    try:
        if said is not None:
            format_of(said)
    except UnsupportedWeights as error:
        return str(error)
    return ""


# --- file headers -------------------------------------------------------------------------------------------------------


def problem_of_weights(said: Any, entries: Entries) -> str:
    """Why weights stored this way cannot be served under this `quantization`; empty if they can."""
    if said is None:
        odd = (name for name in entries if name.endswith(".weight") and entries[name]["dtype"] not in _PLAIN)
        return next((f"stores {name} as {entries[name]['dtype']}, and nothing says how to read it" for name in odd), "")
    try:
        matrices_of(format_of(said), entries)
    except UnsupportedWeights as error:
        return str(error)
    return ""
