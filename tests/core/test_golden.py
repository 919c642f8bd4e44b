"""The recordings in `tests/golden` through the command that the project's owner runs too."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.golden.__main__ import main

GOLDEN = Path(__file__).parents[1] / "golden"


@pytest.mark.parametrize("options", [[], ["--no-fast-path"]])
def test_no_recording_fails(options: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """R23-R121, R127-R154: every scenario of v0, 2023 and v1, with the fast path and without; Chitu is not built yet."""
    assert main([str(GOLDEN), *options]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "75 passed, 0 failed, 54 skipped"


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


def test_the_command_runs_as_documented() -> None:
    """`python -m tests.golden FILE` by itself, with its last line and exit status."""
    file = GOLDEN / "v1" / "seed_example_00.json"
    command = [sys.executable, "-m", "tests.golden", str(file)]
    done = subprocess.run(command, cwd=GOLDEN.parents[1], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "1 passed, 0 failed, 0 skipped"
