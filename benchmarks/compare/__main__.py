"""Compares Quire and its peers on this CPU.

    python -m benchmarks.compare
    python -m benchmarks.compare --workloads W1,W4 --engines quire,vllm --rounds 3
    python -m benchmarks.compare --model bench-135m:layers=12 --seed 7 --set W2.prompt=lognormal:256:0.5:32:1024
    python -m benchmarks.compare --from benchmarks/results/compare.json --plot compare.png

This module holds the command line. The order of work is in benchmarks.compare.session.
"""

import json
import os
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Annotated, Any

import typer
from rich.console import Console

from benchmarks import report
from benchmarks.compare import checkpoints, plot, session, shapes, table, workloads
from benchmarks.compare.engines.llamacpp import FORMS as LLAMA_CPP_FORMS
from benchmarks.compare.engines.registry import is_quire
from benchmarks.compare.workloads import Lengths
from quire_tools.bench.workloads import Length

ENGINES = (
    *("quire", "quire-http", "quire-offline"),
    *("vllm", "vllm-offline", "llamacpp", "openvino", "transformers"),
)
# Of rounded weights, so not of the same precision: only where they are named.
_QUANTIZED = tuple(f"llamacpp-{form}" for form in LLAMA_CPP_FORMS)
_MODEL_HELP = (
    "bench-135m, bench-440m or bench-15m, optionally with another shape: "
    "bench-135m:layers=12,hidden=768,intermediate=2048,heads=12,kv-heads=4."
)
_SET_HELP = (
    "Changes a workload; repeatable: W1.requests=16, W2.prompt=lognormal:256:0.5:32:1024, W2.output=64, W3.shared=256, W5.rate=2.5 "
    "(requests/s; 0 = 65 % of the capacity of the first peer that is a server)."
)


def main(
    model: Annotated[str, typer.Option(help=_MODEL_HELP)] = "bench-135m",
    workload: Annotated[
        str, typer.Option("--workloads", help="Workloads, comma-separated: W1, W2, W3, W4, W5, P.")
    ] = "W1,W2,W3,W4,W5,P",
    engine: Annotated[
        str,
        typer.Option(
            "--engines",
            help=f"Engines, comma-separated: {', '.join(ENGINES)}; with rounded weights, only if named: {', '.join(_QUANTIZED)}. "
            "Skips those not installed.",
        ),
    ] = (",".join(ENGINES)),
    rounds: Annotated[int, typer.Option(min=1, help="Rounds: runs of each workload on each engine, in turn.")] = 5,
    seed: Annotated[int, typer.Option(help="Seed of weights, prompts, lengths and arrivals.")] = 0,
    requests: Annotated[int | None, typer.Option(min=1, help="Requests per workload, except W4.")] = None,
    change: Annotated[list[str] | None, typer.Option("--set", help=_SET_HELP)] = None,
    checked: Annotated[
        int, typer.Option(min=0, help="Requests per run to compare with the same requests computed alone.")
    ] = 2,
    threads: Annotated[
        int | None, typer.Option(min=1, help="Compute threads of the peers. Default: number of cores.")
    ] = None,
    max_num_seqs: Annotated[int, typer.Option(min=1, help="Sequences (slots) of the peers.")] = 64,
    kv_gib: Annotated[int, typer.Option(min=1, help="KV-cache memory of each engine, GiB.")] = 2,
    fresh: Annotated[
        bool, typer.Option("--fresh", help="Restart every engine in each round; by default vLLM is kept, frozen.")
    ] = False,
    quire_options: Annotated[str, typer.Option(help='Additional options of `quire up`: "--num-threads 2".')] = "",
    variant: Annotated[
        list[str] | None, typer.Option(help='Additional stack, repeatable: loose="--no-invariant" runs as quire-loose.')
    ] = None,
    cache: Annotated[
        Path | None, typer.Option(help="Folder of checkpoints and logs. Default: quire-bench in ~/.cache.")
    ] = None,
    from_: Annotated[Path | None, typer.Option("--from", help="Show a saved result; nothing is run.")] = None,
    save: Annotated[
        bool, typer.Option("--save", help="Write benchmarks/results/compare.json and compare.png.")
    ] = False,
    out: Annotated[Path | None, typer.Option(help="Result file.")] = None,
    picture: Annotated[Path | None, typer.Option("--plot", help="File of a plot, PNG.")] = None,
    json_: Annotated[bool, typer.Option("--json", help="Print the result as JSON instead of tables.")] = False,
) -> None:
    """Compares Quire with its peers, in turn, in one run: same model, same requests, same precision, same machine.

    Each round runs every workload on every engine, in rotating order; a ratio compares two runs of one round. `make peers` installs
    the peers. Exit status 1 if Quire fails or its tokens differ from those of the same requests computed alone.
    """
    signal.signal(signal.SIGTERM, _on_sigterm)
    if from_ is None:
        plan = session.Plan(
            model=_checked_model(model),
            seed=seed,
            num_rounds=rounds,
            lengths=_lengths(workload.split(","), requests, change or []),
            engines=_names(engine, variant or []),
            cache=cache or checkpoints.cache_folder(),
            threads=threads or len(os.sched_getaffinity(0)),
            max_num_seqs=max_num_seqs,
            kv_gib=kv_gib,
            num_checked=checked,
            fresh=fresh,
            quire_options=quire_options,
            variants=_variants(variant or []),
        )
        result = {**report.provenance(), **_ran(plan)}
    else:
        result = json.loads(from_.read_text(encoding="utf-8"))
    _deliver(result, save=save, out=out, picture=picture, as_json=json_)
    if problem := _problem(result):
        typer.echo(f"error: {problem}", err=True)
        raise typer.Exit(1)


