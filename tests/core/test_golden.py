"""The recordings in `tests/golden` through the command that the project's owner runs too."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.golden.__main__ import main

GOLDEN = Path(__file__).parents[1] / "golden"


@pytest.mark.parametrize(
    ("options", "verdict"),
    [
        ([str(GOLDEN)], "128 passed, 0 failed, 1 skipped"),
        ([str(GOLDEN / "v1"), "--no-fast-path"], "25 passed, 0 failed, 0 skipped"),
        pytest.param([str(GOLDEN), "--no-fast-path"], "128 passed, 0 failed, 1 skipped", marks=pytest.mark.long),
    ],
)
def test_no_recording_fails(options: list[str], verdict: str, capsys: pytest.CaptureFixture[str]) -> None:
    """R23-R121, R127-R154, R160-R195: every scenario of v0, 2023, v1 and Chitu, with the fast path and without."""
    assert main(options) == 0
    assert capsys.readouterr().out.splitlines()[-1] == verdict


def test_a_changed_recording_fails(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The comparison sees one wrong number and says where."""
    data = json.loads((GOLDEN / "v1" / "preempt_00.json").read_text())
    data["trace"][4]["queues"]["waiting"].reverse()
    changed = tmp_path / "changed.json"
    changed.write_text(json.dumps(data))
    assert main([str(changed)]) == 1
    out = capsys.readouterr().out.splitlines()
    assert "step 4, queues.waiting" in out[0]
    assert out[-1] == "0 passed, 1 failed, 0 skipped"


