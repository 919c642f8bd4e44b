"""The benchmark of the scheduler core: its JSON, its checks and that they can fail."""

import json
import subprocess
import sys
from collections.abc import Callable

import pytest
import typer
from typer.testing import CliRunner, Result

from benchmarks.scheduler_core import __main__ as scheduler_core
from benchmarks.scheduler_core import runs, wire
from benchmarks.scheduler_core.model import Model
from benchmarks.scheduler_core.runs import CHURN, Case
from benchmarks.scheduler_core.workers import ManyWorkers, many_workers
from scheduler_svc.core.composition import presets
from scheduler_svc.core.limits import CoreLimits
from scheduler_svc.core.scheduler import Scheduler

PIPELINED = Case(running=32, caching=True, asynchronous=True, churn=0.0, n=2)


def invoke(*arguments: str) -> Result:
    """`python -m benchmarks.scheduler_core ARGUMENTS`, in this process."""
    app = typer.Typer()
    app.command()(scheduler_core.main)
    return CliRunner().invoke(app, [*arguments])


def test_the_command_prints_one_json_object() -> None:
    """All ways to run, verified: every figure is there, nothing else on standard output, nothing on standard error."""
    command = [sys.executable, "-m", "benchmarks.scheduler_core", "--running", "8", "--verify", "--json"]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=100)
    assert (done.returncode, done.stderr) == (0, "")
    result = json.loads(done.stdout)
    assert {"machine", "versions", "commit", "steady", "admission", "wire", "goals", "verified"} <= set(result)
    keys = ("running", "caching", "asynchronous", "churn", "n")
    ways = [tuple(row[key] for key in keys) for row in result["steady"]]
    assert len(ways) == len(set(ways)) == 16
    for row in result["steady"]:
        assert row["step_us"] == pytest.approx(row["schedule_us"] + row["update_us"], abs=0.02)
        assert row["step_us"] > 0
        assert row["message_bytes"] > 0
        middle, least, greatest = row["ratio"]
        assert least <= middle <= greatest
        assert row["churn"] or (least, greatest) == (1.0, 1.0)
    assert [row["hit"] for row in result["admission"]] == [False, True]
    assert all(row["request_us"] > 0 for row in result["admission"])
    assert result["wire"]["rows"] == 256
    assert {goal["id"] for goal in result["goals"]} == {"B1", "B2", "B3", "B4", "B5", "B6"}


def test_a_steady_message_does_not_grow() -> None:
    """B4: with all sequences aligned, 15 of 16 steps send nothing and one sends each sequence a block."""
    sizes = {n: runs.message_sizes(Case(n, True, False, 0.0, 1)) for n in (8, 64)}
    assert len(sizes[8]) == len(sizes[64]) == 16
    assert sorted(sizes[8])[:15] == sorted(sizes[64])[:15]
    assert max(sizes[64]) > max(sizes[8]) > min(sizes[8])


def test_arrivals_keep_the_batch_full() -> None:
    """With churn as many come as end; where results come late, their places are empty until then."""
    for asynchronous in (False, True):
        figures = runs.steady(Case(100, True, asynchronous, CHURN, 1), verify=True)
        assert figures.differences == []
        assert figures.mean_scheduled == pytest.approx(99 if asynchronous else 100, abs=0.25)


# --- the checks can fail -------------------------------------------------------------------------------------------------


def wrong_references(core: Scheduler) -> None:
    core.state.cache.ledger.gpu.refs[3] += 1


def wrong_table(core: Scheduler) -> None:
    tables = core.state.cache.ledger.tables
    first, *_, last = tables.values()
    first[-1] = last[-1]


def wrong_token(core: Scheduler) -> None:
    core.state.running[0].sequences[0].token_ids[-1] += 1


def wrong_counter(core: Scheduler) -> None:
    core.state.fast_rows.computed[5] += 1


def lost_prefixes(core: Scheduler) -> None:
    core.state.cache.reset_prefixes()


def lost_request(core: Scheduler) -> None:
    core.abort(["r7"])


def test_nothing_is_found_where_nothing_is_wrong() -> None:
    """--verify: what the tests below find is there because of what they do."""
    assert runs.steady(PIPELINED, verify=True).differences == []


