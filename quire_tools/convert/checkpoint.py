"""Convert a whole checkpoint: find its files, convert and check each, copy the rest, and put all in place at the end."""

import fnmatch
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from quire_tools.convert.isolated import Opened, TensorFacts, convert_file
from svc_common.errors import ConfigError, FailedPrecondition, Internal
from worker_svc.model.stored_weights import header_of

_INDEX = "pytorch_model.bin.index.json"
_PICKLED = ("pytorch_model*.bin", "*.pth", "*.pt", "*.ckpt", "*.bin")
_NO_WEIGHTS = ("training_args*", "optimizer*", "scheduler*", "rng_state*", "scaler*")
_COPIED = ("*.json", "*.jinja", "tokenizer.model", "*.txt", "*.md", "LICENSE*", "NOTICE*")
_NEW_INDEX = "model.safetensors.index.json"


@dataclass(slots=True)
class Converted:
    """Result of a conversion. `notes`: warnings for the user."""

    num_tensors: int = 0
    num_bytes: int = 0
    files: list[str] = field(default_factory=list)
    copied: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    network_cut: bool = True


def pickled_files(source: Path) -> list[Path]:
    """Pickled files of a checkpoint (a folder, or one file). Raises ConfigError describing what is there instead."""
    if source.is_file():
        return [source]
    if not source.is_dir():
        raise ConfigError(f"SRC: there is no {source}", reason="MODEL_NOT_FOUND")
    index = source / _INDEX
    if index.is_file():
        return _indexed(index)
    for form in _PICKLED:
        found = sorted(file for file in source.glob(form) if not _matches(file.name, _NO_WEIGHTS))
        if found:
            return found
    ready = sorted(source.glob("*.safetensors"))
    what = f"has {ready[0].name}: it is safetensors already" if ready else "has no pickled weights (pytorch_model*.bin)"
    raise ConfigError(f"SRC: {source} {what}", reason="NOTHING_TO_CONVERT")


def _indexed(index: Path) -> list[Path]:
    try:
        names = sorted(
            {Path(str(name)).name for name in json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()}
        )
    except (OSError, ValueError, KeyError, AttributeError) as error:
        raise ConfigError(f"SRC: {index} cannot be read: {error}", reason="MODEL_INCOMPLETE") from None
    missing = [name for name in names if not (index.parent / name).is_file()]
    if missing or not names:
        raise ConfigError(f"SRC: {index.parent} lacks {', '.join(missing) or 'weights'}", reason="MODEL_INCOMPLETE")
    return [index.parent / name for name in names]


def check_destination(source: Path, destination: Path, *, force: bool) -> None:
    """Raise ConfigError if `destination` is a file, the source, or a folder that is not empty (except with `force`)."""
    if destination.is_file():
        raise ConfigError(f"DST: {destination} is a file; name a folder", reason="DESTINATION_EXISTS")
    folder = source if source.is_dir() else source.parent
    if destination.exists() and folder.samefile(destination):
        raise ConfigError("DST: is SRC; name another folder", reason="DESTINATION_EXISTS")
    if destination.is_dir() and any(destination.iterdir()) and not force:
        raise ConfigError(
            f"DST: {destination} is not empty; name another folder, or write over it with --force",
            reason="DESTINATION_EXISTS",
        )


def convert(source: Path, destination: Path, *, force: bool, on_bytes: Callable[[int], None]) -> Converted:
    """Convert a checkpoint; the destination appears only when complete and checked.

    Raises the errors of `pickled_files`, `check_destination` and the conversion of the files.
    """
    files = pickled_files(source)
    check_destination(source, destination, force=force)
    destination.parent.mkdir(parents=True, exist_ok=True)
    made = Converted()
    with tempfile.TemporaryDirectory(prefix=f".{destination.name}.", dir=destination.parent) as name:
        folder = Path(name)
        homes: dict[str, str] = {}
        for number, file in enumerate(files, 1):
            target = folder / _name(number, len(files))
            opened = convert_file(file, target, on_bytes)
            _take(made, homes, opened, target)
        if len(files) > 1:
            _write_index(folder / _NEW_INDEX, homes, made.num_bytes)
        _copy_rest(source, folder, made)
        _put_in_place(folder, destination)
    return made


def _name(number: int, count: int) -> str:
    return "model.safetensors" if count == 1 else f"model-{number:05d}-of-{count:05d}.safetensors"


def _take(made: Converted, homes: dict[str, str], opened: Opened, target: Path) -> None:
    made.num_bytes += check(target, opened.tensors)
    twice = sorted(opened.tensors.keys() & homes.keys())
    if twice:
        raise FailedPrecondition(
            f"{twice[0]} is in two of the files: these are not shards of one checkpoint; name the file that you want",
            reason="CONVERSION_REFUSED",
        )
    homes.update(dict.fromkeys(opened.tensors, target.name))
    made.num_tensors += len(opened.tensors)
    made.files.append(target.name)
    made.notes += opened.notes
    made.network_cut = made.network_cut and opened.network_cut


def _write_index(path: Path, homes: dict[str, str], num_bytes: int) -> None:
    content: dict[str, Any] = {"metadata": {"total_size": num_bytes}, "weight_map": dict(sorted(homes.items()))}
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def _copy_rest(source: Path, folder: Path, made: Converted) -> None:
    """Copy configuration, tokenizer and texts for readers; no code."""
    origin = source if source.is_dir() else source.parent
    for file in sorted(origin.iterdir()):
        if file.is_file() and _matches(file.name, _COPIED) and not file.name.endswith(".index.json"):
            shutil.copyfile(file, folder / file.name)
            made.copied.append(file.name)
    for needed in ("config.json", "tokenizer.json"):
        if needed not in made.copied:
            made.notes.append(f"SRC has no {needed}, which a worker needs")


def _put_in_place(folder: Path, destination: Path) -> None:
    destination.mkdir(exist_ok=True)
    for old in [*destination.glob("*.safetensors"), destination / _NEW_INDEX]:
        old.unlink(missing_ok=True)
    for file in folder.iterdir():
        os.replace(file, destination / file.name)


def _matches(name: str, forms: tuple[str, ...]) -> bool:
    return any(fnmatch.fnmatch(name, form) for form in forms)


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
