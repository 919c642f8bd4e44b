"""The load generator measures what happened."""

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner, Result

from benchmarks import load
from quire_tools.bench.measure import Record, finish, summarise
from quire_tools.bench.workloads import Length, LoadShape, WorkloadKind, plan
from tests.benchmarks.openai_like import OpenAILike


def invoke(*arguments: str) -> Result:
    """`python -m benchmarks.load ARGUMENTS`, in this process."""
    app = typer.Typer()
    app.command()(load.main)
    return CliRunner().invoke(app, [*arguments])


def figures(result: Result, path: Path) -> dict[str, Any]:
    """The result file of a run that went well."""
    assert result.exit_code == 0, result.output
    return json.loads(path.read_text(encoding="utf-8"))


@pytest.fixture
def server() -> Iterator[OpenAILike]:
    """An OpenAI-like endpoint with 50 ms to the first token and 10 ms between tokens."""
    with OpenAILike().serving() as serving:
        yield serving


# --- figures -------------------------------------------------------------------------------------------------------


def test_figures_follow_their_definitions() -> None:
    """TTFT and latency count from the planned arrival; TPOT skips the first token; failures count in no figure."""
    good = Record(0, 1.0, sent_s=1.1, token_times_s=[2.0, 2.1, 2.4], ended_s=2.5, prompt_tokens=5, output_tokens=3)
    lone = Record(1, 1.0, sent_s=1.0, token_times_s=[3.0], ended_s=3.0, prompt_tokens=5, output_tokens=1)
    failed = Record(2, 1.0, sent_s=1.0, ended_s=1.5, error="UNAVAILABLE")
    summary = summarise([good, lone, failed])
    assert (summary["requests"], summary["failed"], summary["errors"]) == (3, 1, {"UNAVAILABLE": 1})
    assert summary["duration_s"] == 2.0
    assert (summary["output_tokens_per_s"], summary["total_tokens_per_s"], summary["requests_per_s"]) == (2.0, 7.0, 1.0)
    assert (summary["ttft_ms"]["mean"], summary["ttft_ms"]["max"]) == (1500.0, 2000.0)
    assert summary["tpot_ms"]["p50"] == 200.0
    assert (summary["itl_ms"]["mean"], summary["itl_ms"]["max"]) == (200.0, 300.0)
    assert summary["client_lag_ms"]["max"] == 100.0


def test_streams_that_say_nothing_or_too_much_have_failed() -> None:
    """An empty answer is not a fast answer."""
    silent, chatty = Record(0, 0.0), Record(1, 0.0, token_times_s=[1.0], output_tokens=9)
    finish(silent, max_tokens=8)
    finish(chatty, max_tokens=8)
    assert (silent.error, chatty.error) == ("no token", "9 tokens, 8 asked")


# --- plans ---------------------------------------------------------------------------------------------------------


def test_lengths() -> None:
    """Fixed, or log-normal within bounds with the median asked for."""
    assert Length.parse("12").draw(random.Random(0)) == 12
    length = Length.parse("lognormal:100:0.5:50:300")
    drawn = sorted(length.draw(random.Random(seed)) for seed in range(2001))
    assert (drawn[0], drawn[-1]) == (50, 300)
    assert 90 < drawn[1000] < 110
    for wrong in ("lognormal:1", "normal:1:2", "x"):
        with pytest.raises(ValueError, match="lognormal:MEDIAN:SIGMA"):
            Length.parse(wrong)


def test_plans_are_reproducible_and_shaped() -> None:
    """Equal seeds give equal plans; Poisson gaps have the rate's mean; prefixes are shared by every n-th request."""
    length = Length.parse("5")
    poisson = LoadShape(WorkloadKind.POISSON, 2000, length, length, seed=3, rate=50.0)
    planned = plan(poisson)
    assert planned == plan(poisson)
    assert planned[0].at_s == 0.0
    assert 1999 / planned[-1].at_s == pytest.approx(50, rel=0.1)
    shared = plan(LoadShape(WorkloadKind.SHARED_PREFIX, 6, length, length, prefix_len=20, num_prefixes=2))
    heads = [p.text.split()[:20] for p in shared]
    assert heads[0] == heads[2] == heads[4] != heads[1] == heads[3] == heads[5]
    assert len({p.text for p in shared}) == 6
    assert {len(p.text.split()) for p in shared} == {25}


