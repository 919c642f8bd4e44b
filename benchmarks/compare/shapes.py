"""Shapes of the compared models, and the cost of one token: parameters, bytes, products.

Arithmetic only: the checkpoints are in checkpoints, the resulting limits in limits.
"""

from dataclasses import asdict, dataclass, replace
from typing import Any

BF16_BYTES = 2


@dataclass(frozen=True, slots=True)
class ModelShape:
    """A llama-like decoder in bfloat16. `intermediate_size`: of the gated MLP; `tied`: the head is the embedding table."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    tied: bool = True
    max_positions: int = 2048

    @property
    def layer_parameters(self) -> int:
        """Parameters of one layer's matrices, without its two norms."""
        attention = 2 * self.hidden_size * self.head_dim * (self.num_heads + self.num_kv_heads)
        return attention + 3 * self.hidden_size * self.intermediate_size

    @property
    def head_parameters(self) -> int:
        """Parameters of the matrix that computes logits."""
        return self.vocab_size * self.hidden_size

    @property
    def num_parameters(self) -> int:
        """Parameters of the whole checkpoint."""
        norms = (2 * self.num_layers + 1) * self.hidden_size
        return self.num_layers * self.layer_parameters + (1 if self.tied else 2) * self.head_parameters + norms

    @property
    def step_weight_bytes(self) -> int:
        """Weights that a step must read once: layers and head; of the embedding table only the rows of its tokens."""
        return BF16_BYTES * (self.num_layers * self.layer_parameters + self.head_parameters)

    @property
    def kv_token_bytes(self) -> int:
        """Bytes of keys and values of one token in all layers, in bfloat16."""
        return 2 * BF16_BYTES * self.num_layers * self.num_kv_heads * self.head_dim

    @property
    def body_flops(self) -> int:
        """FLOPs of one token in the layers' matrices."""
        return 2 * self.num_layers * self.layer_parameters

    @property
    def head_flops(self) -> int:
        """FLOPs of one token's logits."""
        return 2 * self.head_parameters

    def attention_flops(self, context: int) -> int:
        """FLOPs of one token that attends to `context` tokens."""
        return 4 * self.num_layers * self.num_heads * self.head_dim * context

    def mlp_tensors(self) -> dict[str, tuple[int, int]]:
        """Shapes of the matrices of a layer's MLP; rows = outputs."""
        wide = self.intermediate_size, self.hidden_size
        return {"gate_proj": wide, "up_proj": wide, "down_proj": (self.hidden_size, self.intermediate_size)}

    def config(self) -> dict[str, Any]:
        """config.json, in the form that every library reads."""
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "hidden_act": "silu",
            "rms_norm_eps": 1e-5,
            "rope_theta": 10_000.0,
            "attention_bias": False,
            "mlp_bias": False,
            "max_position_embeddings": self.max_positions,
            "tie_word_embeddings": self.tied,
            "torch_dtype": "bfloat16",
            "bos_token_id": BOS_TOKEN_ID,
            "eos_token_id": EOS_TOKEN_ID,
        }


EOS_TOKEN_ID, BOS_TOKEN_ID = 0, 1
NUM_SPECIAL = 2

SHAPES = {
    "bench-135m": ModelShape(49_152, 576, 1_536, 30, 9, 3, 64),
    "bench-440m": ModelShape(49_152, 1_024, 4_096, 24, 16, 4, 96),
    "bench-15m": ModelShape(32_000, 288, 768, 6, 6, 6, 48),
}
_KEYS = {
    "vocab": "vocab_size",
    "hidden": "hidden_size",
    "intermediate": "intermediate_size",
    "layers": "num_layers",
    "heads": "num_heads",
    "kv-heads": "num_kv_heads",
    "head": "head_dim",
    "tied": "tied",
    "positions": "max_positions",
}


def parse(text: str) -> tuple[str, ModelShape]:
    """Parse a name and shape from "bench-135m" or "bench-135m:layers=12,hidden=768,...".

    ValueError says what is wrong.

    A changed shape gets its own name, so that it has its own checkpoint.
    """
    name, _, changes = text.partition(":")
    if name not in SHAPES:
        raise ValueError(f"{name!r} is not one of {', '.join(SHAPES)}")
    if not changes:
        return name, SHAPES[name]
    values = dict(_change(part) for part in changes.split(","))
    shape = replace(SHAPES[name], **values)
    if shape.num_heads % shape.num_kv_heads:
        raise ValueError(f"{shape.num_heads} heads cannot share {shape.num_kv_heads} heads of keys and values")
    return f"{name}-{'-'.join(changes.replace('=', '').split(','))}", shape


def _change(part: str) -> tuple[str, Any]:
    key, _, value = part.partition("=")
    if key not in _KEYS or not value.isdecimal():
        raise ValueError(f"{part!r} is not KEY=NUMBER with one of {', '.join(_KEYS)}")
    return _KEYS[key], bool(int(value)) if key == "tied" else int(value)


def described(shape: ModelShape) -> dict[str, Any]:
    """The shape for result files."""
    return {**asdict(shape), "num_parameters": shape.num_parameters, "kv_token_bytes": shape.kv_token_bytes}
