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
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from benchmarks import report
from benchmarks.compare.shapes import NUM_SPECIAL
from benchmarks.mixtures.shape import SHAPES, made
from quire import LLM, SamplingParams

WAYS: Mapping[str, Mapping[str, Any]] = {"fused": {}, "modules": {"fuse": False}}
_BLOCK = 16


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
    sizes = {
        "benchmark": "mixtures",
        "model": model,
        "dtype": dtype,
        "prompt": prompt,
        "output": output,
        "rounds": rounds,
    }
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
