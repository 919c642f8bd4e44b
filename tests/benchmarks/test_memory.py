"""The memory report of the real core: the closed form, waste below a block, savings like the paper's, memory without paging."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from benchmarks.memory import __main__ as memory
from benchmarks.memory.recording import report
from benchmarks.memory.runs import Job, Kind, Setting, serve_contiguous, serve_paged
from benchmarks.memory.workloads import WORKLOADS, closed_form, constant, figures
from scheduler_svc.observe.memory_view import memory_report
from tests.support.core.builders import make_core, make_request, one_step

# The paper gives its ranges as "about", and these workloads are not its data sets.
TOLERANCE = 0.03


def invoke(*arguments: str) -> Any:
    app = typer.Typer()
    app.command()(memory.main)
    return CliRunner().invoke(app, list(arguments))


@pytest.mark.parametrize("n", [2, 4, 6])
@pytest.mark.parametrize(
    ("prompt", "outputs", "block_size"),
    [(161, 338, 16), (160, 50, 16), (64, 1, 16), (5, 40, 8), (16, 33, 1), (1, 17, 4), (47, 100, 32)],
)
def test_constant_lengths_give_the_closed_form(prompt: int, outputs: int, block_size: int, n: int) -> None:
    """R209, R19, R20: what the served tables share is exactly what the lengths say, also where the prompt fills its blocks."""
    figure = constant(prompt, outputs, block_size, n)
    assert figure["saved"] == pytest.approx(figure["closed_form"], abs=1e-12)
    assert 0 <= figure["max_waste_tokens"] < block_size


def test_the_closed_form_of_the_article() -> None:
    """R209: 161/338 with blocks of 16 saves 23.7, 35.5 and 39.4 %; one sample saves nothing."""
    assert [round(closed_form(161, 338, 16, n), 3) for n in (1, 2, 4, 6)] == [0.0, 0.237, 0.355, 0.394]


@pytest.mark.parametrize("kind", list(Kind))
@pytest.mark.parametrize("num_blocks", [400, 40])
def test_waste_is_below_a_block_at_every_step(kind: Kind, num_blocks: int) -> None:
    """R14, R16, R209: blocks are taken on demand; only the last one of a sequence has room, also when memory is short."""
    jobs = [Job(1 + 7 * i % 30, 1 + 11 * i % 50, 3 * i) for i in range(16)]
    moments = list(serve_paged(jobs, Setting(kind, 4, 8, num_blocks, 96)))
    assert max(m.memory.max_waste_tokens for m in moments) == 7
    assert all(m.memory.physical_blocks <= num_blocks for m in moments)
    assert sum(m.is_decode for m in moments) >= max(job.outputs for job in jobs)


@pytest.mark.parametrize("num_requests", [8, pytest.param(16, marks=pytest.mark.long)])
@pytest.mark.parametrize("workload", WORKLOADS, ids=lambda w: f"{w.name}-{w.kind.value}")
def test_savings_are_like_the_papers(
    workload: Any, num_requests: int, record_property: Callable[[str, object], None]
) -> None:
    """R14, R209: parallel sampling saves about 6-30 %, beam search about 44-66 %, more with more samples."""
    low, high = workload.paper
    rows = [figures(workload, n, num_requests, 0) for n in (2, 6)]
    saved = [row["saved"] for row in rows]
    assert low - TOLERANCE <= saved[0] < saved[1] <= high + TOLERANCE
    for row in rows:
        assert row["max_waste_tokens"] < 16 and row["waste"] < 0.2
        assert sum(row["contiguous"].values()) == pytest.approx(1.0)
        assert row["contiguous"]["used"] < 0.3 < row["contiguous"]["internal"]
        assert row["steps"]["contiguous"] >= row["steps"]["paged"]
    steps = sum(row["steps"]["paged"] for row in rows)
    record_property("size", f"savings by paging, {workload.name} {workload.kind.value}: {steps} steps")


def test_contiguous_memory_serves_the_same_jobs() -> None:
    """R209: 64 slots hold two regions of 32: two requests at a time, the third waits and what is free is no use to it."""
    jobs = [Job(4, 6), Job(4, 10), Job(4, 2)]
    rows = list(serve_contiguous(jobs, Setting(Kind.SAMPLING, 1, 8, 10, 20)))
    assert [running for _, running in rows] == [2] * 10 + [1] * 1
    first = rows[0][0]
    assert (first.used, first.reserved, first.internal, first.external) == (8, 16, 40, 16)
    assert rows[-1][0].external == 0
    with pytest.raises(ValueError, match="3 regions"):
        next(serve_contiguous(jobs, Setting(Kind.SAMPLING, 3, 8, 10, 20)))


def test_the_report_of_a_live_core() -> None:
    """R209: blocks shared by a prefix, waste, and what contiguous regions would hold; waiting requests count."""
    core = make_core(num_gpu_blocks=9, max_num_seqs=2)
    shared = list(range(1, 10))
    core.add(make_request("a", shared, 6))
    one_step(core)
    for name in "bc":
        core.add(make_request(name, shared, 6))
    one_step(core)
    core.schedule(0.0)
    found = memory_report(core.states)
    assert (found.paged.num_sequences, found.paged.logical_blocks, found.paged.physical_blocks) == (2, 6, 4)
    assert (found.paged.num_tokens, found.paged.waste_tokens, found.paged.max_waste_tokens) == (11 + 10, 1 + 2, 2)
    contiguous = found.contiguous
    assert (contiguous.used, contiguous.reserved, contiguous.internal) == (21, 2 * 15 - 21, 2)
    assert (contiguous.num_regions, contiguous.external) == (2, 0), (
        "two regions of 16 fill 32 slots; nothing is left to lose"
    )


def test_one_json_object_and_nothing_else() -> None:
    """R209: `constant` and `workloads` with shares as fractions; n and lengths as asked."""
    result = invoke("--json", "--prompt", "33", "--outputs", "20", "--block-size", "8", "--n", "3", "--requests", "4")
    assert result.exit_code == 0, result.output
    values = json.loads(result.stdout)
    [row] = values["constant"]
    assert (row["prompt"], row["outputs"], row["block_size"], row["n"]) == (33, 20, 8, 3)
    assert row["saved"] == pytest.approx(row["closed_form"])
    assert [(w["kind"], w["n"]) for w in values["workloads"]] == [("sampling", 3), ("sampling", 3), ("beam", 3)]
    assert all(set(w["contiguous"]) == {"used", "reserved", "internal", "external"} for w in values["workloads"])


@pytest.mark.parametrize("n", ["257", "2,257", "0", "2,,4", "two"])
def test_a_number_of_samples_that_cannot_run_is_a_usage_error(n: str) -> None:
    """Status 2 and what is allowed, before anything is served; 256 sequences run at a time."""
    result = invoke("--n", n)
    assert result.exit_code == 2
    assert "from 1 to 256" in " ".join(result.output.split())


def test_each_number_of_samples_is_measured_once() -> None:
    """In the order given; one sample shares nothing, so only constant lengths have it."""
    arguments = ("--prompt", "5", "--outputs", "3", "--block-size", "4", "--requests", "1", "--json")
    result = json.loads(invoke("--n", "3,1,3,1", *arguments).stdout)
    assert [row["n"] for row in result["constant"]] == [3, 1]
    assert [row["n"] for row in result["workloads"]] == [3] * len(WORKLOADS)


def test_the_tables_fit_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """80 columns: every name is whole and nothing is cut."""
    monkeypatch.setenv("COLUMNS", "80")
    shown = invoke("--n", "16", "--prompt", "5", "--outputs", "3", "--requests", "1").stdout
    assert all(f"{w.name} {w.kind.value} " in shown for w in WORKLOADS)
    assert all(f" {head} " in shown for head in ("closed form", "paper", "waste", "reserved", "internal", "external"))
    assert "…" not in shown


def test_bad_input_is_named(tmp_path: Path) -> None:
    """A list of counts that is none, and a file that is no recording."""
    assert "2,4,6" in invoke("--n", "two").output
    (tmp_path / "x.json").write_text('{"family": "v1"}')
    with pytest.raises(typer.BadParameter, match="family"):
        report(tmp_path / "x.json")


def test_a_recording_is_counted(tmp_path: Path) -> None:
    """R209: two samples of a prompt of 5, blocks of 4: shared at first, then a copy of the last block; one token each per step."""
    scenario = {
        "name": "two",
        "family": "v0",
        "config": {"block_size": 4},
        "requests": [{"id": "r", "prompt": [1, 2, 3, 4, 5]}],
        "trace": [
            {"step": 0, "scheduled": [{"id": "r", "sample": True}], "tables": {"r/0": ["g0", "g1"]}},
            {
                "step": 1,
                "scheduled": [{"id": "r", "sample": True}],
                "tables": {"r/0": ["g0", "g1"], "r/1": ["g0", "g2"]},
            },
            {"step": 2, "scheduled": [], "tables": {"r/0": ["c0", "c1"], "r/1": ["c0", "c2"]}},
        ],
    }
    path = tmp_path / "two.json"
    path.write_text(json.dumps(scenario))
    first, second, third = report(path)["steps"]
    assert (first["saved"], first["waste_tokens"]) == (0.0, 3)
    assert (second["logical_blocks"], second["physical_blocks"], second["waste_tokens"]) == (4, 3, 4)
    assert third["logical_blocks"] == 0