# --- against a server with known delays ------------------------------------------------------------------------------


@pytest.mark.parametrize("chat", [False, True])
def test_known_delays_are_measured(server: OpenAILike, tmp_path: Path, chat: bool) -> None:
    """50 ms to the first token and 50 ms per further one come out as such; usage is taken from the server."""
    server.gap_s = 0.05
    out = tmp_path / "r.json"
    arguments = ["--openai", server.url, "--num-requests", "8", "--output-len", "5", "--out", str(out)]
    run = figures(invoke(*arguments, *(["--chat"] if chat else [])), out)
    summary = run["summary"]["batch"]
    assert (summary["failed"], summary["output_tokens"], summary["prompt_tokens"]) == (0, 40, 56)
    assert summary["cached_prompt_tokens"] == 24
    # Sleeps never end early; how late they end is the machine's affair, and a late first token shortens the gaps after it.
    assert summary["ttft_ms"]["p50"] >= 50
    assert summary["tpot_ms"]["p50"] >= 25
    assert summary["latency_ms"]["p50"] >= 250
    assert summary["duration_s"] >= 0.25
    assert run["machine"]["cores"] >= 1
    assert run["versions"]["quire"]
    assert len(server.bodies) == 8 + 4, "four warm-up requests"
    assert all(body["ignore_eos"] is True and body["stream"] is True for body in server.bodies)


def test_single_runs_one_at_a_time(server: OpenAILike, tmp_path: Path) -> None:
    """`single` never has two requests in flight, and only standard fields go out when told so."""
    out = tmp_path / "r.json"
    arguments = ["--workload", "single", "--num-requests", "3", "--output-len", "2", "--warmup", "0"]
    run = figures(invoke("--openai", server.url, "--no-ignore-eos", "--out", str(out), *arguments), out)
    assert run["summary"]["single"]["duration_s"] >= 3 * 0.06
    standard = {"model", "prompt", "max_tokens", "temperature", "stream", "stream_options"}
    assert all(body.keys() == standard for body in server.bodies)


def test_arrivals_do_not_wait_for_answers(server: OpenAILike, tmp_path: Path) -> None:
    """Open loop: with answers far slower than arrivals, all requests are still sent at their time."""
    server.first_s = 0.5
    out = tmp_path / "r.json"
    arguments = ["--workload", "poisson", "--rate", "100", "--num-requests", "20", "--output-len", "1", "--warmup", "0"]
    run = figures(invoke("--openai", server.url, "--out", str(out), *arguments), out)
    assert 0.5 <= run["summary"]["poisson"]["duration_s"] < 5 < 20 * 0.5


def test_refusals_are_counted_and_fail_the_run(server: OpenAILike, tmp_path: Path) -> None:
    """HTTP errors are figures; the command's status says that something failed."""
    server.refuse = True
    result = invoke("--openai", server.url, "--num-requests", "2", "--warmup", "0", "--out", str(tmp_path / "r.json"))
    assert result.exit_code == 1
    assert "2 x RuntimeError: HTTP 429" in result.output


def test_a_plot_is_drawn(server: OpenAILike, tmp_path: Path) -> None:
    """`--plot` makes a PNG with a row per workload."""
    arguments = ["--num-requests", "2", "--output-len", "2", "--warmup", "0", "--rate", "50", "--no-save"]
    result = invoke("--openai", server.url, "--workload", "all", "--plot", str(tmp_path / "p.png"), *arguments)
    assert result.exit_code == 0, result.output
    assert (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ([], "exactly one of"),
        (["--grpc", "a:1", "--openai", "http://b"], "exactly one of"),
        (["--grpc", "a:1", "--workload", "heavy"], "is not one of batch"),
        (["--grpc", "a:1", "--prompt-len", "many"], "lognormal:MEDIAN"),
        (["--grpc", "a:1", "--tokenizer", "nowhere.json"], "there is no nowhere.json"),
    ],
)
def test_wrong_options_say_what_is_right(arguments: list[str], says: str) -> None:
    """Each mistake on the command line is told."""
    result = invoke(*arguments)
    assert result.exit_code == 2
    assert says in " ".join(result.output.replace("│", " ").split())
