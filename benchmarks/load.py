"""Load generator for Quire's gRPC API and any OpenAI endpoint: TTFT, TPOT, ITL, throughput, a plot.

    python -m benchmarks.load --up models/tiny --workload all
    python -m benchmarks.load --grpc 127.0.0.1:50051 --workload poisson --rate 8 --num-requests 200
    python -m benchmarks.load --openai http://127.0.0.1:8000 --workload shared-prefix --prompt-len lognormal:64:0.6

This module holds the command line and the order of work. The parts are those of `quire bench` (quire_tools.bench).
"""

import asyncio
import contextlib
import json
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from tokenizers import Tokenizer

from benchmarks import report
from quire.local_stack.stack import LocalStack
from quire_tools.bench import figures
from quire_tools.bench.measure import Record, summarise
from quire_tools.bench.openai_target import OpenAITarget
from quire_tools.bench.session import LoadPlan, Planner
from quire_tools.bench.targets import GrpcTarget, LoadTarget
from quire_tools.bench.workloads import Length, LoadShape, PlannedRequest, WorkloadKind, plan
from quire_tools.commands.bench import length_option

ALL = "all"
# Default requests per second of the workloads that spread their arrivals.
_DEFAULT_RATE = 4.0


def _kinds(name: str) -> list[WorkloadKind]:
    if name == ALL:
        return list(WorkloadKind)
    try:
        return [WorkloadKind(name)]
    except ValueError:
        raise typer.BadParameter(f"{name!r} is not one of {', '.join([*WorkloadKind, ALL])}") from None


def _rate_of(kind: WorkloadKind, rate: float | None) -> float | None:
    spread = kind in {WorkloadKind.POISSON, WorkloadKind.SHARED_PREFIX}
    return (rate or _DEFAULT_RATE) if spread else None


@dataclass(slots=True, frozen=True)
class FileTokenizer:
    """A `tokenizer.json`, used without adding special tokens."""

    inner: Tokenizer

    def encode(self, text: str) -> list[int]:
        """Token ids of the text."""
        return list(self.inner.encode(text, add_special_tokens=False).ids)

    def decode(self, ids: list[int]) -> str:
        """Text of the ids."""
        return str(self.inner.decode(ids))


def tokenizer_at(path: Path) -> FileTokenizer:
    """The tokenizer in a file or in a checkpoint's folder. Raises FileNotFoundError ("there is no ...")."""
    file = path / "tokenizer.json" if path.is_dir() else path
    if not file.is_file():
        raise FileNotFoundError(f"there is no {file}")
    return FileTokenizer(Tokenizer.from_file(str(file)))


