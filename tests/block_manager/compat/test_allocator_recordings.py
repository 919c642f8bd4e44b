"""The recordings of allocators, evictors and tables through the command that runs all recordings."""

import json
from pathlib import Path

import pytest

from tests.golden.__main__ import main

FILES = sorted((Path(__file__).parents[2] / "golden" / "v0").glob("alloc_*.json"))
RUN = [file for file in FILES if "_unsorted_" not in file.name]


def last_line(capsys: pytest.CaptureFixture[str]) -> str:
    return capsys.readouterr().out.splitlines()[-1]


def test_all_recordings_are_there() -> None:
    """All three families."""
    assert {json.loads(file.read_text())["family"] for file in RUN} == {"evictor", "table", "cached_alloc"}


@pytest.mark.parametrize("file", RUN, ids=lambda file: file.stem)
def test_a_recording_is_reproduced(file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """R20, R66, R99, R109, R110, R111, R113, R117, R118, R119: every answer, also without the answers at hand."""
    assert main([str(file), "--emit", str(tmp_path / "out")]) == 0
    assert last_line(capsys) == "1 passed, 0 failed, 0 skipped"
    data = json.loads(file.read_text())
    trace = json.loads((tmp_path / "out" / file.name).read_text())["trace"]
    given = [{k: v for k, v in op.items() if k not in answer} for op, answer in zip(data["ops"], trace, strict=True)]
    data["ops"] = given
    (tmp_path / file.name).write_text(json.dumps(data))
    assert main([str(tmp_path / file.name), "--emit", str(tmp_path / "again")]) == 0
    assert last_line(capsys) == "0 passed, 0 failed, 1 skipped"
    assert json.loads((tmp_path / "again" / file.name).read_text())["trace"] == trace


@pytest.mark.parametrize("file", RUN, ids=lambda file: file.stem)
def test_a_changed_answer_fails(file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The comparison sees one wrong number and says at which operation."""
    data = json.loads(file.read_text())
    data["ops"][-1]["num_blocks" if data["family"] == "evictor" else "free"] += 1
    (tmp_path / "changed.json").write_text(json.dumps(data))
    assert main([str(tmp_path)]) == 1
    assert f"step {len(data['ops']) - 1}, " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d: d["ops"][3].update(colour=1), "field 'ops[3].colour' is unknown"),
        (lambda d: d["ops"][3].update(op="melt"), "field 'ops[3].op': unknown operation 'melt'"),
        (lambda d: d["ops"][0].pop("tokens"), "field 'ops[0].tokens' is missing"),
        (lambda d: d.update(colour=1), "field 'file.colour' is unknown"),
        (lambda d: d.pop("block_size"), "field 'file.block_size' is missing"),
    ],
)
def test_a_bad_file_names_its_field(change, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Unknown and missing fields and operations are failures that say where."""
    data = json.loads(next(file for file in RUN if "table_apc" in file.name).read_text())
    change(data)
    (tmp_path / "bad.json").write_text(json.dumps(data))
    assert main([str(tmp_path)]) == 1
    assert message in capsys.readouterr().out
