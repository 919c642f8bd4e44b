"""The benchmarks run against the real services (simulated worker), small."""

import asyncio
import json
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from benchmarks import explain, pauses, simulated_stack, startup
from benchmarks.simulated_stack import Arrivals
from quire.local_stack.stack import LocalStack
from tests.benchmarks.test_load import figures, invoke


def test_load_over_grpc(stack: LocalStack, tmp_path: Path) -> None:
    """Every request gets exactly the tokens asked for; a shared prefix is found in the cache."""
    out = tmp_path / "r.json"
    arguments = ["--prompt-len", "20", "--output-len", "8", "--num-requests", "24", "--rate", "200", "--out", str(out)]
    run = figures(invoke("--grpc", stack.grpc_address, "--workload", "all", *arguments), out)
    for name, summary in run["summary"].items():
        assert (summary["failed"], summary["output_tokens"]) == (0, 24 * 8), name
        assert summary["tpot_ms"]["p50"] >= 0
    assert run["summary"]["shared-prefix"]["cached_prompt_tokens"] > 24 * 100
    assert run["summary"]["batch"]["cached_prompt_tokens"] == 0


def test_load_over_http(stack: LocalStack, tmp_path: Path) -> None:
    """The same through our OpenAI door, text and chat."""
    for extra in ([], ["--chat"]):
        out = tmp_path / "r.json"
        arguments = ["--prompt-len", "20", "--output-len", "8", "--num-requests", "8", "--out", str(out), *extra]
        run = figures(invoke("--openai", stack.http_url, *arguments), out)
        assert run["summary"]["batch"]["output_tokens"] == 8 * 8


def test_a_refused_request_is_named_by_its_reason(stack: LocalStack, tmp_path: Path) -> None:
    """A prompt beyond the model's length shows up as its typed error."""
    arguments = ["--prompt-len", "20000", "--num-requests", "1", "--warmup", "0", "--out", str(tmp_path / "r.json")]
    result = invoke("--grpc", stack.grpc_address, *arguments)
    assert result.exit_code == 1
    assert "OUT_OF_RANGE PROMPT_TOO_LONG" in result.output


@pytest.mark.parametrize("way", ["scheduler", "gateway"])
def test_the_control_path_is_counted(stack: LocalStack, way: str) -> None:
    """All tokens of all sequences arrive and give a rate."""
    arrivals = Arrivals(num_seqs=16, tokens_wanted=60)
    run = {
        "scheduler": lambda: simulated_stack.through_scheduler(stack.scheduler_address, arrivals),
        "gateway": lambda: simulated_stack.through_gateway(stack.grpc_address, arrivals),
    }[way]
    asyncio.run(run())
    assert sum(arrivals.counts.values()) == 16 * 60
    steps_per_s, window_s = arrivals.steps_per_s()
    assert 0 < steps_per_s < 1e6
    assert 0 < window_s < 60


def test_steps_per_second_counts_only_full_batches() -> None:
    """The window opens when the last sequence has its first token and closes when the first is complete."""
    events = [(0.0, 0, 1), (1.0, 1, 1), (2.0, 0, 1), (2.0, 1, 1), (3.0, 0, 1), (3.0, 1, 1), (9.0, 1, 1)]
    assert Arrivals(2, 3, events=events).steps_per_s() == (1.0, 2.0)
    with pytest.raises(RuntimeError, match="more tokens"):
        Arrivals(2, 3, events=events[:1]).steps_per_s()


def test_startup_reads_the_lines_of_quire_up() -> None:
    """Times and addresses come from the lines that `quire up` promises to print."""
    start = startup.Start()
    start.take("service gateway pid=12 address=127.0.0.1:5", 0.5)
    start.take("Loading something", 0.6)
    start.take("ready grpc=127.0.0.1:5 http=http://127.0.0.1:6 admin=127.0.0.1:7", 0.75)
    assert (start.listening_s, start.pids, start.ready_s) == ({"gateway": 0.5}, {"gateway": 12}, 0.75)
    assert start.address == "127.0.0.1:5"


@pytest.mark.long
def test_startup_runs_for_real() -> None:
    """One start with the built-in model: all figures are there and plausible."""
    figures = startup.run_once(str(Path("models") / "tiny"))
    assert json.loads(json.dumps(figures)) == figures
    for name in ("gateway", "scheduler", "worker"):
        assert 0 < figures[f"{name}_listening_s"] <= figures["ready_s"] < figures["first_token_s"] < 120
        assert 10 < figures[f"{name}_rss_mb"] < 8000


@pytest.mark.parametrize("num_warm", [64, pytest.param(explain.WARM_STEPS, marks=pytest.mark.long)])
def test_explaining_is_measured(num_warm: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A core that gives its reasons, and the same one without."""
    monkeypatch.setattr(explain, "WARM_STEPS", num_warm)
    app = typer.Typer()
    app.command()(explain.main)
    given = ["--policies", "quire", "--waiting", "20", "--running", "8", "--steps", "16", "--json"]
    result = CliRunner().invoke(app, given)
    assert result.exit_code == 0, result.output
    [found] = json.loads(result.stdout)["runs"]
    assert min(found["step_us"], found["silent_step_us"]) > 0


@pytest.mark.long
@pytest.mark.timeout(300)
def test_pauses_are_measured() -> None:
    """Each harm once, on real processes with a simulated worker: streams go on after all of them, and each has its figures."""
    seconds = pauses.measure(1, 1, 0.5, simulated=True)["seconds"]
    assert set(seconds) >= set(pauses.GOALS_S)
    for name, found in seconds.items():
        assert found["count"] == (1 if name.endswith("noticed") else pauses.NUM_STREAMS) and found["p50"] > 0
