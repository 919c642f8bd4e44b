"""`quire convert`: pickled checkpoints become safetensors, and a malicious one runs nothing."""

import json
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from quire.built_in_model import default_model
from quire.cli import main
from quire_tools.convert import checkpoint, child
from quire_tools.convert.isolated import TensorFacts
from svc_common.errors import ConfigError, FailedPrecondition, Internal
from tests.support.stack.up_process import ROOT
from worker_svc.model.stored_weights import header_of

WEIGHTS = {
    "half": torch.arange(12, dtype=torch.bfloat16).reshape(3, 4),
    "ids": torch.tensor([[1, 2], [3, 4]]),
    "scalar": torch.tensor(2.5),
    "view": torch.arange(10.0)[2:6],
    "turned": torch.arange(6.0).reshape(2, 3).T,
}


def shards(folder: Path) -> Path:
    """A checkpoint of two shards, with two names for one tensor, an entry that is none, configuration, tokenizer, and code."""
    folder.mkdir()
    first = {name: WEIGHTS[name] for name in ("half", "ids")}
    second = {name: WEIGHTS[name] for name in ("scalar", "view", "turned")}
    second["tied"] = second["turned"]
    torch.save({"state_dict": {**first, "step": 7}}, folder / "pytorch_model-00001-of-00002.bin")
    torch.save(second, folder / "pytorch_model-00002-of-00002.bin", _use_new_zipfile_serialization=False)
    homes = {name: f"pytorch_model-0000{1 if name in first else 2}-of-00002.bin" for name in (*first, *second)}
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": homes}))
    for name in ("config.json", "tokenizer.json"):
        shutil.copy(default_model() / name, folder)
    (folder / "modeling_own.py").write_text("raise SystemExit")
    (folder / "training_args.bin").write_bytes(b"\x80\x02.")
    return folder


def malicious(path: Path, mark: Path, module: bytes = b"posix") -> Path:
    """What torch.save writes, but for a pickle that runs a command when it is opened by pickle alone."""
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("archive/data.pkl", b"c%b\nsystem\n(S'touch %b'\ntR." % (module, str(mark).encode()))
        archive.writestr("archive/version", b"3\n")
    return path


def test_shards_become_safetensors(tmp_path: Path) -> None:
    """Values, types and shapes stay; shared tensors are written each; code is left behind; nothing is overwritten unasked."""
    source, made = shards(tmp_path / "old"), tmp_path / "new"
    read: list[int] = []
    result = checkpoint.convert(source, made, force=False, on_bytes=read.append)
    index = json.loads((made / "model.safetensors.index.json").read_text())
    loaded = {name: load_file(made / file)[name] for name, file in index["weight_map"].items()}
    assert loaded.keys() == {*WEIGHTS, "tied"}
    for name, tensor in (*WEIGHTS.items(), ("tied", WEIGHTS["turned"])):
        assert loaded[name].dtype is tensor.dtype and torch.equal(loaded[name], tensor), name
    assert sorted(path.name for path in made.iterdir()) == sorted(
        [*result.files, "config.json", "tokenizer.json", "model.safetensors.index.json"]
    )
    assert result.num_tensors == 6 and sum(read) == result.num_bytes == index["metadata"]["total_size"]
    assert any("tied" in note or "turned" in note for note in result.notes) and any(
        "step" in note for note in result.notes
    )
    with pytest.raises(ConfigError, match="--force"):
        checkpoint.convert(source, made, force=False, on_bytes=read.append)


def test_a_malicious_pickle_is_refused_and_runs_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The whole command: status 1, what the file wanted, no DST; what it wanted to run was not run."""
    source, mark = tmp_path / "evil", tmp_path / "ran"
    source.mkdir()
    malicious(source / "pytorch_model.bin", mark)
    with pytest.raises(SystemExit) as ended:
        main(["convert", str(source), str(tmp_path / "new")])
    said = capsys.readouterr().err
    assert ended.value.code == 1, said
    assert "posix.system" in said and "nothing of it was run" in said
    assert not mark.exists()
    assert [path.name for path in tmp_path.iterdir()] == ["evil"], "nothing is left behind"


def test_the_pickle_would_have_run(tmp_path: Path) -> None:
    """The test above could fail: the same bytes run their command where they are opened without care."""
    mark = tmp_path / "ran"
    file = malicious(tmp_path / "model.bin", mark)
    code = "import sys, zipfile, pickle; pickle.loads(zipfile.ZipFile(sys.argv[1]).read('archive/data.pkl'))"
    subprocess.run([sys.executable, "-c", code, str(file)], check=True, timeout=30)
    assert mark.exists()


@pytest.mark.long
def test_the_second_wall_stands_alone(tmp_path: Path) -> None:
    """Where something got past the unpickler, the audit hook refuses processes, connections, written files and foreign names."""
    code = """
