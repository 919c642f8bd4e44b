"""Figures from runs: of one run, medians over rounds with their spread, and ratios of two engines within a round.

All functions work on recorded rows, so that a saved result can be shown again. Tables and plots are in table
and plot.
"""

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.compare.engines.base import Run
from quire_tools.bench.measure import summarise

Row = Mapping[str, Any]
"""One run: `round`, `workload`, `engine` and its figures."""

THROUGHPUT = "tokens_per_s"
LATENCIES = ("ttft_p50_ms", "ttft_p99_ms", "tpot_p50_ms", "tpot_p99_ms", "itl_p99_ms")


def of_run(run: Run) -> dict[str, Any]:
    """Figures of one run, as defined in quire_tools.bench.measure. Latencies are left out if no request has them."""
    found = summarise(run.records)
    latencies = {
        f"{kind}_{quantile}_ms": found[f"{kind}_ms"][quantile]
        for kind, quantile in (name.split("_")[:2] for name in LATENCIES)
        if found[f"{kind}_ms"]
    }
    return {
        THROUGHPUT: found["output_tokens_per_s"],
        "requests_per_s": found["requests_per_s"],
        "duration_s": found["duration_s"],
        "output_tokens": found["output_tokens"],
        "cached_prompt_tokens": found["cached_prompt_tokens"],
        "failed": found["failed"],
        "errors": found["errors"],
        **latencies,
    }


@dataclass(frozen=True, slots=True)
class Spread:
    """Spread of one figure over rounds."""

    median: float
    least: float
    most: float

    @classmethod
    def of(cls, values: Sequence[float]) -> "Spread | None":
        """The spread of these values; None without values."""
        return cls(statistics.median(values), min(values), max(values)) if values else None


def values(rows: Iterable[Row], workload: str, engine: str, figure: str) -> dict[int, float]:
    """The figure by round; runs with failed requests have none."""
    return {
        row["round"]: row[figure]
        for row in rows
        if row["workload"] == workload and row["engine"] == engine and not row["failed"] and figure in row
    }


def spread(rows: Iterable[Row], workload: str, engine: str, figure: str) -> Spread | None:
    """Spread over all rounds."""
    return Spread.of(list(values(rows, workload, engine, figure).values()))


def ratio(rows: Sequence[Row], workload: str, figure: str, ours: str, other: str) -> Spread | None:
    """`ours` / `other`, computed per round; None if no round has both."""
    mine, theirs = values(rows, workload, ours, figure), values(rows, workload, other, figure)
    return Spread.of([mine[round_] / theirs[round_] for round_ in mine if theirs.get(round_)])


def names(rows: Iterable[Row], key: str) -> list[str]:
    """All values of "workload" or "engine", in order of first occurrence."""
    return list(dict.fromkeys(str(row[key]) for row in rows))


def ratio_table(rows: Sequence[Row], ours: str) -> dict[str, dict[str, dict[str, dict[str, float]]]]:
    """Ratios of `ours` to each other engine, by workload, engine and figure, for the result file."""
    found: dict[str, dict[str, dict[str, dict[str, float]]]] = {}
    for workload in names(rows, "workload"):
        for other in names(rows, "engine"):
            every = {figure: ratio(rows, workload, figure, ours, other) for figure in (THROUGHPUT, *LATENCIES)}
            known = {figure: _rounded(one) for figure, one in every.items() if one is not None}
            if known and other != ours:
                found.setdefault(workload, {})[other] = known
    return found


def _rounded(one: Spread) -> dict[str, float]:
    return {"median": round(one.median, 4), "least": round(one.least, 4), "most": round(one.most, 4)}
