"""Checkpoints with random weights, made once into a cache folder.

    python -m benchmarks.compare.checkpoints bench-135m --seed 0

Weights are scaled so that every layer changes the stream and tokens differ: matrices preserve the magnitude
of their input, and the embedding is small compared with what layers add. Runs in a separate process (`made`),
so that the caller never loads torch.
"""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from benchmarks.compare import shapes, tokens
from benchmarks.compare.shapes import ModelShape
from quire.local_stack.processes import child_environment

if TYPE_CHECKING:
    import torch

EMBEDDING_STD = 0.05


def cache_folder() -> Path:
    """$QUIRE_BENCH_CACHE, else quire-bench in the user's cache folder."""
    own = os.environ.get("QUIRE_BENCH_CACHE")
    return Path(own) if own else Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")).expanduser() / "quire-bench"


def folder(name: str, seed: int, cache: Path) -> Path:
    """Path of the checkpoint of that name and seed, existing or not."""
    return cache / f"{name}-seed{seed}"


def made(model: str, seed: int, cache: Path) -> Path:
    """The folder of `model` (see shapes.parse), made now if it does not exist. RuntimeError says why it could not be."""
    path = folder(shapes.parse(model)[0], seed, cache)
    if not (path / "model.safetensors").is_file():
        command = [
            sys.executable,
            "-m",
            "benchmarks.compare.checkpoints",
            model,
            "--seed",
            str(seed),
            "--cache",
            str(cache),
        ]
        done = subprocess.run(command, env=child_environment(os.environ), capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"making {path} failed: {done.stderr.strip()[-500:]}")
    return path


def write(name: str, shape: ModelShape, seed: int, cache: Path) -> Path:
    """Make the checkpoint in a temporary folder and rename it when complete."""
    path = folder(name, seed, cache)
    unfinished = path.with_name(f"{path.name}.{os.getpid()}")
    unfinished.mkdir(parents=True)
    try:
        _write_weights(shape, seed, unfinished)
        _write_texts(shape, unfinished)
        shutil.rmtree(path, ignore_errors=True)
        unfinished.rename(path)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return path


def tensor_shapes(shape: ModelShape) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Names and shapes as in transformers; rows = outputs."""
    hidden, queries, keys = shape.hidden_size, shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    yield "model.embed_tokens.weight", (shape.vocab_size, hidden)
    for i in range(shape.num_layers):
        layer = f"model.layers.{i}"
        yield f"{layer}.input_layernorm.weight", (hidden,)
        yield f"{layer}.post_attention_layernorm.weight", (hidden,)
        yield f"{layer}.self_attn.q_proj.weight", (queries, hidden)
        yield f"{layer}.self_attn.k_proj.weight", (keys, hidden)
        yield f"{layer}.self_attn.v_proj.weight", (keys, hidden)
        yield f"{layer}.self_attn.o_proj.weight", (hidden, queries)
        for name, size in shape.mlp_tensors().items():
            yield f"{layer}.mlp.{name}.weight", size
    yield "model.norm.weight", (hidden,)
    if not shape.tied:
        yield "lm_head.weight", (shape.vocab_size, hidden)


def _write_weights(shape: ModelShape, seed: int, path: Path) -> None:
    # Only this process needs them.
    import torch  # noqa: PLC0415
    from safetensors.torch import save_file  # noqa: PLC0415

    generator = torch.Generator().manual_seed(seed)
    tensors = {name: _drawn(name, size, generator) for name, size in tensor_shapes(shape)}
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})


def _drawn(name: str, size: tuple[int, ...], generator: "torch.Generator") -> "torch.Tensor":
    import torch  # noqa: PLC0415

    if len(size) == 1:
        return torch.ones(size, dtype=torch.bfloat16)
    std = EMBEDDING_STD if name.startswith(("model.embed", "lm_head")) else size[1] ** -0.5
    return (torch.randn(size, generator=generator) * std).to(torch.bfloat16)


def _write_texts(shape: ModelShape, path: Path) -> None:
    (path / "config.json").write_text(json.dumps(shape.config(), indent=2), encoding="utf-8")
    generation = {"bos_token_id": shapes.BOS_TOKEN_ID, "eos_token_id": shapes.EOS_TOKEN_ID}
    (path / "generation_config.json").write_text(json.dumps(generation), encoding="utf-8")
    tokens.tokenizer(shape.vocab_size).save(str(path / "tokenizer.json"))
    end, begin = tokens.SPECIAL
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": begin,
        "eos_token": end,
        "pad_token": end,
        "model_max_length": shape.max_positions,
        "clean_up_tokenization_spaces": False,
    }
    (path / "tokenizer_config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")


def main(
    model: Annotated[
        str, typer.Argument(help="bench-135m or bench-15m, optionally with another shape: bench-135m:layers=12")
    ],
    seed: Annotated[int, typer.Option(help="Seed of the weights.")] = 0,
    cache: Annotated[Path | None, typer.Option(help="Folder of checkpoints. Default: quire-bench in ~/.cache.")] = None,
) -> None:
    """Makes one checkpoint and prints its path."""
    name, shape = shapes.parse(model)
    print(write(name, shape, seed, cache or cache_folder()))


if __name__ == "__main__":
    typer.run(main)