def main(
    grpc: Annotated[str, typer.Option(help="HOST:PORT of Quire's gRPC API.")] = "",
    openai: Annotated[str, typer.Option(help="Base URL of an OpenAI endpoint.")] = "",
    up: Annotated[str, typer.Option(help="Start the three services with this model, measure them, stop them.")] = "",
    workload: Annotated[str, typer.Option(help="batch, poisson, shared-prefix, single or all.")] = "batch",
    num_requests: Annotated[int, typer.Option(min=1)] = 64,
    prompt_len: Annotated[
        Length, typer.Option(parser=length_option, help="N or lognormal:MEDIAN:SIGMA[:MIN:MAX].")
    ] = "64",
    output_len: Annotated[Length, typer.Option(parser=length_option, help="As --prompt-len.")] = "32",
    rate: Annotated[
        float | None, typer.Option(min=1e-6, help="Requests per second of poisson and shared-prefix; default 4.")
    ] = None,
    prefix_len: Annotated[int, typer.Option(min=1, help="Tokens that shared-prefix requests share.")] = 256,
    num_prefixes: Annotated[int, typer.Option(min=1, help="Number of distinct prefixes of shared-prefix.")] = 4,
    seed: int = 0,
    warmup: Annotated[int, typer.Option(min=0, help="Unmeasured requests before each run.")] = 4,
    max_in_flight: Annotated[
        int | None, typer.Option(min=1, help="Maximum number of concurrent requests (default: no limit).")
    ] = None,
    tokenizer: Annotated[
        str, typer.Option(help="tokenizer.json or its folder, for exact lengths. Without it lengths are in words.")
    ] = "",
    send_ids: Annotated[
        bool, typer.Option("--send-ids", help="Send token ids instead of text (needs --tokenizer).")
    ] = False,
    model: Annotated[str, typer.Option(help="Model name for --openai; default: the first one served.")] = "",
    chat: Annotated[bool, typer.Option("--chat", help="Use /v1/chat/completions with --openai.")] = False,
    ignore_eos: Annotated[
        bool, typer.Option(help="Request exactly the output length (an extension of OpenAI's API).")
    ] = True,
    timeout_s: Annotated[float, typer.Option(min=0.1)] = 600.0,
    json_: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
    out: Annotated[Path | None, typer.Option(help="Result file; default benchmarks/results/load-NAME.json.")] = None,
    name: Annotated[str, typer.Option(help="NAME of the result file; default: workload and kind of target.")] = "",
    save: Annotated[bool, typer.Option(help="Write the result file.")] = True,
    plot: Annotated[Path | None, typer.Option(help="File of a plot, PNG.")] = None,
) -> None:
    """Measures a server under load. Exit status 1 if any request failed."""
    if sum(map(bool, (grpc, openai, up))) != 1:
        raise typer.BadParameter("give exactly one of --grpc, --openai and --up")
    cut = _tokenizer(tokenizer or up)
    if send_ids and cut is None:
        raise typer.BadParameter("--send-ids needs --tokenizer")
    shapes = [
        LoadShape(kind, num_requests, prompt_len, output_len, seed, _rate_of(kind, rate), prefix_len, num_prefixes)
        for kind in _kinds(workload)
    ]
    with _stack(up) as address:
        if openai:
            target: LoadTarget = OpenAITarget(
                openai, model=model, ignore_eos=ignore_eos, timeout_s=timeout_s, chat=chat
            )
        else:
            target = GrpcTarget(grpc or address, ignore_eos=ignore_eos, timeout_s=timeout_s)
        load = LoadPlan(shapes, target, _planner(cut, send_ids=send_ids), warmup, max_in_flight, sys.stderr.isatty())
        runs = asyncio.run(load.run())
    result = _result(shapes, target, runs, lengths="tokens" if cut else "words", up=up)
    if save:
        report.save(f"load-{name or workload + ('-openai' if openai else '-grpc')}", result, out)
    _show(result, as_json=json_)
    if plot:
        figures.plot(runs, plot)
    if any(run["failed"] for run in result["summary"].values()):
        raise typer.Exit(1)


def _tokenizer(path: str) -> FileTokenizer | None:
    try:
        return tokenizer_at(Path(path)) if path else None
    except FileNotFoundError as error:
        raise typer.BadParameter(str(error)) from None


def _planner(cut: FileTokenizer | None, *, send_ids: bool) -> Planner:
    def planned(shape: LoadShape) -> list[PlannedRequest]:
        made = plan(shape, cut)
        return made if send_ids else [replace(p, token_ids=()) for p in made]

    return planned


@contextlib.contextmanager
def _stack(model: str) -> Iterator[str]:
    if not model:
        yield ""
        return
    with LocalStack(model=model) as stack:
        yield stack.grpc_address


def _result(
    shapes: list[LoadShape], target: LoadTarget, runs: dict[str, list[Record]], *, lengths: str, up: str
) -> dict[str, Any]:
    return {
        "benchmark": "load",
        "target": "started by the benchmark: " + up if up else target.name,
        "lengths_in": lengths,
        "workloads": {shape.kind.value: asdict(shape) for shape in shapes},
        "summary": {name: summarise(records) for name, records in runs.items()},
    }


def _show(result: dict[str, Any], *, as_json: bool) -> None:
    if as_json:
        print(json.dumps({**report.provenance(), **result}, indent=2))
    else:
        figures.print_table(result["summary"], Console())


if __name__ == "__main__":
    typer.run(main)
