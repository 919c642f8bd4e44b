"""Measures the cost of traces: throughput with all, 1 % or no requests traced; latency with a failing collector.

    python -m benchmarks.tracing --save                     # about ten minutes
    python -m benchmarks.tracing --seconds 2 --rounds 1 --worker simulated --ill-seconds 2  # a short run

This module holds the runs and their tables. The collector: benchmarks.tracing.sink; the clients:
benchmarks.open_load.
"""

import asyncio
import os
import statistics
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

import psutil
import typer
from rich.console import Console
from rich.table import Table

from benchmarks import report
from benchmarks.open_load import Flow, OpenLoad, figures
from benchmarks.tracing.sink import Sink, unused_port
from quire.local_stack.stack import LocalStack

GOALS = {"100 %": 0.98, "1 %": 0.995}
_OFF, _OFF_AGAIN = "off", "off again"
_SAMPLERS = {
    "100 %": {"OTEL_TRACES_SAMPLER": "parentbased_always_on"},
    "1 %": {"OTEL_TRACES_SAMPLER": "parentbased_traceidratio", "OTEL_TRACES_SAMPLER_ARG": "0.01"},
}
_SIMULATED = {"simulated": ("--step-base-s", "0.02"), "free": ("--time-scale", "0")}
_FLUSH_S = 1.5

_HELP_END = """
Stacks of three processes each, all running all the time, and this client, on one machine. Throughput: --clients clients that each
send the next request when one ends, for --seconds; the first tenth does not count. Each of --rounds runs every stack, in rotating
order; a ratio compares two runs of one round. Two stacks have no traces: their ratio shows the noise. The collector receives
messages without parsing them. CPU time per request (gateway + scheduler + worker) depends less on other load of the machine.

Goals: with all requests traced at least 0.98 of the throughput without traces, with 1 % of them 0.995. Latency: Poisson arrivals at
--rate per second, every request traced, with an absent collector, with one that never answers, and with none configured.

worker: `tiny`, the built-in model on this CPU; `simulated`, steps of 20 ms without CPU load; `free`, steps that take no time, so
that only the services are measured.
"""


@dataclass(slots=True)
class Traced:
    """A stack and its measurements. `sink`: the collector of its spans, if there is one."""

    name: str
    stack: LocalStack
    sink: Sink | None = None
    runs: list[dict[str, Any]] = field(default_factory=list)

    def cpu_s(self) -> dict[str, float]:
        """Processor time so far, by service."""
        times = {name: psutil.Process(pid).cpu_times() for name, pid in self.stack.pids.items()}
        return {name: time.user + time.system for name, time in times.items()}

    def rss_mb(self) -> dict[str, float]:
        """Resident memory by service."""
        return {name: round(psutil.Process(pid).memory_info().rss / 2**20, 1) for name, pid in self.stack.pids.items()}


def main(
    worker: Annotated[Literal["tiny", "simulated", "free"], typer.Option(help="Kind of worker; see below.")] = "tiny",
    seconds: Annotated[float, typer.Option(min=1, help="Seconds of each run.")] = 10.0,
    rounds: Annotated[int, typer.Option(min=1, help="Runs of each stack.")] = 8,
    clients: Annotated[int, typer.Option(min=1, help="At once.")] = 16,
    prompt: Annotated[int, typer.Option(min=1, help="Tokens.")] = 64,
    output: Annotated[int, typer.Option(min=1, help="Tokens.")] = 64,
    rate: Annotated[float, typer.Option(min=0.1, help="Requests per second of the latency runs.")] = 8.0,
    ill_seconds: Annotated[
        float, typer.Option(min=0, help="Seconds of each run with a failing collector; 0 = no such runs.")
    ] = 30.0,
    save: Annotated[bool, typer.Option("--save", help="Write benchmarks/results/tracing-WORKER.json.")] = False,
) -> None:
    """Measures the cost of traces, and the effect of a failing collector."""
    flow = Flow("all", 0.0, prompt=prompt, output=output, num_clients=clients)
    result: dict[str, Any] = {"throughput": throughput(worker, flow, seconds, rounds)}
    if ill_seconds:
        result["ill"] = ill(worker, Flow("all", rate, prompt=prompt, output=output), ill_seconds)
    if save:
        report.save(f"tracing-{worker}", {"benchmark": "tracing", "worker": worker, "clients": clients, **result})
    _show(result, Console())


def throughput(worker: str, flow: Flow, seconds: float, rounds: int) -> dict[str, Any]:
    """Requests per second of each stack in each round, and ratios to the one without traces."""
    with ExitStack() as stack:
        stacks = [_start(stack, worker, name) for name in (_OFF, "100 %", "1 %", _OFF_AGAIN)]
        for number in range(rounds + 1):  # the first is a warm-up
            for i in range(len(stacks)):
                traced = stacks[(i + number) % len(stacks)]
                run = _run(traced, flow, seconds, number)
                if number:
                    traced.runs.append(run)
        memory = {traced.name: traced.rss_mb() for traced in stacks}
    rates = {traced.name: [run["served_per_s"] for run in traced.runs] for traced in stacks}
    ratios = {name: [a / b for a, b in zip(rates[name], rates[_OFF], strict=True)] for name in rates if name != _OFF}
    spans = {traced.name: sum(run["spans"] for run in traced.runs) for traced in stacks}
    calls = {traced.name: sum(run["calls_in_all"] for run in traced.runs) for traced in stacks}
    costs = {traced.name: _cpu_ms(traced.runs) for traced in stacks}
    return {
        "served_per_s": rates,
        "ratios": {name: _spread(values) for name, values in ratios.items()},
        "spans_per_request": {name: round(spans[name] / calls[name], 2) for name in spans},
        "cpu_ms_per_request": costs,
        "rss_mb": memory,
    }