def _ran(plan: session.Plan) -> dict[str, Any]:
    """Run the plan; exit with status 1 and one line if something that all engines need failed."""
    try:
        return session.run(plan, _say)
    except RuntimeError as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(1) from error


def _on_sigterm(number: int, frame: FrameType | None) -> None:
    """Exit by an exception, so that engines are ended on the way."""
    raise SystemExit(128 + number)


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _deliver(result: dict[str, Any], *, save: bool, out: Path | None, picture: Path | None, as_json: bool) -> None:
    if save or out:
        report.save("compare", result, out)
    if save or picture:
        plot.draw(result, picture or report.RESULTS / "compare.png")
    if as_json:
        print(json.dumps(result, indent=2))
    else:
        table.show(result, Console(width=None if sys.stdout.isatty() else 160))


def _problem(result: dict[str, Any]) -> str:
    """Why a result counts as a failure; empty if it does not."""
    failed = [name for name, facts in result["engines"].items() if is_quire(name) and "failure" in facts]
    unanswered = [row for row in result["runs"] if is_quire(row["engine"]) and row["failed"]]
    if failed:
        return f"{', '.join(failed)} failed"
    if unanswered:
        return f"requests failed in {len(unanswered)} runs of Quire's"
    return "tokens differ from those of requests computed alone" if result["tokens"]["different"] else ""


def _checked_model(text: str) -> str:
    try:
        shapes.parse(text)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    return text


def _variants(given: Sequence[str]) -> dict[str, str]:
    pairs = [text.partition("=") for text in given]
    if not all(name and equals for name, equals, _ in pairs):
        raise typer.BadParameter('a variant is NAME="OPTIONS of quire up"')
    return {name: options for name, _, options in pairs}


def _names(text: str, variant: Sequence[str]) -> list[str]:
    names = [part.strip() for part in text.split(",")]
    every = (*ENGINES, *_QUANTIZED)
    if unknown := set(names) - set(every):
        raise typer.BadParameter(f"unknown: {', '.join(sorted(unknown))}; engines: {', '.join(every)}")
    return [*names, *(f"quire-{name}" for name in _variants(variant))]


def _lengths(names: Sequence[str], requests: int | None, changes: Sequence[str]) -> dict[str, Lengths]:
    """The chosen workloads with their changes. Usage error for an unknown name or change."""
    found = {**workloads.DEFAULTS, "W5": workloads.at_rate(workloads.DEFAULTS["W5"], 0.0)}
    if requests is not None:
        found = {name: one if name == "W4" else replace(one, num_requests=requests) for name, one in found.items()}
    for text in changes:
        place, _, value = text.partition("=")
        name, _, key = place.partition(".")
        if name not in found:
            raise typer.BadParameter(f"--set {text}: unknown workload; workloads: {', '.join(found)}")
        found[name] = _changed(found[name], key, value, text)
    unknown = [name for name in names if name not in found]
    if unknown:
        raise typer.BadParameter(f"unknown: {', '.join(unknown)}; workloads: {', '.join(found)}")
    return {name: found[name] for name in names}


def _changed(lengths: Lengths, key: str, value: str, text: str) -> Lengths:
    readers: dict[str, Callable[[str], Any]] = {
        "requests": int,
        "prompt": Length.parse,
        "output": Length.parse,
        "shared": int,
        "rate": float,
    }
    fields = {"requests": "num_requests"}
    try:
        return replace(lengths, **{fields.get(key, key): readers[key](value)})
    except KeyError:
        raise typer.BadParameter(f"--set {text}: unknown setting; settings: {', '.join(readers)}") from None
    except ValueError as error:
        raise typer.BadParameter(f"--set {text}: {error}") from error


if __name__ == "__main__":
    typer.run(main)
