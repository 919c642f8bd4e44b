"""The folder of a PEFT adapter: adapter_config.json and adapter_model.safetensors. Independent of the model.

Only safetensors are read: a pickled file can run any code when it is opened.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from worker_svc.adapters.config import AdapterConfig, read_config, refused, unsupported
from worker_svc.model.sharding.shards import WHOLE, Shard

CONFIG_FILE, WEIGHTS_FILE = "adapter_config.json", "adapter_model.safetensors"
_PICKLED = "adapter_model.bin"
_CONVERT = (
    "Convert it once, in an isolated environment: PeftModel.from_pretrained(BASE, FOLDER).save_pretrained(NEW_FOLDER, "
    "safe_serialization=True)"
)
_PREFIX = "base_model.model."
_DOWN, _UP = ".lora_A.weight", ".lora_B.weight"
# Name parts that identify other kinds of adapter weights.
_OTHERS = {"lora_magnitude_vector": "is DoRA", "lora_embedding_": "changes an embedding", ".bias": "has biases"}
_FLOATS = {"F64", "F32", "F16", "BF16"}


@dataclass(frozen=True, slots=True)
class PairShapes:
    """Stored shapes of one module's two matrices: `down` (lora_A) [rank, in], `up` (lora_B) [out, rank]."""

    down: tuple[int, ...]
    up: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class AdapterFolder:
    """An adapter on disk with valid headers. `pairs`: by name of the module in the base model."""

    path: Path
    config: AdapterConfig
    pairs: Mapping[str, PairShapes]
    base: str
    """Name of the base model it was trained on, for messages; may be empty."""
    shard: Shard = WHOLE

    def part(self, shard: Shard) -> "AdapterFolder":
        """One rank's part of the adapter, which must not be one already."""
        pairs = {name: PairShapes(*shard.pair(name, pair.down, pair.up)) for name, pair in self.pairs.items()}
        return replace(self, pairs=pairs, shard=shard)

    def digest(self) -> str:
        """SHA-256 (hex) over both files."""
        total = hashlib.sha256((self.path / CONFIG_FILE).read_bytes())
        with (self.path / WEIGHTS_FILE).open("rb") as file:
            while chunk := file.read(2**20):
                total.update(chunk)
        return total.hexdigest()

    def matrices(self) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
        """(module, down, up) in name order, as stored, on the host."""
        with _opened(self.path) as file:
            for module in sorted(self.pairs):
                down, up = (file.get_tensor(f"{_PREFIX}{module}{end}") for end in (_DOWN, _UP))
                yield module, *self.shard.cut_pair(module, down, up)


def open_adapter(path: Path) -> AdapterFolder:
    """Check a folder. Raises InvalidArgument saying what is missing, broken or not supported."""
    if not path.is_dir():
        raise refused("ADAPTER_NOT_FOUND", f"{path} is not a folder on the worker; give the folder of a PEFT adapter")
    raw = _read_json(path)
    config = read_config(raw)
    if not (path / WEIGHTS_FILE).is_file():
        if (path / _PICKLED).is_file():
            raise refused(
                "PICKLED_WEIGHTS", f"{path} has only pickled weights ({_PICKLED}), which are not read. {_CONVERT}"
            )
        raise refused("ADAPTER_INCOMPLETE", f"{path} has no {WEIGHTS_FILE}")
    with _opened(path) as file:
        pairs = _pairs({key: _shape(file, key) for key in list(file.keys())})
    return AdapterFolder(path, config, pairs, str(raw.get("base_model_name_or_path") or ""))


def _read_json(path: Path) -> dict[str, Any]:
    if not (path / CONFIG_FILE).is_file():
        raise refused("ADAPTER_INCOMPLETE", f"{path} has no {CONFIG_FILE}; give the folder that contains it")
    try:
        value = json.loads((path / CONFIG_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise refused("ADAPTER_INVALID", f"{path / CONFIG_FILE} cannot be read: {error}") from error
    if not isinstance(value, dict):
        raise refused("ADAPTER_INVALID", f"{path / CONFIG_FILE} does not contain a JSON object")
    return value


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    file = path / WEIGHTS_FILE
    try:
        with safe_open(file, framework="pt") as opened:
            yield opened
    except (SafetensorError, OSError) as error:
        raise refused("ADAPTER_INVALID", f"{file} cannot be read: {error}") from error


def _shape(file: Any, key: str) -> tuple[int, ...]:
    stored = file.get_slice(key)
    if stored.get_dtype() not in _FLOATS:
        raise refused(
            "ADAPTER_INVALID", f"{key} has elements of type {stored.get_dtype()}; they must be floating point"
        )
    return tuple(stored.get_shape())


def _pairs(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, PairShapes]:
    """Both matrices of each module. Refuses any other name in the file."""
    for key in shapes:
        if not key.startswith(_PREFIX) or not key.endswith((_DOWN, _UP)):
            what = next(
                (what for part, what in _OTHERS.items() if part in key), "has weights that plain LoRA does not have"
            )
            raise unsupported(f"{what} ({key})")
    modules = sorted({key.removeprefix(_PREFIX).removesuffix(_DOWN).removesuffix(_UP) for key in shapes})
    if not modules:
        raise refused("ADAPTER_INCOMPLETE", f"{WEIGHTS_FILE} contains no weights")
    for module in modules:
        for end in (_DOWN, _UP):
            if f"{_PREFIX}{module}{end}" not in shapes:
                raise refused("ADAPTER_INCOMPLETE", f"{WEIGHTS_FILE} lacks {_PREFIX}{module}{end}")
    return {m: PairShapes(shapes[f"{_PREFIX}{m}{_DOWN}"], shapes[f"{_PREFIX}{m}{_UP}"]) for m in modules}
