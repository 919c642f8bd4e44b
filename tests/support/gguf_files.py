"""GGUF files made of tiny checkpoints, as llama.cpp's converter writes them: names, order of queries and keys, tokenizer."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGML_QUANT_SIZES, GGUFWriter
from gguf import GGMLQuantizationType as Kind
from gguf.quants import dequantize, quantize
from safetensors.torch import load_file, save_file

_NAMES = {
    "model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output", "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm", "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output", "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
}  # fmt: skip
_NORMAL, _CONTROL = 1, 3

KindOf = Callable[[str], Kind]
"""The type of a matrix, by its name in the file."""
Quantizer = Callable[[np.ndarray, Kind], np.ndarray]
"""Blocks [columns, bytes] of float32 values [columns, depth]."""


def random_blocks(kind: Kind, columns: int, depth: int, seed: int = 0) -> np.ndarray:
    """Blocks [columns, bytes] with every bit of their numbers, of values around 0.3."""
    size, num_bytes = GGML_QUANT_SIZES[kind]
    rng = np.random.default_rng(seed)
    blocks = rng.integers(0, 256, (columns * depth // size, num_bytes)).astype(np.uint8)
    scale = {Kind.Q8_0: 0.004, Kind.Q6_K: 0.0003, Kind.Q4_K: 0.001, Kind.Q5_K: 0.0005}.get(kind, 0.03)
    most = {Kind.Q4_1: 7.5, Kind.Q5_1: 15.5, Kind.Q4_K: 7.5, Kind.Q5_K: 15.5}.get(kind, 0.0)
    place = 208 if kind is Kind.Q6_K else 0
    for at, factor in ((place, scale), (2, -scale * most if kind in {Kind.Q4_1, Kind.Q5_1} else scale * most)):
        if factor:
            halves = (rng.uniform(0.5, 1, len(blocks)) * factor).astype(np.float16)
            blocks[:, at : at + 2] = halves.view(np.uint8).reshape(-1, 2)
    return blocks.reshape(columns, -1)


def to_gguf(source: Path, target: Path, kind_of: KindOf, *, quantizer: Quantizer | None = None, **changes: Any) -> Path:
    """Write the checkpoint `source` to the file `target`; `source` gets the values that its weights stand for, and a merge.

    Without a quantizer, gguf rounds; K-quants, which it cannot write, get random blocks. `changes`: metadata; None leaves a
    key out.
    """
    config, tensors = json.loads((source / "config.json").read_text()), load_file(source / "model.safetensors")
    _give_a_merge(source / "tokenizer.json")
    arch = config["model_type"]
    writer = GGUFWriter(target, arch)
    for key, value in (_metadata(config, source) | changes).items():
        _add(writer, key.replace("ARCH", arch), value)
    for seed, (name, tensor) in enumerate(tensors.items()):
        stored, data, kind, meant = _tensor(name, tensor, config, kind_of, quantizer or _quantizer(seed))
        writer.add_tensor(stored, data, raw_dtype=kind)
        tensors[name] = meant.contiguous()
    if "rope_factors" in changes:
        writer.add_tensor("rope_freqs.weight", np.array(changes["rope_factors"], np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    return target


def _tensor(
    name: str, tensor: torch.Tensor, config: dict[str, Any], kind_of: KindOf, quantizer: Quantizer
) -> tuple[str, np.ndarray, Kind, torch.Tensor]:
    """Name in the file, data, type, and the values in the order of the checkpoint."""
    stem, _, part = name.rpartition(".")
    stored = f"{_stored_name(stem)}.{part}"
    values, heads = tensor.float(), _permuted_heads(stored, config)
    if heads:
        values = values.unflatten(0, (heads, 2, -1)).transpose(1, 2).flatten(0, 2)
    kind = kind_of(stored) if values.ndim > 1 else Kind.F32
    data = quantizer(values.numpy(), kind) if values.ndim > 1 else quantize(values.numpy(), kind)
    meant = torch.from_numpy(np.array(dequantize(data, kind), np.float32))
    if heads:
        meant = meant.unflatten(0, (heads, -1, 2)).transpose(1, 2).flatten(0, 2)
    return stored, data, kind, meant


def _quantizer(seed: int) -> Quantizer:
    def blocks(values: np.ndarray, kind: Kind) -> np.ndarray:
        if kind in {Kind.Q4_K, Kind.Q5_K, Kind.Q6_K}:
            return random_blocks(kind, *values.shape, seed=seed)
        return quantize(values, kind)

    return blocks


def _stored_name(stem: str) -> str:
    if stem in _NAMES:
        return _NAMES[stem]
    _, _, number, part = stem.split(".", 3)
    return f"blk.{number}.{_NAMES[part]}"


def _permuted_heads(stored: str, config: dict[str, Any]) -> int:
    if config["model_type"] != "llama":
        return 0
    fields = {"attn_q": "num_attention_heads", "attn_k": "num_key_value_heads"}
    return int(config.get(fields.get(stored.split(".")[-2], ""), 0))


def _give_a_merge(path: Path) -> None:
    """Files for llama.cpp have merges; the tokenizer of tiny checkpoints has none."""
    tokenizer = json.loads(path.read_text())
    model = tokenizer["model"]
    model["vocab"]["th"] = model["vocab"].pop("<unused0>", None) or model["vocab"]["th"]
    model["merges"] = [["t", "h"]]
    path.write_text(json.dumps(tokenizer))


def _metadata(config: dict[str, Any], source: Path) -> dict[str, Any]:
    tokenizer = json.loads((source / "tokenizer.json").read_text())
    settings = json.loads((source / "tokenizer_config.json").read_text())
    vocab = tokenizer["model"]["vocab"]
    special = {entry["content"]: entry["id"] for entry in tokenizer["added_tokens"]}
    tokens = sorted(vocab | special, key=(vocab | special).__getitem__)
    found = {
        "ARCH.context_length": config["max_position_embeddings"],
        "ARCH.embedding_length": config["hidden_size"],
        "ARCH.block_count": config["num_hidden_layers"],
        "ARCH.feed_forward_length": config["intermediate_size"],
        "ARCH.attention.head_count": config["num_attention_heads"],
        "ARCH.attention.head_count_kv": config["num_key_value_heads"],
        "ARCH.attention.layer_norm_rms_epsilon": config["rms_norm_eps"],
        "ARCH.rope.freq_base": config["rope_parameters"]["rope_theta"],
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [_CONTROL if token in special else _NORMAL for token in tokens],
        "tokenizer.ggml.merges": [" ".join(merge) for merge in tokenizer["model"]["merges"]],
        "tokenizer.ggml.bos_token_id": special.get(settings["bos_token"]),
        "tokenizer.ggml.eos_token_id": special.get(settings["eos_token"]),
        "tokenizer.chat_template": settings.get("chat_template"),
    }
    if config.get("head_dim"):
        found |= {"ARCH.attention.key_length": config["head_dim"], "ARCH.attention.value_length": config["head_dim"]}
    return found


def _add(writer: GGUFWriter, key: str, value: Any) -> None:
    if value is None or key in {"rope_factors"} or value == []:
        return
    if isinstance(value, list):
        writer.add_array(key, value)
    elif isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    else:
        writer.add_string(key, value)
