"""Packed weights that a second start maps: the same bits, whatever else is in the folder; and what is packed again."""

import logging
import os
import resource
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from paged_kernels.cpu_library import find_library, load_library
from tests.support.checkpoints import make_checkpoint
from tests.support.tree import ROOT
from worker_svc.device.devices import HOST
from worker_svc.invariance import FREE
from worker_svc.model import packed_cache
from worker_svc.model.dummy_batch import Chunk, of_groups, pack
from worker_svc.model.fused.packed_files import Pack, PackedFiles
from worker_svc.model.fused.packed_linear import PackedLinear
from worker_svc.model.input_batch import model_inputs
from worker_svc.model.kept_files import FileStamp, content_digest, keep_newest
from worker_svc.model.loading import LoadedModel, load
from worker_svc.settings import WorkerSettings

SIZES = {"hidden_size": 128, "intermediate_size": 512, "num_hidden_layers": 4}
TOKENS = [(7 + 31 * i) % 500 for i in range(30)]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint with biases, and with a head that is tied to the embedding."""
    return make_checkpoint("qwen2", tmp_path_factory.mktemp("m") / "m", tie_word_embeddings=True, **SIZES)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of packed weights, empty, for models of any size; compiled kernels stay where they are."""
    monkeypatch.setattr(packed_cache, "_LEAST_BYTES", 0)
    load_library(os.environ, lambda _: None)
    monkeypatch.setenv("QUIRE_KERNEL_LIBRARY", str(find_library(os.environ).path))
    monkeypatch.setenv("QUIRE_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache" / "weights"


def loaded(path: Path, **options: object) -> LoadedModel:
    settings = WorkerSettings.of(model=path, device="cpu", **{"quantization": "int8"} | options)
    return load(settings, HOST, "cpu", lambda _stage, _fraction: None)


def logits_of(model: LoadedModel) -> torch.Tensor:
    tables = of_groups(np.arange(2, dtype=np.int32)[None], model.num_groups)
    model.model.bind(model.new_cache(tables.size).device_pool)
    return model.model.logits(
        model_inputs(pack([Chunk(0, 0, TOKENS, samples=True)], tables, 16), torch.from_numpy(tables), FREE)
    )


def packed_files(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.packed"))


def is_mapped(model: LoadedModel) -> bool:
    """True if all packed weights, and no others, are in memory that is mapped from a file of the cache."""
    lines = [line.split() for line in Path("/proc/self/maps").read_text().splitlines() if ".packed" in line]
    ranges = [[int(place, 16) for place in line[0].split("-")] for line in lines]
    packed = [module.weights.data for module in model.model._model.modules() if isinstance(module, PackedLinear)]
    inside = {any(begin <= data.data_ptr() < end for begin, end in ranges) for data in packed}
    assert len(inside) == 1
    return inside.pop()


# --- the same weights ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stored", ["int8", "int4"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_second_start_maps_the_same_bits(path, folder, caplog, stored, dtype):
    """The first start packs and keeps, the second maps; logits are those without a cache, by program and by modules."""
    caplog.set_level("INFO")
    options = {"dtype": dtype, "quantization": stored}
    expected = logits_of(loaded(path, weight_cache=False, **options))
    assert not folder.exists()
    first, second = loaded(path, **options), loaded(path, **options)
    assert (is_mapped(first), is_mapped(second)) == (False, True)
    assert first.model.weight_bytes == second.model.weight_bytes
    assert first.model.quantized_bytes == second.model.quantized_bytes
    assert caplog.text.count("hidden states deviate by") == 2
    for model in (first, second):
        assert model.model.is_fused
        assert torch.equal(logits_of(model), expected)
        with model.model.computed_by_modules():
            assert torch.allclose(logits_of(model), expected, atol=0.05 * float(expected.abs().max()))


def test_each_form_has_its_own_file(path, folder):
    """Another rounding, group or type finds nothing of the others."""
    forms = ({"quantization": "int8"}, {"quantization": "int4"}, {"quantization": "int8", "quantization_group": 128})
    for options in (*forms, {"dtype": "bfloat16"}):
        assert not is_mapped(loaded(path, **options))
    assert len(packed_files(folder)) == 4
    assert is_mapped(loaded(path, quantization="int4", kv_cache_dtype="bfloat16", dtype="float32"))


@pytest.mark.parametrize("family", ["phi3", "gemma2"])
def test_modules_of_other_decoders(tmp_path, family):
    """Modules that compute queries, keys and values in one; a head of its own; norms on both sides."""
    path = make_checkpoint(family, tmp_path / "m", **SIZES)
    first, second = loaded(path), loaded(path)
    assert is_mapped(second)
    assert torch.equal(logits_of(first), logits_of(second))


def test_two_starts_at_once(path, folder, monkeypatch):
    """Another start finds nothing, packs and keeps while the first one packs: a third start maps what is left."""
    save, others = PackedFiles.save, []

    def save_late(files: PackedFiles, key: str, packs: list[Pack]) -> None:
        monkeypatch.setattr(PackedFiles, "save", save)
        others.append(loaded(path))
        save(files, key, packs)

    monkeypatch.setattr(PackedFiles, "save", save_late)
    first, [other], third = loaded(path), others, loaded(path)
    assert [is_mapped(model) for model in (first, other, third)] == [False, False, True]
    assert torch.equal(logits_of(first), logits_of(third))
    assert torch.equal(logits_of(other), logits_of(third))
    assert len(list(folder.glob("*.packed"))) == 1
    assert not list(folder.glob("*.partial"))


@pytest.mark.long
def test_two_processes_at_once(path, folder):
    """Both start on an empty folder, and one file is left that a third start maps."""
    script = f"import sys; sys.path[:0] = {[str(ROOT), str(ROOT / 'kernels')]}\n"
    script += (
        "from pathlib import Path\nfrom tests.worker.model.test_packed_cache import loaded, logits_of, packed_cache\n"
    )
    script += "packed_cache._LEAST_BYTES = 0\n"
    script += f"print(logits_of(loaded(Path({str(path)!r}), quantization='int8')).double().sum().item())"
    processes = [subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) for _ in range(2)]
    found = {process.communicate(timeout=300)[0] for process in processes}
    assert [process.returncode for process in processes] == [0, 0]
    third = loaded(path, quantization="int8")
    assert is_mapped(third)
    assert found == {f"{logits_of(third).double().sum().item()}\n"}
    assert len(list(folder.glob("*.packed"))) == 1
    assert not list(folder.glob("*.partial"))


# --- what is not used ------------------------------------------------------------------------------------------------


def flipped(file: Path, place: int) -> None:
    data = bytearray(file.read_bytes())
    data[place] ^= 4
    file.write_bytes(data)


DAMAGES: dict[str, Callable[[Path], None]] = {
    "a bit of a weight": lambda file: flipped(file, file.stat().st_size // 2),
    "the last weight": lambda file: flipped(file, file.stat().st_size - 70),
    "the header": lambda file: flipped(file, 400),
    "the first line": lambda file: flipped(file, 0),
    "cut off": lambda file: os.truncate(file, file.stat().st_size - 4096),
    "empty": lambda file: os.truncate(file, 0),
    "zeros": lambda file: file.write_bytes(bytes(file.stat().st_size)),
    "no file": lambda file: (file.unlink(), file.mkdir()),
}


@pytest.fixture(scope="module")
def kept() -> list[tuple[str, bytes, torch.Tensor]]:
    """Name and content of the file of `path`, and its logits, once they were made."""
    return []


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_file(path, folder, kept, caplog, damage):
    """One line says so; weights are packed, and kept again."""
    if not kept:
        logits = logits_of(loaded(path))
        [file] = packed_files(folder)
        kept.append((file.name, file.read_bytes(), logits))
    [(name, content, expected)] = kept
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    file = folder / name
    file.write_bytes(content)
    file.chmod(0o600)
    DAMAGES[damage](file)
    caplog.clear()
    model = loaded(path)
    assert not is_mapped(model)
    assert torch.equal(logits_of(model), expected)
    lines = [record.getMessage() for record in caplog.records if str(folder) in record.getMessage()]
    assert len(lines) == 1 + file.is_dir()
    if file.is_file():
        # What a second start maps.
        assert file.read_bytes() == content


def test_file_of_another_key(path, folder, caplog):
    """Weights that were saved under one key are not found under another name."""
    loaded(path, quantization="int4")
    [other] = packed_files(folder)
    expected = logits_of(loaded(path, quantization="int8"))
    [rounded] = set(packed_files(folder)) - {other}
    rounded.write_bytes(other.read_bytes())
    model = loaded(path, quantization="int8")
    assert "key" in caplog.text
    assert model.model.quantized_bytes > 0
    assert torch.equal(logits_of(model), expected)


def test_other_weights_at_the_same_path(tmp_path, folder):
    """With the same size and time of modification: the content is what counts."""
    path = make_checkpoint("llama", tmp_path / "m", **SIZES)
    before = logits_of(loaded(path))
    file = path / "model.safetensors"
    times = file.stat()
    tensors = load_file(file)
    tensors["model.layers.0.mlp.down_proj.weight"][3, 5] += 1.0
    save_file(tensors, file, {"format": "pt"})
    os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert (file.stat().st_size, file.stat().st_mtime_ns) == (times.st_size, times.st_mtime_ns)
    model = loaded(path)
    assert not is_mapped(model)
    assert torch.equal(logits_of(model), logits_of(loaded(path, weight_cache=False)))
    assert not torch.equal(logits_of(model), before)
    assert len(packed_files(folder)) == 2


def test_only_what_was_checked_is_kept(tmp_path, folder, monkeypatch):
    """Decoders that do not run as a program are not compared with their modules; small models and full weights are packed in no
    time."""
    loaded(make_checkpoint("gpt_neox", tmp_path / "large", hidden_size=128, intermediate_size=512, num_hidden_layers=2))
    assert not packed_files(folder)
    loaded(path := make_checkpoint("llama", tmp_path / "full", **SIZES), quantization="none")
    monkeypatch.setattr(packed_cache, "_LEAST_BYTES", 16 * 2**20)
    loaded(path)
    assert not packed_files(folder)


def test_rounded_experts_are_not_kept(tmp_path, folder, caplog):
    """Files hold linear modules alone: one line says so, and the next start packs again."""
    path = make_checkpoint("qwen3_moe", tmp_path / "mixture")
    with caplog.at_level(logging.INFO):
        first = loaded(path)
    assert first.model.is_fused
    assert "packed weights are not kept, because the model has quantized experts" in caplog.text
    assert not packed_files(folder)
    assert torch.equal(logits_of(loaded(path)), logits_of(first))


# --- a folder that cannot be used ------------------------------------------------------------------------------------


def test_folder_that_cannot_be_made(path, folder, caplog):
    """One line, and the model is loaded."""
    folder.parent.write_text("")
    model = loaded(path)
    assert model.model.is_fused
    [line] = [record.getMessage() for record in caplog.records if "packed weights" in record.getMessage()]
    assert "QUIRE_CACHE_DIR" in line


def test_folder_that_others_can_write(path, folder, caplog):
    """Weights of another user would be served."""
    folder.mkdir(parents=True)
    folder.chmod(0o777)
    loaded(path)
    assert "writable by another user" in caplog.text
    assert not list(folder.iterdir())


@contextmanager
def largest_file(size: int) -> Iterator[None]:
    """The system refuses to write files that are larger."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_no_room(path, folder, caplog):
    """Where a file cannot be written in full, one line says so and no part of it is left."""
    with largest_file(2**16):
        model = loaded(path)
    assert model.model.is_fused
    [line] = [record.getMessage() for record in caplog.records if "cannot be kept" in record.getMessage()]
    assert str(folder) in line
    assert not packed_files(folder)
    assert not list(folder.glob("*.partial"))


def test_files_are_private(path, folder):
    """Readable by their owner alone."""
    loaded(path)
    assert folder.stat().st_mode & 0o777 == 0o700
    assert {file.stat().st_mode & 0o777 for file in folder.iterdir()} == {0o600}


# --- the private cache -----------------------------------------------------------------------------------------------


def test_digest_is_kept_by_stamp(tmp_path):
    """Of a file that has not changed for a while: it is read once."""
    old = ROOT / "pyproject.toml"
    stamp = FileStamp.of(old)
    digest = content_digest(tmp_path, old, stamp)
    [note] = tmp_path.iterdir()
    note.write_text("0" * 64)
    assert content_digest(tmp_path, old, stamp) == "0" * 64
    note.write_text("0" * 63)
    assert content_digest(tmp_path, old, stamp) == digest


def test_digest_of_a_new_file_is_not_kept(tmp_path):
    """It may be written again within one tick of the clock that stamps it."""
    new = tmp_path / "new"
    new.write_bytes(b"some")
    (tmp_path / "cache").mkdir()
    stamp = FileStamp.of(new)
    assert not stamp.is_settled
    first = content_digest(tmp_path / "cache", new, stamp)
    new.write_bytes(b"more")
    assert content_digest(tmp_path / "cache", new, stamp) != first
    assert not list((tmp_path / "cache").iterdir())


def test_newest_files_are_kept(tmp_path):
    """By bytes and by number."""
    for age, name in enumerate("abcd"):
        (tmp_path / name).write_bytes(bytes(10))
        os.utime(tmp_path / name, (1_000 - age, 1_000 - age))
    keep_newest(tmp_path, most_bytes=35, most_files=9)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["a", "b", "c"]
    keep_newest(tmp_path, most_bytes=35, most_files=2)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["a", "b"]
