"""Compares an installed wheel with a checkout: `quire up` to the first token, then decoding, in alternating pairs.

    make wheel && python -m benchmarks.wheel dist/quire-*_x86_64.whl --pairs 5
    python -m benchmarks.wheel dist/quire-*_x86_64.whl --cold          # the checkout's first start ever: it compiles the kernels

The wheel is unpacked and runs without a compiler on its path; both use the packages of this environment.
Goal: tokens per second within 10 % of the checkout's.
"""

import os
import statistics
import sys
import tempfile
import time
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Annotated, Any

import grpc
import typer
from rich.console import Console
from rich.table import Table

from benchmarks import report, startup
from protos.inference.v1 import inference_pb2, inference_pb2_grpc

_ROOT = Path(__file__).resolve().parent.parent
_GOAL = 0.9


def _environ(module_path: str, search_path: str, cache: Path | None) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("QUIRE_") and name != "CXX"}
    given = {"PYTHONPATH": module_path, "PATH": search_path, "PYTHONSAFEPATH": "1"}
    return {**kept, **given, **({} if cache is None else {"QUIRE_CACHE_DIR": str(cache)})}


def _decoded(address: str, requests: int, tokens: int) -> int:
    """Run `requests` greedy requests of `tokens` tokens at once and return the number of tokens received."""
    stop = inference_pb2.StopConditions(max_tokens=tokens, ignore_eos=True)

    def one(number: int) -> int:
        request = inference_pb2.GenerateRequest(text=f"def function_{number}(", stop=stop)
        events = inference_pb2_grpc.InferenceServiceStub(channel).GenerateStream(request, timeout=600)
        return sum(len(event.delta.token_ids) for event in events if event.WhichOneof("event") == "delta")

    with grpc.insecure_channel(address) as channel, ThreadPoolExecutor(requests) as pool:
        return sum(pool.map(one, range(requests)))


def _run(model: str, environ: dict[str, str], cwd: Path, requests: int, tokens: int) -> dict[str, float]:
    with startup.up(model, environ, cwd) as (start, began):
        startup.first_token(start.address)
        first_token_s = time.perf_counter() - began
        _decoded(start.address, requests, 8)
        decoding = time.perf_counter()
        got = _decoded(start.address, requests, tokens)
        return {"first_token_s": first_token_s, "tokens_per_s": got / (time.perf_counter() - decoding)}


def main(
    wheel: Annotated[Path, typer.Argument(help="What `make wheel` built.", exists=True)],
    model: Annotated[Path, typer.Option(help="Checkpoint folder.")] = _ROOT / "models" / "tiny",
    pairs: Annotated[int, typer.Option(min=1)] = 3,
    requests: Annotated[int, typer.Option(min=1, help="At once.")] = 16,
    tokens: Annotated[
        int, typer.Option(min=1, help="Output tokens of each request; models/tiny allows about 480.")
    ] = 400,
    cold: Annotated[bool, typer.Option(help="Start the checkout with an empty kernel cache each time.")] = False,
    save: Annotated[bool, typer.Option(help="Write benchmarks/results/wheel.json.")] = False,
) -> None:
    """Measures wheel and checkout in turn."""
    runs: list[dict[str, dict[str, float]]] = []
    with tempfile.TemporaryDirectory() as scratch:
        site, empty = Path(scratch, "site"), Path(scratch, "empty")
        empty.mkdir()
        with zipfile.ZipFile(wheel) as files:
            files.extractall(site)
        for number in range(pairs):
            cache = Path(scratch, f"cache-{number}") if cold else None
            checkout = _environ(os.pathsep.join((str(_ROOT), str(_ROOT / "kernels"))), os.environ["PATH"], cache)
            installed = _environ(str(site), str(Path(sys.executable).parent), None)
            sides = {"checkout": checkout, "wheel": installed}
            order = reversed(sides.items()) if number % 2 else sides.items()
            runs.append({name: _run(str(model.resolve()), env, empty, requests, tokens) for name, env in order})
    _show(runs, {"benchmark": "wheel", "wheel": wheel.name, "model": model.name, "cold": cold}, save=save)


def _show(runs: list[dict[str, dict[str, float]]], about: dict[str, Any], *, save: bool) -> None:
    table = Table("figure", "checkout", "wheel", "ratio", "goal")
    ratios = {}
    for key in ("first_token_s", "tokens_per_s"):
        sides = [statistics.median(run[name][key] for run in runs) for name in ("checkout", "wheel")]
        ratios[key] = statistics.median(run["wheel"][key] / run["checkout"][key] for run in runs)
        goal = f"at least {_GOAL}" if key == "tokens_per_s" else ""
        table.add_row(key, *(f"{value:,.2f}" for value in sides), f"{ratios[key]:.3f}", goal)
    if save:
        report.save("wheel", {**about, "runs": runs, "ratios": ratios})
    Console().print(table)


if __name__ == "__main__":
    typer.run(main)
