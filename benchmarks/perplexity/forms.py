"""The formats: what stores the built-in model in each, and what computes the perplexity that it should have.

Not here: compressed-tensors' side, which runs in its own environment (`with_compressed_tensors.py`).
"""

import ctypes
import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGML_QUANT_SIZES
from gguf import GGMLQuantizationType as Kind

from benchmarks.compare.engines.environments import PeerEnvironment
from benchmarks.perplexity.reference import Windows, perplexity
from quire.built_in_model import default_model
from tests.support.gguf_files import Quantizer, to_gguf
from tests.support.quantized_files import Stored, awq, fp8_blocks, gptq, stored_so

_COMPRESSED, _GGML = "compressed-tensors", "ggml"
_CHILD = "benchmarks.perplexity.with_compressed_tensors"
_BY_GGUF = (Kind.Q8_0, Kind.Q5_1, Kind.Q5_0, Kind.Q4_1, Kind.Q4_0)
_BY_GGML = {Kind.Q6_K: Kind.Q8_0, Kind.Q5_K: Kind.Q5_1, Kind.Q4_K: Kind.Q5_0}
"""With llama.cpp's choice for matrices whose depth is no multiple of 256."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where a format is stored, and what it is measured with. `peer`: environment of its package."""

    folder: Path
    windows: Windows
    peer: PeerEnvironment

    def source(self) -> Path:
        """A copy of the built-in model."""
        return Path(shutil.copytree(default_model(), self.folder / "source"))


def versions(peers: Path) -> list[str]:
    """Names and versions of the references' packages that are installed."""
    packages = {_COMPRESSED: "compressed_tensors", _GGML: "pywhispercpp"}
    patterns = {name: f"lib/python*/site-packages/{package}-*.dist-info" for name, package in packages.items()}
    found = [PeerEnvironment(peers, name).file(pattern) for name, pattern in patterns.items()]
    ours = [f"{name}-{metadata.version(name)}" for name in ("gguf", "transformers")]
    return ours + [path.name.removesuffix(".dist-info") for path in found if path]


Store = Callable[[Place], tuple[Path, float]]
"""Store the model: the checkpoint, and the reference's perplexity."""


@dataclass(frozen=True, slots=True)
class Form:
    """A format. `reference`: what computes its perplexity. `peer`: environment that is needed; "" = none.

    `settings`: of `quire.LLM`. `is_limited`: False if Quire's perplexity may be another one, because Quire rounds the weights.
    """

    store: Store
    reference: str
    peer: str = ""
    settings: Mapping[str, Any] = field(default_factory=dict)
    is_limited: bool = True


def forms() -> dict[str, Form]:
    """All formats by name."""
    int4, int8 = {"quantization": "int4"}, {"quantization": "int8"}
    return {
        "bfloat16": Form(_unchanged, "transformers"),
        **{name: Form(_by_package(scheme), _reference(scheme), _COMPRESSED) for name, scheme in _SCHEMES.items()},
        **{f"GGUF {kind.name}": Form(_gguf(kind), "gguf") for kind in _BY_GGUF},
        **{f"GGUF {kind.name}": Form(_gguf(kind), "ggml and gguf", _GGML) for kind in _BY_GGML},
        **{name: Form(_converted(stored), _COMPRESSED, _COMPRESSED) for name, stored in _CONVERTED.items()},
        **{name: Form(_packed(stored), "values packed") for name, stored in _PACKED.items()},
        "--quantization int8": Form(_unchanged, "bfloat16", settings=int8, is_limited=False),
        "--kv-cache-dtype int8": Form(_unchanged, "bfloat16", settings={"kv_cache_dtype": "int8"}),
        "--kv-cache-dtype fp8": Form(_unchanged, "bfloat16", settings={"kv_cache_dtype": "fp8"}),
        "--quantization int4": Form(_unchanged, "bfloat16", settings=int4, is_limited=False),
    }


