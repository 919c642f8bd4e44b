"""Tiny random checkpoints with an MTP head, the layer of which is one more decoder layer of the model, under the head's names."""

import json
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from tests.support.checkpoints import CONFIGS, HIDDEN, LAYERS, SLIDING_WINDOW, make_model

QWEN3_NEXT = {
    "model_type": "qwen3_next",
    "hidden_size": HIDDEN,
    "intermediate_size": 2 * HIDDEN,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 2048,
    "initializer_range": 0.3,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": HIDDEN,
    "shared_expert_intermediate_size": HIDDEN,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "tie_word_embeddings": False,
}

MIMO = {
    "model_type": "mimo_v2_flash",
    "hidden_size": HIDDEN,
    "intermediate_size": 2 * HIDDEN,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "v_head_dim": 8,
    "max_position_embeddings": 2048,
    "initializer_range": 0.3,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": HIDDEN,
    "sliding_window": SLIDING_WINDOW,
    "layer_types": ["full_attention", "sliding_attention"],
    "mlp_layer_types": ["sparse", "dense"],
}

PARTS = ("eh_proj", "enorm", "hnorm", "shared_head.norm")
SHARED = {"shared_head.head": "lm_head", "embed_tokens": "model.embed_tokens"}
OF_MIMO = dict(zip(PARTS, ("eh_proj", "enorm", "hnorm", "final_layernorm"), strict=True))
OF_QWEN = dict(zip(PARTS, ("fc", "pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm"), strict=True))


def make_mtp_checkpoint(family: str, path: Path, seed: int = 0, **fields: object) -> Path:
    """A checkpoint of a family of `CONFIGS` with DeepSeek's names of the head; copies of embedding and output head included."""
    config = CONFIGS[family] | fields
    return _with_head(config, path, seed, {name: f"model.layers.{LAYERS}.{name}" for name in (*PARTS, *SHARED)})


def make_qwen3_next(path: Path, seed: int = 0, *, first: str = "full_attention") -> Path:
    """A checkpoint with Qwen3-Next's names of the head. `first`: type of the layers before the last one, which has attention."""
    layer_types = [first] * (LAYERS - 1) + ["full_attention"]
    config = QWEN3_NEXT | {"num_hidden_layers": LAYERS, "layer_types": layer_types}
    made = _with_head(config, path, seed, {name: f"mtp.{of_qwen}" for name, of_qwen in OF_QWEN.items()})
    return _renamed(made, {f"model.layers.{LAYERS}.": "mtp.layers.0."})


def make_mimo(path: Path, seed: int = 0) -> Path:
    """A checkpoint with MiMo-V2-Flash's names of the head, which has a window and no experts."""
    made = _with_head(MIMO, path, seed, {name: f"model.mtp.layers.0.{of_mimo}" for name, of_mimo in OF_MIMO.items()})
    norms = {f"model.layers.{LAYERS}.post_attention_layernorm": "model.mtp.layers.0.pre_mlp_layernorm"}
    return _renamed(made, norms | {f"model.layers.{LAYERS}.": "model.mtp.layers.0."})


def _renamed(path: Path, names: Mapping[str, str]) -> Path:
    tensors = load_file(path / "model.safetensors")
    for before, after in names.items():
        tensors = {name.replace(before, after): tensor for name, tensor in tensors.items()}
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    return path


def _with_head(config: Mapping[str, object], path: Path, seed: int, names: Mapping[str, str]) -> Path:
    """A model of one layer more than `config` says, and the head's own weights under `names`."""
    longer = {"num_hidden_layers": LAYERS + 1}
    for field in ("layer_types", "mlp_layer_types"):
        if field in config:
            longer[field] = [*config[field], config[field][-1]]
    make_model({**config, **longer}, path, seed)
    tensors = load_file(path / "model.safetensors")
    draw = torch.Generator().manual_seed(seed + 1)
    for part, name in names.items():
        if part in SHARED:
            tensors[f"{name}.weight"] = tensors[f"{SHARED[part]}.weight"].clone()
        elif part == "eh_proj":
            tensors[f"{name}.weight"] = torch.randn(HIDDEN, 2 * HIDDEN, generator=draw) * 0.2
        else:
            tensors[f"{name}.weight"] = 1 + torch.randn(HIDDEN, generator=draw) * 0.3
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    written = json.loads((path / "config.json").read_text())
    for field in longer:
        written[field] = LAYERS if field == "num_hidden_layers" else written[field][:LAYERS]
    (path / "config.json").write_text(json.dumps(written))
    return path