@pytest.mark.parametrize("recording", ["v0/fcfs_00", "v1/mixed_00"])
def test_a_scenario_that_does_not_end_fails_by_itself(
    recording: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A run is bounded by the length of its recording, so that a scheduler which hangs is told of and the next file is run."""
    data = json.loads((GOLDEN / f"{recording}.json").read_text())
    data["config"] |= {"num_gpu_blocks": 4_000, "max_model_len": 4_000, "max_num_batched_tokens": 4_000}
    data["trace"] = data["trace"][:1]
    data["requests"][0] |= {"max_tokens": 2_000} if recording.startswith("v1") else {"outputs": [[7] * 2_000]}
    (tmp_path / "endless.json").write_text(json.dumps(data))
    assert main([str(tmp_path)]) == 1
    assert "has not ended after 1001 steps" in capsys.readouterr().out


def test_emit_gives_the_trace_of_inputs_without_one(tmp_path: Path) -> None:
    """Renamed ids and no trace: emitted, counted as skipped, equal to the recording up to the names."""
    original = json.loads((GOLDEN / "v1" / "apc_tight_00.json").read_text())
    renamed = json.loads(json.dumps(original).replace('"r', '"x'))
    renamed["name"], renamed["requests"] = (
        "renamed",
        [{k.replace("xequests", "requests"): v for k, v in r.items()} for r in renamed["xequests"]],
    )
    source = {k: renamed[k] for k in ("name", "family", "seed", "config", "requests", "aborts")}
    (tmp_path / "renamed.json").write_text(json.dumps(source))
    assert main([str(tmp_path / "renamed.json"), "--emit", str(tmp_path / "out")]) == 0
    emitted = json.loads((tmp_path / "out" / "renamed.json").read_text())
    assert emitted["name"] == "renamed"
    assert [s["free"] for s in emitted["trace"]] == [s["free"] for s in original["trace"]]
    assert [[n for _, n in s["scheduled"]] for s in emitted["trace"]] == [
        [n for _, n in s["scheduled"]] for s in original["trace"]
    ]
    keys = {k for s in original["trace"] for k in s} - {"raw", "info"}
    assert set(emitted["trace"][0]) == keys


def test_chitu_without_a_trace_is_emitted(tmp_path: Path) -> None:
    """R164: ids are only names: other ones and no trace give the same decisions."""
    original = json.loads((GOLDEN / "chitu" / "evict_chunk_00.json").read_text())
    renamed = json.loads(
        json.dumps({**original, "name": "renamed"}).replace('"r', '"x').replace('"xenamed', '"renamed')
    )
    del renamed["trace"]
    (tmp_path / "renamed.json").write_text(json.dumps(renamed).replace('"xeprefill"', '"reprefill"'))
    assert main([str(tmp_path / "renamed.json"), "--emit", str(tmp_path / "out")]) == 0
    emitted = json.loads((tmp_path / "out" / "renamed.json").read_text())
    assert emitted["trace"] == json.loads(
        json.dumps(original["trace"]).replace('"r', '"x').replace('"xemoved"', '"removed"')
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d: d.update(family="v9"), "unknown family 'v9'"),
        (lambda d: d.update(colour=1), "field 'file.colour' is unknown"),
        (lambda d: d["config"].update(colour=1), "field 'config.colour' is unknown"),
        (lambda d: d.update(aborts=[{"step": 1, "id": "r0", "why": 1}]), "field 'aborts[0].why' is unknown"),
        (lambda d: d["requests"][0].pop("prompt"), "field 'requests[0].prompt' is missing"),
    ],
)
def test_a_bad_scenario_names_its_field(change, message, tmp_path, capsys) -> None:
    """Unknown families and fields are failures that say where."""
    data = json.loads((GOLDEN / "v1" / "mixed_00.json").read_text())
    change(data)
    (tmp_path / "bad.json").write_text(json.dumps(data))
    assert main([str(tmp_path)]) == 1
    assert message in capsys.readouterr().out


def set_at(place: str, value: Any) -> Callable[[dict[str, Any]], None]:
    """A change of a scenario: `requests.0.n` is to have the value."""

    def change(data: Any) -> None:
        *above, last = [int(step) if step.isdigit() else step for step in place.split(".")]
        for step in above:
            data = data[step]
        data[last] = value

    return change


def failure(path: Path, capsys: pytest.CaptureFixture[str]) -> str:
    """The one line about a file that failed, without the file's name."""
    assert main([str(path)]) == 1
    line, verdict = capsys.readouterr().out.splitlines()
    assert verdict == "0 passed, 1 failed, 0 skipped"
    return line.removeprefix(f"{path}: ")


BAD_VALUES = [
    *(("v1/abort_00", place, value, field) for place, value, field in [
        ("config.block_size", "4", "config.block_size"),
        ("config.block_size", 4.0, "config.block_size"),
        ("config.block_size", 0, "config.block_size"),
        ("config.num_gpu_blocks", None, "config.num_gpu_blocks"),
        ("config.num_gpu_blocks", True, "config.num_gpu_blocks"),
        ("config.long_prefill_token_threshold", -3, "config.long_prefill_token_threshold"),
        ("config.policy", "lifo", "config.policy"),
        ("config.prefix_caching", "yes", "config.prefix_caching"),
        ("config.async", 1, "config.async"),
        ("config.batch_queue", 0, "config.batch_queue"),
        ("config", [], "file.config"),
        ("family", 3, "file.family"),
        ("family", "v9", "file.family"),
        ("seed", "x", "file.seed"),
        ("tags", None, "file.tags"),
        ("tags", [1], "tags[0]"),
        ("tags", "quirk_x", "file.tags"),
        ("trace", ["x"], "trace[0]"),
        ("trace", {}, "file.trace"),
        ("aborts", None, "file.aborts"),
        ("aborts", [5], "aborts[0]"),
        ("aborts.0.when", "later", "aborts[0].when"),
        ("aborts.0.step", -1, "aborts[0].step"),
        ("requests", None, "file.requests"),
        ("requests", {}, "file.requests"),
        ("requests", ["x"], "requests[0]"),
        ("requests.1.id", "r0", "requests[1].id"),
        ("requests.0.arrival_step", "0", "requests[0].arrival_step"),
        ("requests.0.arrival_step", -1, "requests[0].arrival_step"),
        ("requests.0.arrival_step", 0.5, "requests[0].arrival_step"),
        ("requests.0.arrival_time", float("nan"), "requests[0].arrival_time"),
        ("requests.0.arrival_time", False, "requests[0].arrival_time"),
        ("requests.0.max_tokens", "3", "requests[0].max_tokens"),
        ("requests.0.priority", "high", "requests[0].priority"),
        ("requests.0.prompt", "abc", "requests[0].prompt"),
        ("requests.0.prompt.1", 1.5, "requests[0].prompt[1]"),
        ("requests.0.outputs", [[1]], "requests[0].outputs[0]"),
    ]),
    ("v1/spec_00", "requests.0.draft_ok", [True, False], "requests[0].draft_ok"),
    ("v1/spec_00", "config.num_spec_tokens", "2", "config.num_spec_tokens"),
    *(("v0/beam_00", place, value, field) for place, value, field in [
        ("config.num_cpu_blocks", -1, "config.num_cpu_blocks"),
        ("config.delay_factor", "x", "config.delay_factor"),
        ("config.preemption_mode", "none", "config.preemption_mode"),
        ("config.sliding_window", 0, "config.sliding_window"),
        ("aborts", [{"step": 1, "id": "r0", "when": "before_update"}], "aborts[0].when"),
        ("clock", [1000.0], "file.clock"),
        ("clock", [], "file.clock"),
        ("clock", ["x"], "clock[0]"),
        ("requests.0.n", 0, "requests[0].n"),
        ("requests.0.lora", "x", "requests[0].lora"),
        ("requests.0.max_tokens", "3", "requests[0].max_tokens"),
        ("requests.0.outputs", None, "requests[0].outputs"),
        ("requests.0.outputs", [1, 2], "requests[0].outputs[0]"),
        ("requests.0.outputs", [[1]] * 7, "requests[0].outputs"),
        ("requests.0.beam_parents", [0], "requests[0].beam_parents[0]"),
        ("requests.0.beam_parents", [[0]], "requests[0].beam_parents[0]"),
        ("requests.0.beam_parents", [[0, 9]], "requests[0].beam_parents[0]"),
        ("requests.0.outputs.0", [5], "requests[0].beam_parents[0]"),
    ]),
    *(("v0/alloc_table_apc_00", place, value, field) for place, value, field in [
        ("ops", None, "file.ops"),
        ("ops", {}, "file.ops"),
        ("ops", ["x"], "ops[0]"),
        ("ops.0.op", "pop", "ops[0].op"),
        ("ops.0.op", 3, "ops[0].op"),
        ("ops.0.table", 3, "ops[0].table"),
        ("ops.0.tokens", "abc", "ops[0].tokens"),
        ("ops.0", {"op": "append", "table": "t9", "tokens": [1]}, "ops[0].table"),
        ("ops.0", {"op": "free", "table": "t0"}, "ops[0].now"),
        ("num_blocks", "8", "file.num_blocks"),
        ("prefix_caching", "yes", "file.prefix_caching"),
    ]),
    *(("chitu/pp_00", place, value, field) for place, value, field in [
        ("config.infer.max_reqs", 0, "config.infer.max_reqs"),
        ("config.infer.cache_type", "flat", "config.infer.cache_type"),
        ("config.infer.prefill_chunk_size", 0, "config.infer.prefill_chunk_size"),
        ("config.infer.num_blocks", 2.5, "config.infer.num_blocks"),
        ("config.scheduler.type", None, "config.scheduler.type"),
        ("config.scheduler.colour", 1, "config.scheduler.colour"),
        ("config.scheduler.pp_config.decode_num_tasks", "8", "config.scheduler.pp_config.decode_num_tasks"),
        ("config.limits", {"max_reqs": 3}, "config.limits.max_reqs"),
        ("config.lag", [], "config.lag"),
        ("config.lag", -1, "config.lag[0]"),
        ("config.clock.step_ns", "x", "config.clock.step_ns"),
        ("config.handoff", 1, "config.handoff"),
        ("config.stop_step", -1, "config.stop_step"),
        ("events", [{"step": 1}], "events[0].warmup"),
        ("tasks", {}, "file.tasks"),
        ("tasks.0.prompt_len", 0, "tasks[0].prompt_len"),
        ("tasks.0.arrv_ts", 0.5, "tasks[0].arrv_ts"),
        ("tasks.0.eos_at", 0, "tasks[0].eos_at"),
        ("tasks.0.colour", 1, "tasks[0].colour"),
        ("tasks.1.id", "r0", "tasks[1].id"),
    ]),
    ("v0/alloc_cached_00", "ops.0", {"op": "free", "handle": 7, "now": 1}, "ops[0].handle"),
    ("v0/alloc_cached_00", "ops.0", {"op": "promote", "handle": 0, "hash": None, "now": 1}, "ops[0].hash"),
    ("v0/alloc_evictor_00", "key", "name", "file.key"),
    ("v0/alloc_evictor_00", "ops.0.last_accessed", "x", "ops[0].last_accessed"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "place", "value", "field"), BAD_VALUES)
def test_a_bad_value_names_its_field(name, place, value, field, tmp_path, capsys) -> None:
    """Values of a wrong type, out of bounds or without a meaning are failures of their file that say where."""
    data = json.loads((GOLDEN / f"{name}.json").read_text())
    set_at(place, value)(data)
    (tmp_path / "bad.json").write_text(json.dumps(data))
    assert failure(tmp_path / "bad.json", capsys).startswith(f"field '{field}'")


@pytest.mark.parametrize(
    ("name", "place", "value", "line"),
    [
        ("v1/mixed_00", "config.block_size", "4",
         "field 'config.block_size': Input should be a valid integer (given: '4')"),
        ("v1/mixed_00", "requests.0", "x", "field 'requests[0]': Input should be an object (given: 'x')"),
        ("v1/mixed_00", "requests.0.n", 1, "field 'requests[0].n' is unknown"),
        ("v0/alloc_table_apc_00", "ops.0", {"op": "fork", "table": "t0"}, "field 'ops[0].child' is missing"),
        ("v0/alloc_table_apc_00", "ops.0.colour", 1, "field 'ops[0].colour' is unknown"),
        ("v0/alloc_table_apc_00", "ops.0", {"op": "free", "table": "t0", "now": 1},
         "field 'ops[0].table': there is no such table at this point (given: 't0')"),
    ],
)  # fmt: skip
def test_a_refusal_says_what_was_given(name, place, value, line, tmp_path, capsys) -> None:
    """The whole line about a bad value."""
    data = json.loads((GOLDEN / f"{name}.json").read_text())
    set_at(place, value)(data)
    (tmp_path / "bad.json").write_text(json.dumps(data))
    assert failure(tmp_path / "bad.json", capsys) == line


@pytest.mark.parametrize("text", ["[]", "3", "{", "", "[" * 100_000])
def test_what_is_no_object_is_a_failure_of_its_file(text, tmp_path, capsys) -> None:
    """The files beside it are run all the same."""
    (tmp_path / "a_bad.json").write_text(text)
    (tmp_path / "b_good.json").write_text((GOLDEN / "v1" / "seed_example_00.json").read_text())
    assert main([str(tmp_path)]) == 1
    line, verdict = capsys.readouterr().out.splitlines()
    assert line.startswith(f"{tmp_path / 'a_bad.json'}: ")
    assert verdict == "1 passed, 1 failed, 0 skipped"


def test_whole_numbers_may_stand_for_times(tmp_path, capsys) -> None:
    """Ints where floats are meant: arrival_time, delay_factor and clock."""
    data = json.loads((GOLDEN / "v0" / "fcfs_00.json").read_text())
    data["config"]["delay_factor"] = 0
    data["clock"] = [1000 + step for step in range(len(data["trace"]))]
    for request in data["requests"]:
        request["arrival_time"] = int(request["arrival_time"])
    (tmp_path / "whole.json").write_text(json.dumps(data))
    assert main([str(tmp_path)]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "1 passed, 0 failed, 0 skipped"


def test_an_error_of_the_core_is_one_line(tmp_path, capsys) -> None:
    """Valid in form, refused by the scheduler: a failure of that file."""
    data = json.loads((GOLDEN / "v1" / "seed_example_00.json").read_text())
    data["requests"][0]["prompt"] = []
    (tmp_path / "refused.json").write_text(json.dumps(data))
    assert "InvalidArgument" in failure(tmp_path / "refused.json", capsys)


def test_a_folder_without_scenarios_is_no_success(tmp_path, capsys) -> None:
    """Nothing was checked: said so, exit status 1."""
    assert main([str(tmp_path)]) == 1
    assert capsys.readouterr().out.splitlines() == [
        f"no scenario files in {tmp_path}",
        "0 passed, 0 failed, 0 skipped",
    ]


def put(*paths: Path) -> None:
    for path in paths:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text((GOLDEN / "v1" / "seed_example_00.json").read_text())


def written(out: Path) -> set[str]:
    return {str(path.relative_to(out)) for path in out.rglob("*") if path.is_file()}


def test_emitted_names_are_flat_until_they_clash(tmp_path, monkeypatch, capsys) -> None:
    """As many folders above the name as make it unique, whether paths are relative or not; nothing outside OUT."""
    monkeypatch.chdir(tmp_path)
    put(Path("a/s/x.json"), Path("b/s/x.json"), Path("c/y.json"), Path("z.json"), Path("c/z.json"))
    assert main(["a", "b", "c", "z.json", "--emit", "out"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "5 passed, 0 failed, 0 skipped"
    assert written(Path("out")) == {"a/s/x.json", "b/s/x.json", "y.json", f"{tmp_path.name}/z.json", "c/z.json"}


def test_a_file_named_twice_runs_once(tmp_path, capsys) -> None:
    """By itself and with its folder: one scenario, no clash."""
    put(tmp_path / "in" / "x.json")
    places = [str(tmp_path / "in"), str(tmp_path / "in" / ".." / "in" / "x.json")]
    assert main([*places, "--emit", str(tmp_path / "out")]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "1 passed, 0 failed, 0 skipped"
    assert written(tmp_path / "out") == {"x.json"}


@pytest.mark.parametrize(
    ("out", "reason"),
    [
        ("in", "is a scenario of this run"),
        ("in/x.json", "is a file, not a folder"),
        ("in/x.json/deeper", "is a file, not a folder"),
        ("linked", "lies outside of that folder"),
        ("taken", "is a folder"),
    ],
)
def test_emit_refuses_before_anything_is_run(out, reason, tmp_path, capsys) -> None:
    """Over a scenario, onto a file or a folder, out of OUT: usage error, nothing is run, nothing changes."""
    put(tmp_path / "in" / "x.json", tmp_path / "elsewhere" / "kept.json")
    (tmp_path / "linked").mkdir()
    (tmp_path / "linked" / "x.json").symlink_to(tmp_path / "elsewhere" / "kept.json")
    (tmp_path / "taken" / "x.json").mkdir(parents=True)
    before = {path: path.read_text() for path in tmp_path.rglob("*.json") if path.is_file()}
    with pytest.raises(SystemExit) as ended:
        main([str(tmp_path / "in"), "--emit", str(tmp_path / out)])
    assert ended.value.code == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert reason in said.err
    assert {path: path.read_text() for path in tmp_path.rglob("*.json") if path.is_file()} == before


def test_the_command_runs_as_documented() -> None:
    """`python -m tests.golden FILE` by itself, with its last line and exit status."""
    file = GOLDEN / "v1" / "seed_example_00.json"
    command = [sys.executable, "-m", "tests.golden", str(file)]
    done = subprocess.run(command, cwd=GOLDEN.parents[1], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "1 passed, 0 failed, 0 skipped"
