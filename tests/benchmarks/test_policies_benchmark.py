"""The comparison of policies: deterministic, and every figure where it belongs."""

import json
from pathlib import Path

from typer.testing import CliRunner, Result

from benchmarks.policies import __main__ as policies
from tests.quire_tools.simulation.test_simulation import serve

NUM_REQUESTS = 8


def run_benchmark(*arguments: str) -> Result:
    app = policies.typer.Typer()
    app.command()(policies.main)
    return CliRunner().invoke(app, ["--requests", str(NUM_REQUESTS), "--workload", "chat", *arguments])


def test_the_same_seed_gives_the_same_figures() -> None:
    """R201: two runs agree in every figure of every policy; another seed gives others."""
    arguments = ("--json", "--policies", "vllm-v0,vllm-v1-async")
    one, same, other = (json.loads(run_benchmark(*arguments, "--seed", seed).stdout) for seed in ("1", "1", "2"))
    assert one["workloads"] == same["workloads"]
    assert one["workloads"] != other["workloads"]
    for figures in one["workloads"]["chat"]["policies"].values():
        assert figures["num_done"] == figures["num_requests"] == NUM_REQUESTS
        assert 0 < figures["ttft_p50_s"] <= figures["ttft_p99_s"]


def test_unknown_names_are_refused() -> None:
    """A policy that is not there is named together with those that are."""
    result = run_benchmark("--policies", "vllm-v7")
    assert result.exit_code == 2
    assert "vllm-v7" in result.output
    assert "vllm-v1" in result.output


def test_the_picture_is_drawn(tmp_path: Path) -> None:
    """A plot of latencies, throughput and lost tokens comes out where it was asked for."""
    out = tmp_path / "policies.png"
    result = run_benchmark("--policies", "vllm-v1", "--plot", str(out))
    assert result.exit_code == 0, result.output
    assert out.stat().st_size > 10_000


def test_figures_follow_from_the_history() -> None:
    """Quantiles, sums and throughput are those of the requests."""
    history = serve("bursts", num_gpu_blocks=4_096, prefix_caching=True)
    figures, requests = history.figures(), list(history.requests.values())
    ttft = sorted(r.ttft_s for r in requests if r.ttft_s is not None)
    assert ttft[0] <= figures.ttft_p50_s <= figures.ttft_p99_s <= ttft[-1]
    num_tokens = sum(len(r.token_times_s) for r in requests)
    assert abs(figures.throughput * figures.duration_s - num_tokens) < 1e-6 * num_tokens
    assert figures.num_computed_tokens == sum(r.num_computed_tokens for r in requests)
    assert 0 < figures.fairness <= 1
