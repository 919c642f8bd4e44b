"""Measures how other requests' grammars slow a plain stream: alone, beside a regex, beside a costly grammar.

    python -m benchmarks.grammar_attack --save      # about a minute
    python -m benchmarks.grammar_attack --json      # one JSON object, nothing else

This module holds the runs and their table. One stack serves all of them, in turn, in several rounds.
"""

import json
import statistics
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from benchmarks import command_line, report
from quire import SamplingParams, StructuredOutputsParams
from quire.client.sync_client import Client
from quire.local_stack.stack import LocalStack
from svc_common.errors import Cancelled, QuireError

AMBIGUOUS = 'start: e\ne: e e | "a" | "b" | "" | e "c" e\n'
ALONE = "alone"
_AMBIGUOUS = StructuredOutputsParams(grammar=AMBIGUOUS)
COMPANY: dict[str, SamplingParams | None] = {
    ALONE: None,
    "plain": SamplingParams(max_tokens=400, seed=1, ignore_eos=True),
    "regex": SamplingParams(max_tokens=400, seed=1, structured_outputs=StructuredOutputsParams(regex="[a-z ]{2000,}")),
    "attack": SamplingParams(max_tokens=400, min_tokens=400, seed=1, structured_outputs=_AMBIGUOUS),
    "attack, n = 8": SamplingParams(max_tokens=400, min_tokens=400, seed=1, n=8, structured_outputs=_AMBIGUOUS),
}
"""Requests sent repeatedly while the plain stream runs."""

_HELP_END = """
Three processes and this client, on one machine, with the built-in model. The plain stream is greedy and has --tokens tokens; its
speed is the number of tokens after the first / the time from the first to the last. A concurrent request samples 400 tokens and is
sent again whenever it ends; "plain" has no grammar and shows the cost of any concurrent request. Shares are relative to the speed
alone, medians over the rounds.

Goals: at least 50 % beside the attack with n = 8; 90 % is desired.
"""


@dataclass
class Company:
    """Results of the requests beside the stream. `ends`: by finish reason, or reason of the error."""

    num_tokens: int = 0
    ends: Counter[str] = field(default_factory=Counter)


def main(
    tokens: Annotated[int, typer.Option(min=2, help="Tokens of the plain stream.")] = 600,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds of all kinds of concurrent requests.")] = 3,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object on standard output, nothing else.")] = False,
    save: Annotated[bool, typer.Option("--save", help="Write benchmarks/results/grammar-attack.json.")] = False,
) -> None:
    """Measures a plain stream alone and beside requests with grammars."""
    with LocalStack() as stack:
        result = measure(stack.grpc_address, tokens, rounds)
    if save:
        report.save("grammar-attack", {"benchmark": "grammar_attack", **result})
    if as_json:
        print(json.dumps({**report.provenance(), **result}))
    else:
        _show(result, Console())


def measure(address: str, tokens: int, rounds: int) -> dict[str, Any]:
    """Speeds and shares by kind of company."""
    speeds: dict[str, list[float]] = {name: [] for name in COMPANY}
    companies = {name: Company() for name in COMPANY}
    plain = SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True)
    with Client(address) as client, command_line.progress("rounds", rounds * len(COMPANY)) as advance:
        _speed(client, plain)
        for _ in range(rounds):
            for name, params in COMPANY.items():
                with _beside(address, params, companies[name]):
                    speeds[name].append(_speed(client, plain))
                advance()
    alone = statistics.median(speeds[ALONE])
    return {
        "tokens": tokens,
        "rounds": rounds,
        "runs": {
            name: {
                "tokens_per_s": round(statistics.median(found), 2),
                "share": round(statistics.median(found) / alone, 3),
                "company_tokens": companies[name].num_tokens,
                "company_ends": dict(companies[name].ends),
            }
            for name, found in speeds.items()
        },
    }


def _speed(client: Client, params: SamplingParams) -> float:
    """Tokens per second after the first event."""
    first_at, num_first, num_tokens = 0.0, 0, 0
    for delta in client.generate_stream("Once upon a time", params):
        num_tokens += len(delta.token_ids)
        if not first_at:
            first_at, num_first = time.monotonic(), num_tokens
    return (num_tokens - num_first) / (time.monotonic() - first_at)


@contextmanager
def _beside(address: str, params: SamplingParams | None, company: Company) -> Iterator[None]:
    """Keep the company running inside the context; it has ended on exit."""
    if params is None:
        yield
        return
    runs, is_over = threading.Event(), threading.Event()
    thread = threading.Thread(target=_keep_asking, args=(address, params, company, runs, is_over))
    thread.start()
    runs.wait()
    try:
        yield
    finally:
        is_over.set()
        thread.join()


def _keep_asking(
    address: str, params: SamplingParams, company: Company, runs: threading.Event, is_over: threading.Event
) -> None:
    with Client(address) as client:
        while not is_over.is_set():
            stream = client.generate_stream("Once upon a time", params)
            try:
                for delta in stream:
                    runs.set()
                    company.num_tokens += len(delta.token_ids)
                    if is_over.is_set():
                        stream.cancel()
                company.ends[str(stream.result.outputs[0].finish_reason)] += 1
            except Cancelled:
                return
            except QuireError as error:
                runs.set()
                company.ends[error.reason] += 1


def _show(result: dict[str, Any], console: Console) -> None:
    table = Table("beside", "tokens/s", "share", "tokens of concurrent requests", "their ends")
    for name, run in result["runs"].items():
        ends = ", ".join(f"{count} {end}" for end, count in run["company_ends"].items())
        table.add_row(name, f"{run['tokens_per_s']:.1f}", f"{run['share']:.0%}", str(run["company_tokens"]), ends)
    console.print(table)


if __name__ == "__main__":
    app = typer.Typer(add_completion=False)
    app.command(epilog=_HELP_END)(main)
    app()