import os, pickle, socket, subprocess, sys
from quire_tools.convert import child
sys.addaudithook(child.forbid)
file = sys.argv[1]
for attempt in (
    lambda: os.system(f"touch {file}"),
    lambda: subprocess.run(["touch", file]),
    lambda: os.execv("/bin/sh", ["sh", "-c", f"touch {file}"]),
    lambda: open(file, "w"),
    lambda: os.open(file, os.O_CREAT | os.O_WRONLY),
    lambda: socket.create_connection(("127.0.0.1", 9)),
    lambda: socket.getaddrinfo("localhost", 80),
    lambda: pickle.loads(b"cposix\\nsystem\\n."),
):
    try:
        attempt()
    except child.Refused:
        continue
    print("not refused")
print(open(os.devnull).read() == "", "done")
"""
    command = [sys.executable, "-c", code, str(tmp_path / "ran")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout == "True done\n", done.stdout + done.stderr
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("content", "says"),
    [([1, 2], "holds a list"), ({"a": 1}, "no tensors"), ({"a": torch.eye(2).to_sparse()}, "sparse")],
)
def test_what_is_no_checkpoint_is_refused(content: object, says: str) -> None:
    """The child's own words for files that torch can read and no worker can serve."""
    with pytest.raises(child.Refused, match=says):
        child.unshared(child.tensors_of(content))


@pytest.mark.long
def test_damaged_files_are_refused(tmp_path: Path) -> None:
    """Neither a pickle nor weights: an error of one line, no traceback."""
    (tmp_path / "pytorch_model.bin").write_bytes(b"PK\x03\x04 not a zip")
    with pytest.raises(FailedPrecondition, match=r"pytorch_model.bin is refused: it cannot be read as weights"):
        checkpoint.convert(tmp_path, tmp_path / "new", force=False, on_bytes=lambda n: None)


def test_another_result_is_not_kept(tmp_path: Path) -> None:
    """The check reads bytes: another digest, shape, type or set of names is an error."""
    path = default_model() / "model.safetensors"
    entries, start = header_of(path)
    name, entry = next(iter(entries.items()))
    with pytest.raises(Internal, match="other tensors"):
        checkpoint.check(path, {name: TensorFacts("bfloat16", tuple(entry["shape"]), "")})
    facts = {key: TensorFacts("bfloat16", tuple(value["shape"]), "0") for key, value in entries.items()}
    with pytest.raises(Internal, match="other bytes"):
        checkpoint.check(path, facts)
    facts[name] = TensorFacts("float32", tuple(entry["shape"]), "0")
    with pytest.raises(Internal, match="another type"):
        checkpoint.check(path, facts)
    assert start > 8


def test_wrong_sources_say_what_is_there(tmp_path: Path) -> None:
    """No folder; safetensors already; nothing; a shard that is missing; DST within the rules."""
    with pytest.raises(ConfigError, match="there is no"):
        checkpoint.pickled_files(tmp_path / "none")
    with pytest.raises(ConfigError, match="safetensors already"):
        checkpoint.pickled_files(default_model())
    with pytest.raises(ConfigError, match="no pickled weights"):
        checkpoint.pickled_files(tmp_path)
    source = shards(tmp_path / "old")
    with pytest.raises(ConfigError, match="DST: is SRC"):
        checkpoint.check_destination(source, source, force=True)
    (source / "pytorch_model-00002-of-00002.bin").unlink()
    with pytest.raises(ConfigError, match="lacks pytorch_model-00002"):
        checkpoint.pickled_files(source)
