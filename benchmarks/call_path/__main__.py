"""Counts the Python calls, and the files entered, for one token, one request and one cancel in the running services.

    python -m benchmarks.call_path            # half a minute
    python -m benchmarks.call_path --verbose  # and each function with its number of calls
    python -m benchmarks.call_path --grpc     # through GenerateStream instead of POST /v1/completions

This module holds the run, its windows in the logs, and the table. The processes and their logs: benchmarks.call_path.trace.
"""

import http.client
import json
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any

import grpc
import typer
from rich.console import Console
from rich.table import Table

from benchmarks import report
from benchmarks.call_path.trace import PAUSE_S, LoggedCalls
from benchmarks.service import Stack
from protos.inference.v1 import inference_pb2, inference_pb2_grpc
from quire.local_stack.ports import reserved
from svc_common.clock import NS_PER_S, monotonic_ns

SERVICES = ("gateway", "scheduler", "worker")
PATHS = ("token", "request", "cancel")
_HOST = "127.0.0.1"
_MODEL = Path(__file__).resolve().parents[2] / "models" / "tiny"
_CACHE_BYTES = 2**26
_QUIET_S = 5 * PAUSE_S
_HALF_PAUSE_NS = int(PAUSE_S * NS_PER_S) // 2
_SETTLING = 8
"""Tokens at the beginning of a stream that do not count."""
_CANCELLED_AFTER = 4
_TIMEOUT_S = 60
_HELP_END = """
Counted are functions of this repository's services; coroutines and generators count each time that they continue. Libraries and
generated code do not count. All figures are medians.

token: the work between two steps of one stream. request: from the client's send to the message to the scheduler (gateway), and to
the first plan (scheduler). cancel: from the client's close until all services are idle, functions that a token does not call.
"""


@dataclass(frozen=True, slots=True)
class Moments:
    """Times of the client, ns: when each request was sent, and when each of the short streams was closed. The last one is long."""

    sent: list[int] = field(default_factory=list)
    closed: list[int] = field(default_factory=list)