_BUT_RAGGED = {"ignore": ["re:.*down_proj"]}
"""704 depths are no multiple of 128."""
_SCHEMES: Mapping[str, Mapping[str, Any]] = {
    "W4A16, groups of 32": {"preset": "W4A16", "weights": {"group_size": 32}},
    "W4A16, groups of 32, zero points": {"preset": "W4A16_ASYM", "weights": {"group_size": 32}},
    "W4A16, groups of 128": {"preset": "W4A16", **_BUT_RAGGED},
    "W4A16, groups of 128, zero points": {"preset": "W4A16_ASYM", **_BUT_RAGGED},
    "W4A16, columns": {"preset": "W4A16", "weights": {"strategy": "channel", "group_size": None}},
    "W8A16, groups of 128": {"preset": "W8A16", **_BUT_RAGGED},
    "W8A8": {"preset": "W8A8", "rounds_activations": True},
    "W8A8, zero points": {"preset": "W8A8", "weights": {"symmetric": False}, "rounds_activations": True},
    "FP8, columns": {"preset": "FP8_DYNAMIC", "rounds_activations": True},
    "FP8, matrices": {"preset": "FP8_DYNAMIC", "weights": {"strategy": "tensor"}},
    "FP8, blocks": {"preset": "FP8_BLOCK"},
    "MXFP8": {"preset": "MXFP8A16"},
    "MXFP4": {"preset": "MXFP4A16"},
    "NVFP4": {"preset": "NVFP4A16"},
}
_CONVERTED = {
    "AWQ, groups of 64": awq(64),
    "AWQ, groups of 32": awq(32),
    "FP8 of DeepSeek, blocks": fp8_blocks((64, 64)),
}
_PACKED = {
    "GPTQ, groups of 64": gptq(4, 64, sym=True),
    "GPTQ, groups of 32, zero points": gptq(4, 32, sym=False),
    "GPTQ v2, zero points": gptq(4, 64, sym=False, v2=True),
    "GPTQ, order of activations": gptq(4, 32, sym=True, act_order=True),
    "GPTQ, 8 bits, columns": gptq(8, -1, sym=True),
}


def _reference(scheme: Mapping[str, Any]) -> str:
    return f"{_COMPRESSED}, rounds activations" if "rounds_activations" in scheme else _COMPRESSED


def _unchanged(place: Place) -> tuple[Path, float]:
    return default_model(), perplexity(default_model(), place.windows)


def _by_package(scheme: Mapping[str, Any]) -> Store:
    return lambda place: (place.folder / "stored", _call(place, default_model(), json.dumps(scheme)))


def _converted(stored: Stored) -> Store:
    def store(place: Place) -> tuple[Path, float]:
        checkpoint = stored_so(place.source(), place.folder / "packed", stored)
        return checkpoint, _call(place, checkpoint)

    return store


def _call(place: Place, source: Path, *scheme: str) -> float:
    """compressed-tensors' perplexity. Raises RuntimeError if it fails."""
    windows = place.folder / "windows.json"
    windows.write_text(json.dumps(place.windows), encoding="utf-8")
    answer = place.peer.call(_CHILD, [str(source), str(place.folder / "stored"), str(windows), *scheme])
    return float(answer.splitlines()[-1])


def _packed(stored: Stored) -> Store:
    def store(place: Place) -> tuple[Path, float]:
        source = place.source()
        return stored_so(source, place.folder / "packed", stored), perplexity(source, place.windows)

    return store


def _gguf(kind: Kind) -> Store:
    def store(place: Place) -> tuple[Path, float]:
        source = place.source()
        quantize = {"quantizer": _ggml(place.peer)} if kind in _BY_GGML else {}
        depths = {"ffn_down": json.loads((source / "config.json").read_text())["intermediate_size"]}
        size = GGML_QUANT_SIZES[kind][0]

        def kind_of(name: str) -> Kind:
            return _BY_GGML[kind] if depths.get(name.split(".")[-2], 0) % size else kind

        return to_gguf(source, place.folder / "model.gguf", kind_of, **quantize), perplexity(source, place.windows)

    return store


def _ggml(peer: PeerEnvironment) -> Quantizer:
    library = ctypes.CDLL(str(peer.file("lib/python*/site-packages/libggml-base.so")))
    library.ggml_quantize_chunk.restype = ctypes.c_size_t

    def quantize(values: np.ndarray, kind: Kind) -> np.ndarray:
        values = np.ascontiguousarray(values, np.float32)
        (columns, depth), (size, num_bytes) = values.shape, GGML_QUANT_SIZES[kind]
        blocks = np.empty((columns, depth // size * num_bytes), np.uint8)
        places = (ctypes.c_void_p(array.ctypes.data) for array in (values, blocks))
        sizes = (ctypes.c_int64(number) for number in (0, columns, depth))
        library.ggml_quantize_chunk(ctypes.c_int(kind), *places, *sizes, None)
        return blocks

    return quantize
