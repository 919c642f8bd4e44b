"""Random LoRA adapters of the built-in model for the tour, in PEFT's format, made without torch."""

import json
from pathlib import Path

import numpy as np

_RANK = 4
_PROJECTIONS = ("q_proj", "v_proj")
_SCALE = 0.3


def make_adapter(base: Path, folder: Path, seed: int) -> Path:
    """Write an adapter with random matrices for the Llama in `base` to the new folder `folder`, and return it."""
    config = json.loads((base / "config.json").read_text(encoding="utf-8"))
    draw = np.random.default_rng(seed)
    tensors: dict[str, np.ndarray] = {}
    for layer in range(config["num_hidden_layers"]):
        for projection in _PROJECTIONS:
            prefix = f"base_model.model.model.layers.{layer}.self_attn.{projection}"
            tensors[f"{prefix}.lora_A.weight"] = _random(draw, _RANK, config["hidden_size"])
            tensors[f"{prefix}.lora_B.weight"] = _random(draw, _width(config, projection), _RANK)
    folder.mkdir(parents=True)
    from safetensors.numpy import save_file  # noqa: PLC0415 (an optional package)

    save_file(tensors, folder / "adapter_model.safetensors")
    settings = {"peft_type": "LORA", "r": _RANK, "lora_alpha": _RANK, "target_modules": list(_PROJECTIONS)}
    (folder / "adapter_config.json").write_text(json.dumps(settings), encoding="utf-8")
    return folder


def _width(config: dict[str, int], projection: str) -> int:
    heads = config["num_attention_heads"] if projection == "q_proj" else config["num_key_value_heads"]
    return heads * config["head_dim"]


def _random(draw: np.random.Generator, rows: int, columns: int) -> np.ndarray:
    return (_SCALE * draw.standard_normal((rows, columns))).astype(np.float32)
