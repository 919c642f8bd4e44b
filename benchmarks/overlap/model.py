"""Writes a checkpoint of 79 million random bfloat16 weights, for steps longer than those of models/tiny.

    python -m benchmarks.overlap.model models/tiny FOLDER

The tokenizer is that of the given checkpoint. A process of its own, so that the benchmark itself does not
need torch.
"""

import json
import shutil
from pathlib import Path

import torch
import typer
from transformers import LlamaConfig, LlamaForCausalLM

_SHAPE = {
    "hidden_size": 768,
    "intermediate_size": 2048,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "head_dim": 64,
}


def main(like: Path, folder: Path) -> None:
    """Writes the checkpoint to FOLDER; vocabulary and lengths are those of the checkpoint LIKE."""
    shutil.copytree(like, folder, ignore=shutil.ignore_patterns("*.safetensors", "*.md"), dirs_exist_ok=True)
    config = LlamaConfig(**{**json.loads((like / "config.json").read_text(encoding="utf-8")), **_SHAPE})
    torch.manual_seed(1)
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)


if __name__ == "__main__":
    typer.run(main)
