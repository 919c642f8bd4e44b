"""Verify a written safetensors file from its bytes: a JSON header followed by the tensors."""

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from quire_tools.convert.isolated import TensorFacts
from svc_common.errors import Internal
from worker_svc.model.stored_weights import header_of

_PIECE = 1 << 22
# safetensors' names of torch's dtypes.
_DTYPES = {
    "float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16", "int64": "I64", "int32": "I32", "int16": "I16",
    "int8": "I8", "uint8": "U8", "bool": "BOOL", "uint16": "U16", "uint32": "U32", "uint64": "U64", "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2", "complex64": "C64",
}  # fmt: skip


def check(path: Path, expected: Mapping[str, TensorFacts]) -> int:
    """Check that the tensors in `path` equal `expected`; returns their number of bytes. Raises Internal if one differs."""
    entries, start = header_of(path)
    if entries.keys() != expected.keys():
        raise _wrong(path, "other tensors than were read")
    total = 0
    with path.open("rb") as file:
        for name, facts in expected.items():
            entry = entries[name]
            begin, end = entry["data_offsets"]
            if (entry["dtype"], tuple(entry["shape"])) != (_DTYPES.get(facts.dtype), facts.shape):
                raise _wrong(path, f"{name} with another type or shape")
            if _digest(file, start + begin, end - begin) != facts.sha256:
                raise _wrong(path, f"{name} with other bytes")
            total += end - begin
    return total


def _digest(file: Any, start: int, length: int) -> str:
    found = hashlib.sha256()
    file.seek(start)
    while length > 0:
        piece = file.read(min(length, _PIECE))
        if not piece:
            break
        found.update(piece)
        length -= len(piece)
    return found.hexdigest()


def _wrong(path: Path, what: str) -> Internal:
    return Internal(f"{path.name} was written with {what}; it is not kept", reason="CONVERSION_WRONG")