@pytest.mark.parametrize(
    ("corrupt", "what"),
    [
        (wrong_references, "block g3: references"),
        (wrong_table, "sequences that hold it"),
        (wrong_token, "r1/0: tokens"),
        (wrong_counter, "computed tokens"),
        (lost_prefixes, "found by their hash"),
        (lost_request, "live requests"),
    ],
)
def test_what_is_wrong_in_the_core_is_found(
    monkeypatch: pytest.MonkeyPatch, corrupt: Callable[[Scheduler], None], what: str
) -> None:
    """--verify: a counter, table, token or prefix that is not as the brute-force model has it is named."""
    look = Model.differences_of

    def look_later(model: Model, core: Scheduler) -> list[str]:
        corrupt(core)
        return look(model, core)

    monkeypatch.setattr(Model, "differences_of", look_later)
    assert any(what in text for text in runs.steady(PIPELINED, verify=True).differences)


@pytest.mark.long
def test_a_difference_ends_with_status_1(monkeypatch: pytest.MonkeyPatch) -> None:
    """The figures are printed all the same; what differs is on standard error."""
    look = Model.differences_of

    def look_later(model: Model, core: Scheduler) -> list[str]:
        wrong_references(core)
        return look(model, core)

    monkeypatch.setattr(Model, "differences_of", look_later)
    result = invoke("--running", "4", "--verify", "--json")
    assert result.exit_code == 1
    assert json.loads(result.stdout)["verified"] is False
    assert "block g3: references" in result.stderr


def test_steps_that_are_wrong_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """--verify: tokens that go to the wrong sequence differ, though every count is right."""
    planned = Model.planned

    def swapped(model: Model, plan: object, result: object) -> None:
        planned(model, plan, result)  # type: ignore[arg-type]
        given = model.results[result.step]  # type: ignore[attr-defined]
        given["r1/0"], given["r2/0"] = given["r2/0"], given["r1/0"]

    monkeypatch.setattr(Model, "planned", swapped)
    assert any("r1/0: tokens" in text for text in runs.steady(PIPELINED, verify=True).differences)


def test_admissions_that_find_nothing_are_no_hits() -> None:
    """Prompts that were never admitted cannot count as hits."""
    core = presets.build("vllm-v1", CoreLimits(16, 65, max_model_len=256))
    prompts = [[i] * 64 for i in range(1, 5)]
    assert runs.admit_all(core, prompts, hit=False, verify=True).differences == []
    assert runs.admit_all(core, prompts, hit=True, verify=True).differences == []
    strange = [[i] * 64 for i in range(5, 9)]
    [first, *_] = runs.admit_all(core, strange, hit=True, verify=True).differences
    assert first == "hit0/0: 64 tokens computed, 0 found"


def test_the_wire_carries_what_was_sent() -> None:
    """All 256 changes come back equal."""
    figures = wire.wire(256)
    assert figures.differences == []
    assert figures.message_bytes > 256 * 4 * 5


@pytest.mark.parametrize("text", ["", "x", "0", "32,-1"])
def test_sizes_must_be_numbers(text: str) -> None:
    """A wrong list is refused with an example."""
    result = invoke("--running", text)
    assert result.exit_code == 2
    assert "32,1024" in result.output


@pytest.mark.long
def test_each_size_is_measured_once() -> None:
    """A size that is given twice costs and shows as one."""
    result = json.loads(invoke("--running", "4,4", "--json").stdout)
    assert len(result["steady"]) == 16


def test_the_table_names_goals(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without --json there is a table for people; here of one way to run."""
    monkeypatch.setattr(scheduler_core, "pairs", lambda sizes: [[PIPELINED]])
    result = invoke("--running", "32")
    assert result.exit_code == 0, result.output
    assert all(goal in result.output for goal in ("B1", "B2", "B3", "B4", "B5", "B6"))


def test_cache_groups_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """A row for each number of groups without and with states; all sequences run, in columns."""
    monkeypatch.setattr(scheduler_core, "_GROUP_ROWS", 8)
    found = scheduler_core.of_groups([1, 3])
    assert [(row["num_groups"], row["has_states"]) for row in found] == [(1, False), (3, False), (1, True), (3, True)]
    assert all(row["mean_scheduled"] == 8 and row["step_us"] > 0 for row in found)
    assert len({row["message_bytes"] for row in found}) == 1 and found[1]["block_bytes"] > found[0]["block_bytes"]


def test_many_workers_are_measured() -> None:
    """A row for each number of worker groups; all sequences run, and with churn as many arrive as end."""
    rows = many_workers([1, 3], 8, 0.25, num_rounds=8)
    assert [(row.workers, row.churn) for row in rows] == [(1, 0.25), (3, 0.25)]
    run = ManyWorkers(3, 8, 0.25)
    for step in range(40):
        run.round(float(step))
    assert sum(run.core.queue_lengths) == 24 and run.core.check_integrity() == []
