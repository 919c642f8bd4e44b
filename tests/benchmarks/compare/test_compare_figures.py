"""From recorded runs to figures, ratios, goals and tables of the comparison with peers."""

import io
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console

from benchmarks.compare import figures, goals, limits, table
from benchmarks.compare.engines.base import Run, complete
from quire_tools.bench.measure import Record


def row(round_: int, engine: str, tokens_per_s: float, name: str = "W1", **more: Any) -> dict[str, Any]:
    """A recorded run."""
    latencies = {figure: 100 / tokens_per_s for figure in figures.LATENCIES}
    return {
        "round": round_,
        "workload": name,
        "engine": engine,
        "tokens_per_s": tokens_per_s,
        "failed": 0,
        **latencies,
        **more,
    }


RECORDED = [
    *(row(i, "quire", value) for i, value in enumerate((90.0, 100.0, 120.0))),
    *(row(i, "vllm", value) for i, value in enumerate((60.0, 50.0, 60.0))),
    *(row(i, "openvino", value) for i, value in enumerate((90.0, 80.0, 96.0))),
]


def recorded(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """A result of these runs."""
    engine = {"form": "server", "versions": {"vllm": "1"}, "settings": {}, "now_mb": 1.0, "idle_cpu_share": 0.0}
    return {
        "model": "bench-15m",
        "ours": "quire",
        "workloads": {"W1": {"rate": 0.0}},
        "limits": {"best": dict.fromkeys(limits.Rates.__dataclass_fields__, 1e9), "tokens_per_s": {"W1": 125.0}},
        "engines": {
            "quire": {**engine, "starts_s": [4.0, 6.0, 4.5], "peak_mb": 500.0},
            "vllm": {**engine, "starts_s": [90.0], "peak_mb": 2_000.0},
            "openvino": {**engine, "starts_s": [], "peak_mb": 0.0, "failure": "RuntimeError: no model"},
        },
        "runs": list(rows),
        "tokens": {"checked": 6, "different": ["quire W1 round 1 request 0 from token 3 on"]},
    }


def test_ratios_are_of_one_round() -> None:
    """The median of ratios, not the ratio of medians; rounds where one of both failed do not count."""
    found = figures.ratio(RECORDED, "W1", figures.THROUGHPUT, "quire", "vllm")
    assert found == figures.Spread(2.0, 1.5, 2.0)
    failing = [{**one, "failed": int(one["round"] == 0)} for one in RECORDED]
    assert figures.ratio(failing, "W1", figures.THROUGHPUT, "quire", "vllm") == figures.Spread(2.0, 2.0, 2.0)
    assert figures.ratio(RECORDED, "W1", figures.THROUGHPUT, "quire", "llamacpp") is None
    kept = figures.ratio_table(RECORDED, "quire")
    assert (
        kept["W1"]["vllm"]["tpot_p50_ms"] == {"median": 0.5, "least": 0.5, "most": 0.6667} and "quire" not in kept["W1"]
    )


def test_a_run_becomes_figures() -> None:
    """By the definitions that all load tools here share; other tokens than asked for are a failure."""
    good = Record(0, 0.0, token_times_s=[0.1, 0.2, 0.4], output_tokens=3, ended_s=0.4)
    short = Record(1, 0.0, token_times_s=[0.1], output_tokens=1, ended_s=0.2)
    complete(good, 3)
    complete(short, 3)
    found = figures.of_run(Run([good, short]))
    assert found["failed"] == 1 and found["errors"] == {"1 tokens, 3 requested": 1}
    assert (found["ttft_p50_ms"], found["tpot_p50_ms"], found["tokens_per_s"]) == (100.0, 150.0, 7.5)


def test_goals_are_read_from_a_result() -> None:
    """Only those that it says something about, by the median, in the direction of each."""
    found = {(one.goal, one.what): one for one in goals.verdicts(recorded(RECORDED))}
    assert found["D1", "W1 tokens_per_s / vllm"].is_met
    best = found["D2", "W1 tokens_per_s / openvino"]
    assert best.measured.median == 1.25 and best.is_met
    assert not found["D7", "start to the first token, s"].is_met and found["D7", "peak memory, GiB"].is_met
    assert {goal for goal, _ in found} == {"D1", "D2", "D7"}


def test_tables_show_what_was_recorded() -> None:
    """Medians with their spread, shares of the limit, failures, tokens that differ."""
    said = io.StringIO()
    table.show(recorded(RECORDED), Console(width=200, file=said))
    text = said.getvalue()
    for shown in (
        "100 (90-120)",
        "80%",
        "2.00 (1.50-2.00)",
        "4.5 (4.0-6.0)",
        "no model",
        "5 of 6",
        "from token 3 on",
        "missed",
    ):
        assert shown in text, shown
