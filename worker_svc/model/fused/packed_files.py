"""Files of packed weights in the private cache, one for a model, which later starts map instead of packing again.

A file: a line with this format's name and the digest and length of the header, the header as JSON, then the
weights, from a multiple of 4096 on. Not here: what is in a key, and which modules the weights belong to.
"""

import hashlib
import json
import logging
import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from paged_kernels.host_memory import file_bytes
from paged_kernels.program import PackedForm, PackedWeights
from worker_svc.model.kept_files import complete_file, keep_newest

log = logging.getLogger(__name__)

MOST_BYTES = 32 * 2**30
"""Bytes of all files; those that were used longest ago are deleted."""
_MOST_FILES = 256
_FORMAT = "quire-packed-2"
_FIRST_LINE = len(f"{_FORMAT} {'0' * 64} {'0' * 12}\n")
_PAGE, _ALIGNMENT = 4096, 64
_WORDS = _PAGE // 8


@dataclass(frozen=True, slots=True)
class Pack:
    """Packed weights, and the modules that they merge, side by side: their names, and how many columns each has.

    Biases are not stored.
    """

    names: tuple[str, ...]
    columns: tuple[int, ...]
    weights: PackedWeights


@dataclass(frozen=True, slots=True)
class PackedFiles:
    """Packed weights by key. A key stands for everything that determines their bytes. Problems are logged, never raised."""

    folder: Path

    def load(self, key: str) -> Sequence[Pack] | None:
        """Map the weights that were saved under `key`; None if there are none that are whole."""
        path = self._path(key)
        try:
            found = _mapped(path, key)
            os.utime(path)
        except FileNotFoundError:
            return None
        except (OSError, ValueError, LookupError, TypeError, RuntimeError) as error:
            log.warning("%s is damaged, the weights are packed again: %s", path, error)
            return None
        log.info("packed weights are mapped from %s", path)
        return found

    def save(self, key: str, packs: Sequence[Pack]) -> None:
        """Write the weights, unless they take more than half of what is free on the disk, or the whole cache."""
        try:
            size = sum(_aligned(pack.weights.data.nbytes, _ALIGNMENT) for pack in packs)
            room = min(MOST_BYTES, shutil.disk_usage(self.folder).free // 2)
            if size > room:
                log.info("packed weights are not kept: %d MiB, and there is room for %d", size >> 20, room >> 20)
                return
            _write(self._path(key), key, packs)
            keep_newest(self.folder, most_bytes=MOST_BYTES, most_files=_MOST_FILES)
        except OSError as error:
            log.warning("packed weights cannot be kept in %s, so the next start packs again: %s", self.folder, error)

    def _path(self, key: str) -> Path:
        return self.folder / f"{key[:32]}.packed"


def _aligned(count: int, to: int) -> int:
    return -(-count // to) * to


# --- writing ------------------------------------------------------------------------------------------------------------


def _write(path: Path, key: str, packs: Sequence[Pack]) -> None:
    entries: list[dict[str, Any]] = []
    end = 0
    for pack in packs:
        entries.append(_entry(pack, end))
        end = _aligned(end + pack.weights.data.nbytes, _ALIGNMENT)
    header = json.dumps({"key": key, "bytes": end, "weights": entries}).encode()
    begin = _aligned(_FIRST_LINE + len(header), _PAGE)
    with complete_file(path) as file:
        file.write(f"{_FORMAT} {hashlib.sha256(header).hexdigest()} {len(header):012}\n".encode() + header)
        for entry, pack in zip(entries, packs, strict=True):
            file.seek(begin + entry["begin"])
            file.write(pack.weights.data.numpy().data)
        file.truncate(begin + end)


def _entry(pack: Pack, begin: int) -> dict[str, Any]:
    weights = pack.weights
    return {
        "names": pack.names,
        "columns": pack.columns,
        "depth": weights.depth,
        "dtype": str(weights.dtype).removeprefix("torch."),
        "form": asdict(weights.form),
        "begin": begin,
        "bytes": weights.data.nbytes,
        "checksum": checksum(weights.data),
    }


# --- reading ------------------------------------------------------------------------------------------------------------


def _mapped(path: Path, key: str) -> list[Pack]:
    """Raises ValueError and others if the file is damaged or another one."""
    with path.open("rb") as file:
        name, digest, length = file.readline(_FIRST_LINE).decode("ascii").split()
        header = file.read(int(length))
        data = file_bytes(file)
    if name != _FORMAT or hashlib.sha256(header).hexdigest() != digest:
        raise ValueError("its header is damaged")
    found = json.loads(header)
    begin = _aligned(_FIRST_LINE + len(header), _PAGE)
    if found["key"] != key or len(data) != begin + found["bytes"]:
        raise ValueError(f"it has {len(data)} bytes or a key that do not fit its name")
    data = data[begin:]
    return [_pack(entry, data) for entry in found["weights"]]


def _pack(entry: Mapping[str, Any], whole: torch.Tensor) -> Pack:
    data = whole[entry["begin"] : entry["begin"] + entry["bytes"]]
    if checksum(data) != entry["checksum"]:
        raise ValueError(f"the weights of {entry['names'][0]} are damaged")
    dtype, form = getattr(torch, entry["dtype"]), PackedForm(**entry["form"])
    weights = PackedWeights(sum(entry["columns"]), entry["depth"], dtype, data, form=form)
    return Pack(tuple(entry["names"]), tuple(entry["columns"]), weights)


def checksum(data: torch.Tensor) -> str:
    """Digest (hex) of sums of pages of uint8 [n], n a multiple of 8.

    Finds damage at the speed of memory; no protection from forgery.
    """
    words = data.view(torch.int64)
    whole = len(words) // _WORDS * _WORDS
    sums = words[:whole].view(-1, _WORDS).sum(1)
    return hashlib.sha256(sums.numpy().tobytes() + words[whole:].numpy().tobytes()).hexdigest()
