"""Converts a bfloat16 llama checkpoint to GGUF, bit for bit: python -m benchmarks.compare.offline.to_gguf FROM TO

llama.cpp's rotary embedding rotates neighbouring pairs, the checkpoint's the halves of a head: rows of
queries and keys are reordered.
"""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np

_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def tensors(path: Path) -> Iterator[tuple[str, np.ndarray]]:
    """Names and bits (uint16) of a safetensors file that holds bfloat16 only."""
    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(size))
    data = np.memmap(path, np.uint8, "r", offset=8 + size)
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        if entry["dtype"] != "BF16":
            raise ValueError(f"{name} is {entry['dtype']}; only BF16 is converted")
        begin, end = entry["data_offsets"]
        yield name, data[begin:end].view(np.uint16).reshape(entry["shape"])


def own_name(name: str) -> str:
    """llama.cpp's name of a tensor."""
    stem = name.removesuffix(".weight")
    if not stem.startswith("model.layers."):
        return f"{_NAMES[stem]}.weight"
    _, _, layer, rest = stem.split(".", 3)
    return f"blk.{layer}.{_NAMES[rest]}.weight"


def interleaved(bits: np.ndarray, num_heads: int) -> np.ndarray:
    """Rows of each head, [first half, second half], as [first of both, second of both, ...]."""
    rows, columns = bits.shape
    halves = bits.reshape(num_heads, 2, rows // num_heads // 2, columns)
    return halves.swapaxes(1, 2).reshape(rows, columns)


def _write_config(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_rope_dimension_count(config["head_dim"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_BF16)


def _write_tokenizer(writer: gguf.GGUFWriter, path: Path, config: dict[str, Any]) -> None:
    model = json.loads(path.read_text(encoding="utf-8"))["model"]
    names = sorted(model["vocab"], key=model["vocab"].__getitem__)
    special = {config["bos_token_id"], config["eos_token_id"]}
    kinds = [gguf.TokenType.CONTROL if i in special else gguf.TokenType.NORMAL for i in range(len(names))]
    merges = [pair if isinstance(pair, str) else " ".join(pair) for pair in model["merges"]]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(names)
    writer.add_token_types(kinds)
    writer.add_token_merges(merges)
    writer.add_bos_token_id(config["bos_token_id"])
    writer.add_eos_token_id(config["eos_token_id"])
    writer.add_add_bos_token(False)


def main(checkpoint: str, target: str) -> None:
    """Write the whole file."""
    folder = Path(checkpoint)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    writer = gguf.GGUFWriter(target, "llama")
    _write_config(writer, config)
    _write_tokenizer(writer, folder / "tokenizer.json", config)
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    for name, bits in tensors(folder / "model.safetensors"):
        if bits.ndim == 1:
            writer.add_tensor(own_name(name), (bits.astype(np.uint32) << 16).view(np.float32))
            continue
        num_heads = heads.get(name.split(".")[-2])
        rows = np.ascontiguousarray(bits if num_heads is None else interleaved(bits, num_heads))
        writer.add_tensor(own_name(name), rows.view(np.uint8), raw_dtype=gguf.GGMLQuantizationType.BF16)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