def _cpu_ms(runs: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Processor time of a request, by service, which a busy machine changes little."""
    calls = sum(run["calls_in_all"] for run in runs)
    return {name: round(1e3 * sum(run["cpu_s"][name] for run in runs) / calls, 3) for name in runs[0]["cpu_s"]}


def _start(stack: ExitStack, worker: str, name: str, *, collector: int = 0) -> Traced:
    """Start a stack that sends its spans to a sink of its own, or to the given port."""
    sink = stack.enter_context(Sink()) if name in _SAMPLERS else None
    port = sink.port if sink is not None else collector
    options: dict[str, Any] = {"simulated": worker != "tiny", "worker_args": _SIMULATED.get(worker, ())}
    environ = _environ(port, _SAMPLERS.get(name, {}))
    return Traced(name, stack.enter_context(LocalStack(environ=environ, **options)), sink)


def _environ(port: int, sampler: Mapping[str, str]) -> dict[str, str]:
    plain = {name: value for name, value in os.environ.items() if not name.startswith("OTEL_")}
    if not port:
        return plain
    return {**plain, **sampler, "OTEL_EXPORTER_OTLP_ENDPOINT": f"http://127.0.0.1:{port}"}


def _run(traced: Traced, flow: Flow, seconds: float, seed: int) -> dict[str, Any]:
    async def run() -> dict[str, Any]:
        sent = await OpenLoad(traced.stack.grpc_address, seed).run([flow], seconds)
        if failed := {call.end for call in sent} - {"ended"}:
            raise RuntimeError(f"requests failed: {', '.join(failed)}")
        took = report.spread([call.over_s - call.at_s for call in sent if call.at_s >= 0.1 * seconds])
        if traced.sink is not None:
            await asyncio.sleep(_FLUSH_S)  # spans flushed after this run must not fall into the next one
        return {**figures(sent, seconds), "calls_in_all": len(sent), "latency_s": took}

    before = traced.cpu_s()
    found = asyncio.run(run())
    found["cpu_s"] = {name: after - before[name] for name, after in traced.cpu_s().items()}
    return found | (traced.sink.take_figures() if traced.sink is not None else {"spans": 0})


def ill(worker: str, flow: Flow, seconds: float) -> dict[str, Any]:
    """Latency with an absent or hanging collector, against none, and the memory used."""
    with ExitStack() as stack:
        hung, dead = stack.enter_context(Sink(hangs=True)), stack.enter_context(unused_port())
        ports = {_OFF: 0, "dead": dead, "hung": hung.port}
        stacks = [_start(stack, worker, name, collector=port) for name, port in ports.items()]
        for number in range(3):
            for i in range(len(stacks)):
                traced = stacks[(i + number) % len(stacks)]
                run = _run(traced, flow, seconds, number)
                if number:
                    traced.runs.append(run)
        return {
            traced.name: {
                "ttft_p50_s": statistics.median(run["ttft_s"]["p50"] for run in traced.runs),
                "latency_p50_s": statistics.median(run["latency_s"]["p50"] for run in traced.runs),
                "rss_mb": traced.rss_mb(),
            }
            for traced in stacks
        }


def _spread(values: list[float]) -> dict[str, float]:
    named = {"median": statistics.median(values), "least": min(values), "most": max(values)}
    return {name: round(value, 4) for name, value in named.items()}


def _show(result: dict[str, Any], console: Console) -> None:
    found = result["throughput"]
    table = Table(
        "traced", "requests/s", "of off: median (least - most)", "goal", "spans per request", "CPU ms per request"
    )
    for name, rates in found["served_per_s"].items():
        ratio = found["ratios"].get(name)
        share = f"{ratio['median']:.3f} ({ratio['least']:.3f} - {ratio['most']:.3f})" if ratio else ""
        goal = f"{GOALS[name]:g}" if name in GOALS else ""
        spans = f"{found['spans_per_request'][name]:.2f}"
        costs = " + ".join(f"{cost:.1f}" for cost in found["cpu_ms_per_request"][name].values())
        table.add_row(name, f"{statistics.median(rates):.1f}", share, goal, spans, costs)
    console.print(table)
    if "ill" in result:
        sick = Table("collector", "first token p50 ms", "whole p50 ms", "memory MB: gateway, scheduler, worker")
        for name, values in result["ill"].items():
            memory = ", ".join(str(values["rss_mb"][service]) for service in ("gateway", "scheduler", "worker"))
            row = (f"{1e3 * values['ttft_p50_s']:.1f}", f"{1e3 * values['latency_p50_s']:.1f}", memory)
            sick.add_row("none" if name == _OFF else name, *row)
        console.print(sick)


if __name__ == "__main__":
    app = typer.Typer(add_completion=False, rich_markup_mode=None)
    app.command(epilog=_HELP_END)(main)
    app()
