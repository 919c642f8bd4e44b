"""Measures a mixture of experts in process: the fused decoder beside the model's own modules (`--no-fuse`), in one run.

    python -m benchmarks.mixtures                                   # a table: tokens/s by number of streams
    python -m benchmarks.mixtures --dtype float32 --streams 1,8     # others
    python -m benchmarks.mixtures --json                            # one JSON object, nothing else

The model has random weights in the form of Qwen3-MoE, made once: 0.85 billion parameters, of which a token uses 0.29. Both ways
run the same requests in turn, prompts included; a figure is that of the fastest round.
"""

import json
import random
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from benchmarks import report
from benchmarks.compare import checkpoints
from benchmarks.compare.shapes import NUM_SPECIAL, ModelShape
from quire import LLM, SamplingParams

WAYS: Mapping[str, Mapping[str, Any]] = {"fused": {}, "modules": {"fuse": False}}
_BLOCK = 16


@dataclass(frozen=True, slots=True)
class MixtureShape(ModelShape):
    """`intermediate_size`: of each of the `num_experts` experts in every layer, of which a token gets `top_k`."""

    num_experts: int = 32
    top_k: int = 8

    def mlp_tensors(self) -> dict[str, tuple[int, int]]:
        """See ModelShape; with the router."""
        of_one = ModelShape.mlp_tensors(self)
        experts = {f"experts.{e}.{name}": size for e in range(self.num_experts) for name, size in of_one.items()}
        return {"gate": (self.num_experts, self.hidden_size), **experts}

    def config(self) -> dict[str, Any]:
        """See ModelShape."""
        return {
            **ModelShape.config(self),
            "architectures": ["Qwen3MoeForCausalLM"],
            "model_type": "qwen3_moe",
            "num_experts": self.num_experts,
            "num_experts_per_tok": self.top_k,
            "moe_intermediate_size": self.intermediate_size,
            "norm_topk_prob": True,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
        }


SHAPES = {
    "bench-moe-850m": MixtureShape(49_152, 1_024, 512, 16, 16, 4, 64),
    "bench-moe-20m": MixtureShape(32_000, 256, 128, 4, 4, 2, 64, num_experts=16, top_k=4),
}


def _head_norms(path: Path, shape: MixtureShape) -> None:
    """Add the norms of queries and keys, which other checkpoints of the comparison lack."""
    import torch  # noqa: PLC0415
    from safetensors.torch import load_file, save_file  # noqa: PLC0415

    file = path / "model.safetensors"
    norms = {
        f"model.layers.{layer}.self_attn.{name}.weight": torch.ones(shape.head_dim, dtype=torch.bfloat16)
        for layer in range(shape.num_layers)
        for name in ("q_norm", "k_norm")
    }
    save_file(load_file(file) | norms, file, metadata={"format": "pt"})


def made(name: str) -> Path:
    """The folder of the checkpoint, made now if it does not exist."""
    path = checkpoints.folder(name, 0, checkpoints.cache_folder())
    if not (path / "model.safetensors").is_file():
        checkpoints.write(name, SHAPES[name], 0, checkpoints.cache_folder())
        _head_norms(path, SHAPES[name])
    return path


def _prompts(count: int, length: int, vocab_size: int, seed: int) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(NUM_SPECIAL, vocab_size) for _ in range(length)] for _ in range(count)]


def measure(
    name: str, dtype: str, streams: Sequence[int], lengths: tuple[int, int], rounds: int
) -> dict[int, dict[str, float]]:
    """Output tokens per second by number of streams and way. `lengths`: of prompts and outputs. A first round warms up."""
    path, (prompt, output) = made(name), lengths
    length = prompt + output + 1
    blocks = max(streams) * -(-length // _BLOCK)
    sizes = {
        "dtype": dtype, "num_gpu_blocks_override": blocks, "max_num_seqs": max(streams), "max_model_len": length,
    }  # fmt: skip
    ways = {way: LLM(model=path, enable_prefix_caching=False, **sizes, **options) for way, options in WAYS.items()}
    found: dict[int, dict[str, float]] = {count: {} for count in streams}
    params = SamplingParams(temperature=0.0, max_tokens=output, ignore_eos=True)
    for turn in range(rounds + 1):
        for count in streams:
            prompts = _prompts(count, prompt, SHAPES[name].vocab_size, turn)
            for way, llm in ways.items():
                began = time.perf_counter()
                llm.generate(prompts, params, use_tqdm=False)
                speed = count * output / (time.perf_counter() - began)
                if turn:
                    found[count][way] = max(speed, found[count].get(way, 0.0))
    for llm in ways.values():
        llm.close()
    return found


app = typer.Typer(rich_markup_mode="rich", add_completion=False)


@app.command()
def main(
    model: Annotated[str, typer.Option(help=", ".join(SHAPES))] = "bench-moe-850m",
    dtype: Annotated[str, typer.Option(help="bfloat16 or float32.")] = "bfloat16",
    streams: Annotated[str, typer.Option(help="Requests at once, separated by commas.")] = "1,8,32",
    prompt: Annotated[int, typer.Option(help="Tokens.", min=1)] = 4,
    output: Annotated[int, typer.Option(help="Tokens.", min=2)] = 32,
    rounds: Annotated[int, typer.Option(min=1)] = 3,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object, nothing else.")] = False,
    save: Annotated[bool, typer.Option("--save", help="Write benchmarks/results/mixtures.json.")] = False,
) -> None:
    """Measure a mixture of experts with and without the fused decoder."""
    if model not in SHAPES:
        raise typer.BadParameter(f"{model!r} is not one of {', '.join(SHAPES)}")
    counts = [int(part) for part in streams.split(",")]
    found = measure(model, dtype, counts, (prompt, output), rounds)
    sizes = {"model": model, "dtype": dtype, "prompt": prompt, "output": output, "rounds": rounds}
    content = {**sizes, "tokens_per_s": {str(count): speeds for count, speeds in found.items()}}
    if save:
        report.save("mixtures", content)
    if as_json:
        sys.stdout.write(json.dumps({**report.provenance(), **content}, indent=2) + "\n")
        return
    table = Table(f"{model}, {dtype}, streams", *WAYS, "ratio")
    for count, speeds in found.items():
        table.add_row(str(count), *(f"{speeds[way]:.1f}" for way in WAYS), f"{speeds['fused'] / speeds['modules']:.2f}")
    Console().print(table)


if __name__ == "__main__":
    app()
