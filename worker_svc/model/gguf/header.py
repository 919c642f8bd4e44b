"""The header of a GGUF file, and whether a file with such a header can be served. Reads no weights; does not import torch."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType as TensorType
from gguf import GGUFReader
from gguf.gguf_reader import ReaderTensor

from svc_common.errors import ConfigError

SUFFIX = ".gguf"
ROPE_FACTORS = "rope_freqs.weight"
"""Tensor with a divisor for each rotary frequency, by which llama.cpp scales Llama 3's positions."""
ARCHITECTURES = ("llama", "qwen2", "qwen3")
PLAIN = frozenset({TensorType.F32, TensorType.F16, TensorType.BF16})
QUANTIZED = frozenset(
    {
        *(TensorType.Q8_0, TensorType.Q4_0, TensorType.Q4_1, TensorType.Q5_0, TensorType.Q5_1),
        *(TensorType.Q4_K, TensorType.Q5_K, TensorType.Q6_K),
    }
)
_TO_DO = "convert the model again, for example with llama-quantize to Q4_K_M or Q8_0"
_OUTER = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_OF_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


@dataclass(frozen=True, slots=True)
class GgufHeader:
    """Metadata and tensors of a file that can be served. Tensors are mapped into memory, and read when they are used."""

    path: Path
    architecture: str
    metadata: dict[str, Any]
    tensors: dict[str, ReaderTensor]

    @property
    def own(self) -> dict[str, Any]:
        """Metadata of the architecture, without its prefix."""
        prefix = f"{self.architecture}."
        return {key.removeprefix(prefix): value for key, value in self.metadata.items() if key.startswith(prefix)}

    @property
    def is_quantized(self) -> bool:
        """True if some tensors are quantized."""
        return any(tensor.tensor_type in QUANTIZED for tensor in self.tensors.values())

    @property
    def num_elements(self) -> int:
        """Number of weight elements."""
        return sum(int(tensor.n_elements) for tensor in self.tensors.values())


class _Reader(GGUFReader):
    """Reads a header in a third of the time: slices of a plain array cost less than those of a mapped file, and it makes many."""

    @property
    def data(self) -> np.ndarray:
        """The file's bytes."""
        return self._data

    @data.setter
    def data(self, mapped: np.ndarray) -> None:
        self._data = mapped.view(np.ndarray)


def open_gguf(path: Path) -> GgufHeader:
    """The header of a file. Raises ConfigError if it is no GGUF file, or of a kind that cannot be served."""
    try:
        reader = _Reader(path)
        metadata = {key: field.contents() for key, field in reader.fields.items()}
    except (OSError, ValueError, KeyError, IndexError) as error:
        raise problem("MODEL_UNREADABLE", path, f"cannot be read as GGUF: {error}") from error
    architecture = str(metadata.get("general.architecture"))
    header = GgufHeader(path, architecture, metadata, {tensor.name: tensor for tensor in reader.tensors})
    _check(header)
    return header


def problem(reason: str, path: Path, what: str) -> ConfigError:
    """The error for a file that cannot be served."""
    return ConfigError(f"--model {path} {what}", reason=reason, metadata={"model": str(path)})


def model_name(tensor: str) -> str | None:
    """Name in transformers' class of a tensor; None if its role is not known."""
    stem, _, kind = tensor.rpartition(".")
    if kind not in {"weight", "bias"}:
        return None
    if stem in _OUTER:
        return f"{_OUTER[stem]}.{kind}"
    block, _, part = stem.partition(".")[2].partition(".")
    if not stem.startswith("blk.") or not block.isdigit() or part not in _OF_LAYER:
        return None
    return f"model.layers.{block}.{_OF_LAYER[part]}.{kind}"


def _check(header: GgufHeader) -> None:
    path = header.path
    if header.architecture not in ARCHITECTURES:
        known = ", ".join(ARCHITECTURES)
        what = f"has the architecture {header.architecture!r}; GGUF files are served of {known}. Use the model's safetensors"
        raise problem("MODEL_UNSUPPORTED", path, what)
    if int(header.metadata.get("split.count", 0)) > 1:
        raise problem("MODEL_UNSUPPORTED", path, "is one part of several; join them with llama-gguf-split --merge")
    for name, tensor in header.tensors.items():
        if tensor.tensor_type not in PLAIN | QUANTIZED:
            what = f"stores {name} as {tensor.tensor_type.name}, which is not supported; {_TO_DO}"
            raise problem("QUANTIZATION_UNSUPPORTED", path, what)
        if name != ROPE_FACTORS and model_name(name) is None:
            raise problem("MODEL_UNSUPPORTED", path, f"has the tensor {name}, whose role is not known")
    if "token_embd.weight" not in header.tensors:
        raise problem("MODEL_INCOMPLETE", path, "lacks the tensor token_embd.weight")
