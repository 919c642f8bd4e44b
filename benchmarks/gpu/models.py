"""Checkpoints of random weights, made on the device at the start of a run: models of 8 and of 0.6 billion parameters.

The layers and heads are those of Llama 3.1 8B and Qwen3 0.6B. No weight comes from outside.
"""

import json
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedConfig, Qwen3Config

from benchmarks.compare import tokens

_BLOCK = 128


@dataclass(frozen=True, slots=True)
class Shape:
    """A model with the sizes that floors depend on. `weight_bytes`: read in a step, in bfloat16; `kv_bytes`: of a token."""

    name: str
    config: PreTrainedConfig
    is_fp8: bool = False

    @property
    def num_parameters(self) -> int:
        """Of the matrices that a token is multiplied by, the head included."""
        c = self.config
        attention = 2 * c.hidden_size * c.head_dim * (c.num_attention_heads + c.num_key_value_heads)
        layer = attention + 3 * c.hidden_size * c.intermediate_size
        return int(c.num_hidden_layers * layer + c.vocab_size * c.hidden_size)

    @property
    def weight_bytes(self) -> int:
        """Weights that a step reads: of the embedding only the rows of its tokens."""
        head = self.config.vocab_size * self.config.hidden_size
        return (1 if self.is_fp8 else 2) * (self.num_parameters - head) + 2 * head

    def kv_bytes(self, dtype_bytes: int = 2) -> int:
        """Keys and values of one token in all layers."""
        c = self.config
        return int(2 * dtype_bytes * c.num_hidden_layers * c.num_key_value_heads * c.head_dim)

    def attention_operations(self, num_tokens: int) -> float:
        """Of causal attention over a prompt."""
        c = self.config
        return 2.0 * c.num_hidden_layers * c.num_attention_heads * c.head_dim * num_tokens * (num_tokens + 1)


def shapes(*, tiny: bool) -> dict[str, Shape]:
    """By name: 8B, 8B-fp8 and 0.6B; with `tiny`, of a few thousand parameters each."""
    common = {"max_position_embeddings": 8192, "bos_token_id": 1, "eos_token_id": 0}
    if tiny:
        sizes = {"vocab_size": 320, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "head_dim": 32}
        common |= {**sizes, "num_attention_heads": 4, "num_key_value_heads": 2}
        llama, qwen = LlamaConfig(tie_word_embeddings=False, **common), Qwen3Config(tie_word_embeddings=True, **common)
    else:
        llama = LlamaConfig(
            vocab_size=128_256, hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32,
            num_key_value_heads=8, head_dim=128, tie_word_embeddings=False, **common,
        )  # fmt: skip
        qwen = Qwen3Config(
            vocab_size=151_936, hidden_size=1024, intermediate_size=3072, num_hidden_layers=28, num_attention_heads=16,
            num_key_value_heads=8, head_dim=128, tie_word_embeddings=True, **common,
        )  # fmt: skip
    return {"8B": Shape("8B", llama), "8B-fp8": Shape("8B-fp8", llama, is_fp8=True), "0.6B": Shape("0.6B", qwen)}


def checkpoint(shape: Shape, parent: Path, device: torch.device) -> Path:
    """The folder of a checkpoint of `shape` below `parent`, made on `device` unless it exists."""
    path = parent / shape.name
    if (path / "config.json").is_file():
        return path
    path.mkdir(parents=True, exist_ok=True)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(shape.config, dtype=torch.bfloat16)
    weights = model.state_dict()
    if shape.config.tie_word_embeddings:
        weights.pop("lm_head.weight")
    stored = {
        name: part.cpu().contiguous()
        for given, weight in weights.items()
        for name, part in _parts(shape, given, weight)
    }
    save_file(stored, path / "model.safetensors", metadata={"format": "pt"})
    tokens.tokenizer(shape.config.vocab_size).save(str(path / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": tokens.SPECIAL[1],
        "eos_token": tokens.SPECIAL[0],
    }
    (path / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
    (path / "config.json").write_text(json.dumps(_config(shape)), encoding="utf-8")
    return path


def _config(shape: Shape) -> dict[str, object]:
    said = {
        **shape.config.to_dict(),
        "architectures": [f"{type(shape.config).__name__.removesuffix('Config')}ForCausalLM"],
    }
    if shape.is_fp8:
        said["quantization_config"] = {
            "quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [_BLOCK, _BLOCK],
            "modules_to_not_convert": ["lm_head"],
        }  # fmt: skip
    return {**said, "dtype": "bfloat16"}


def _parts(shape: Shape, name: str, weight: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
    """The tensors that stand for a weight."""
    if not shape.is_fp8 or weight.ndim < 2 or name.startswith(("model.embed", "lm_head")):
        return [(name, weight)]
    scale = weight.abs().max().float() / 448
    blocks = [-(-size // _BLOCK) for size in weight.shape]
    numbers = (weight.float() / scale).to(torch.float8_e4m3fn)
    return [(name, numbers), (f"{name}_scale_inv", scale.expand(blocks).clone())]
