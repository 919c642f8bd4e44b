"""A result as tables on a terminal."""

from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.compare import figures, goals
from benchmarks.compare.figures import THROUGHPUT, Spread


def show(result: Mapping[str, Any], console: Console) -> None:
    """Print the limits, a table per workload, starts and memory, goals, and the token checks."""
    rates = result["limits"]["best"]
    console.print(
        f"{result['model']}; memory {rates['read_one'] / 1e9:.1f} GB/s on one thread, {rates['read_all'] / 1e9:.1f} on all; "
        f"GEMM {rates['gemm_bf16'] / 1e9:,.0f} GFLOP/s bfloat16, {rates['gemm_fp32'] / 1e9:,.0f} float32"
    )
    for workload in figures.names(result["runs"], "workload"):
        console.print(_workload(result, workload))
    console.print(_engines(result))
    console.print(_goals(result))
    checked = result["tokens"]
    console.print(
        f"tokens equal to those computed alone: {checked['checked'] - len(checked['different'])} of {checked['checked']}"
    )
    for line in checked["different"]:
        console.print(f"  different: {line}")


def _workload(result: Mapping[str, Any], workload: str) -> Table:
    rows, ours = result["runs"], result["ours"]
    limit = result["limits"]["tokens_per_s"].get(workload)
    rate = result["workloads"][workload]["rate"]
    title = f"{workload}: limit {limit:,.0f} tokens/s" if limit else f"{workload}: {rate:.2f} requests/s"
    table = Table(
        "engine",
        "tokens/s",
        "of limit",
        "TTFT ms",
        "TPOT ms",
        "ITL p99",
        "quire / it",
        "TTFT p50",
        "TPOT p50",
        title=title,
    )
    for engine in figures.names(rows, "engine"):
        reached = figures.spread(rows, workload, engine, THROUGHPUT)
        if reached is None:
            continue
        ratios = [
            figures.ratio(rows, workload, name, ours, engine) for name in (THROUGHPUT, "ttft_p50_ms", "tpot_p50_ms")
        ]
        table.add_row(
            engine,
            _with_spread(reached, ".0f"),
            f"{reached.median / limit:.0%}" if limit else "",
            _pair(result, workload, engine, "ttft"),
            _pair(result, workload, engine, "tpot"),
            _with_spread(figures.spread(rows, workload, engine, "itl_p99_ms"), ".0f"),
            *(_with_spread(one, ".2f") if engine != ours else "" for one in ratios),
        )
    return table


def _pair(result: Mapping[str, Any], workload: str, engine: str, kind: str) -> str:
    found = [figures.spread(result["runs"], workload, engine, f"{kind}_{quantile}_ms") for quantile in ("p50", "p99")]
    return " / ".join(f"{one.median:,.1f}" for one in found if one is not None)


def _with_spread(one: Spread | None, form: str) -> str:
    if one is None:
        return ""
    return f"{one.median:,{form}} ({one.least:,{form}}-{one.most:,{form}})"


def _engines(result: Mapping[str, Any]) -> Table:
    table = Table(
        "engine",
        "form",
        "start to first token, s",
        "peak MB",
        "MB now",
        "idle CPU",
        "version",
        title="starts and memory",
    )
    for name, facts in result["engines"].items():
        starts = Spread.of(facts["starts_s"])
        version = next(
            (f"{package} {version}" for package, version in facts["versions"].items() if package != "python"), ""
        )
        failed = f"failed: {facts['failure'][:60]}" if "failure" in facts else version
        table.add_row(
            name,
            facts["form"],
            _with_spread(starts, ".1f"),
            f"{facts['peak_mb']:,.0f}",
            f"{facts['now_mb']:,.0f}",
            f"{facts['idle_cpu_share']:.1%}",
            failed,
        )
    return table


def _goals(result: Mapping[str, Any]) -> Table:
    table = Table("goal", "what", "measured", "wanted", "", title="goals")
    for one in goals.verdicts(result):
        wanted = f"{'<=' if one.most else '>='} {one.wanted:g}"
        table.add_row(one.goal, one.what, _with_spread(one.measured, ".2f"), wanted, "met" if one.is_met else "missed")
    return table