def main(
    tokens: Annotated[int, typer.Option(min=1, help="That count, of one stream.")] = 96,
    requests: Annotated[int, typer.Option(min=1, help="That count; each is cancelled.")] = 5,
    over_grpc: Annotated[bool, typer.Option("--grpc", help="Call GenerateStream.")] = False,
    verbose: Annotated[bool, typer.Option("--verbose", help="Show each function with its calls.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    save: Annotated[bool, typer.Option("--save", help="Write benchmarks/results/call-path.json.")] = False,
) -> None:
    """Counts the Python calls of a token, a request and a cancel in each service."""
    paths = measure(tokens, requests, over_grpc=over_grpc)
    result = {"benchmark": "call_path", "api": "grpc" if over_grpc else "http", **_figures(paths, verbose=verbose)}
    if save:
        report.save("call-path", result)
    if as_json:
        typer.echo(json.dumps(result, indent=2))
    else:
        _show(result, Console())


Paths = dict[str, dict[str, Counter[str]]]
"""Calls by function, by service, by path."""


def measure(tokens: int, requests: int, *, over_grpc: bool = False) -> Paths:
    """Run the three services with models/tiny and count."""
    with tempfile.TemporaryDirectory() as folder, reserved(_HOST, {"http_port": 0}) as ports:
        worker = {"model": str(_MODEL), "kv_cache_memory_bytes": _CACHE_BYTES}
        with Stack(worker, {}, dict(ports), call_logs=Path(folder)) as stack:
            client = _Client(stack.address, ports["http_port"], over_grpc=over_grpc)
            moments = _run(client, tokens, requests)
        logs = {name: LoggedCalls.read(Path(folder) / f"{name}.json") for name in SERVICES}
    return _paths(logs, moments)


# --- the client ------------------------------------------------------------------------------------------------------


class _Client:
    """Makes one streaming request at a time, over HTTP or gRPC."""

    def __init__(self, grpc_address: str, http_port: int, *, over_grpc: bool) -> None:
        self._http_port = http_port
        channel = grpc.insecure_channel(grpc_address)
        stub = inference_pb2_grpc.InferenceServiceStub(channel)  # type: ignore[no-untyped-call]
        self._stub = stub if over_grpc else None

    @contextmanager
    def stream(self, number: int, max_tokens: int) -> Iterator[Iterator[object]]:
        """Send a request with a prompt of its own; yields the events of its answer. Closed, it is cancelled."""
        prompt = f"{number} small birds were sitting on a roof and one of them said: "
        if self._stub is not None:
            sampling = inference_pb2.SamplingParams(temperature=0.0)
            stop = inference_pb2.StopConditions(max_tokens=max_tokens, ignore_eos=True)
            request = inference_pb2.GenerateRequest(text=prompt, sampling=sampling, stop=stop)
            call = self._stub.GenerateStream(request, timeout=_TIMEOUT_S)
            yield (event for event in call if event.HasField("delta"))
            call.cancel()
        else:
            body = {"prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True, "stream": True}
            connection = http.client.HTTPConnection(_HOST, self._http_port, timeout=_TIMEOUT_S)
            connection.request("POST", "/v1/completions", json.dumps(body), {"content-type": "application/json"})
            answer = connection.getresponse()
            yield (line for line in answer if line.startswith(b"data: "))
            answer.close()
            connection.close()


def _run(client: _Client, tokens: int, requests: int) -> Moments:
    """Short streams, each cancelled after a few tokens, of which the first is a warm-up; then a long one."""
    moments = Moments()
    for number in range(requests + 1):
        moments.sent.append(monotonic_ns())
        with client.stream(number, tokens + 2 * _SETTLING) as events:
            for _ in range(_CANCELLED_AFTER):
                next(events)
            time.sleep(PAUSE_S / 2)  # into the worker's pause
            moments.closed.append(monotonic_ns())
        time.sleep(_QUIET_S)
    moments.sent.append(monotonic_ns())
    with client.stream(requests + 1, tokens + 2 * _SETTLING) as events:
        for _ in events:
            pass
    return moments


# --- windows in the logs ---------------------------------------------------------------------------------------------


def _paths(logs: dict[str, LoggedCalls], moments: Moments) -> Paths:
    idle = [at + _HALF_PAUSE_NS for at in logs["worker"].pauses]
    steady = [at for at in idle if at > moments.sent[-1]][_SETTLING:-_SETTLING]
    sent = moments.sent[1:-1]
    planned = [logs["scheduler"].first("schedule", at) for at in sent]
    submitted = [next(at for at in idle if at > begin) for begin in sent]
    closed = [(at, at + int(_QUIET_S * NS_PER_S)) for at in moments.closed[1:]]
    windows = {
        "token": {name: list(pairwise(steady)) for name in SERVICES},
        "request": {
            "gateway": list(zip(sent, submitted, strict=True)),
            "scheduler": list(zip(sent, planned, strict=True)),
        },
        "cancel": {name: closed for name in SERVICES},
    }
    paths = {
        path: {name: _typical([logs[name].between(*window) for window in found]) for name, found in services.items()}
        for path, services in windows.items()
    }
    for name in SERVICES:  # a cancel's window has steps too
        _leave_out(paths["cancel"][name], paths["token"][name])
    return paths


def _leave_out(calls: Counter[str], others: Counter[str]) -> None:
    for function in others:
        del calls[function]


def _typical(windows: Sequence[Counter[str]]) -> Counter[str]:
    """The window with the median number of calls."""
    return sorted(windows, key=Counter.total)[len(windows) // 2]


# --- figures ---------------------------------------------------------------------------------------------------------


def _figures(paths: Paths, *, verbose: bool) -> dict[str, Any]:
    return {path: _of_services(services, verbose=verbose) for path, services in paths.items()}


def _of_services(services: dict[str, Counter[str]], *, verbose: bool) -> dict[str, Any]:
    """Calls and files of each service and of all together, in which a file counts once for each service."""
    found: dict[str, Any] = {name: _counts(calls) for name, calls in services.items()}
    found["all"] = {key: sum(each[key] for each in found.values()) for key in ("calls", "files")}
    if verbose:
        found["functions"] = {name: dict(sorted(calls.items())) for name, calls in services.items()}
    return found


def _counts(calls: Counter[str]) -> dict[str, int]:
    return {"calls": calls.total(), "files": len({function.partition(":")[0] for function in calls})}


def _show(result: dict[str, Any], console: Console) -> None:
    table = Table("", *(f"{path} {what}" for path in PATHS for what in ("calls", "files")))
    for name in (*SERVICES, "all"):
        found = [result[path].get(name, {}) for path in PATHS]
        table.add_row(name, *(str(each.get(what, "")) for each in found for what in ("calls", "files")))
    console.print(table)
    for path in PATHS:
        for name, functions in result[path].get("functions", {}).items():
            console.print(f"\n{path}, {name}:", highlight=False)
            for function, count in functions.items():
                console.print(f"{count:6} {function}", markup=False, highlight=False, soft_wrap=True)


if __name__ == "__main__":
    app = typer.Typer(add_completion=False, rich_markup_mode=None)
    app.command(epilog=_HELP_END)(main)
    app()
