"""Packed weights of quantized checkpoints and GGUF files, which a second start maps without reading the stored ones."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from gguf import GGMLQuantizationType as Kind

from tests.support.checkpoints import make_checkpoint
from tests.support.gguf_files import to_gguf
from tests.support.quantized_files import gptq, int_quantized, stored_so
from tests.worker.model.test_packed_cache import folder, is_mapped, loaded, logits_of, packed_files  # noqa: F401
from worker_svc.model import packed_cache
from worker_svc.model.fused.packed_files import Pack, PackedFiles
from worker_svc.model.loading import LoadedModel
from worker_svc.model.weight_reader import OnDemand

SIZES = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2}


def gguf_file(path: Path) -> Path:
    """With a head that is tied to the embedding, both in 8 bits."""
    source = make_checkpoint("llama", path / "source", tie_word_embeddings=True, **SIZES)
    return to_gguf(source, path / "small.gguf", lambda name: Kind.Q8_0 if "embd" in name else Kind.Q4_0)


STORED: dict[str, Callable[[Path], Path]] = {
    "gguf": gguf_file,
    "gptq": lambda path: stored_so(make_checkpoint("qwen2", path / "s", **SIZES), path / "m", gptq(4, 32, sym=True)),
    "int8": lambda path: stored_so(make_checkpoint("llama", path / "s", **SIZES), path / "m", int_quantized()),
}


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, ...]]:
    """Of each load: the names of the weights that were left out."""
    found: list[tuple[str, ...]] = []
    init = OnDemand.__init__

    def noted(taken: OnDemand, tensors, **options) -> None:
        found.append(tuple(sorted(options["left_out"].keys() & tensors.keys())))
        init(taken, tensors, **options)

    monkeypatch.setattr(OnDemand, "__init__", noted)
    return found


def stored(path: Path, **options: object) -> LoadedModel:
    return loaded(path, **{"quantization": "none", "dtype": "float32"} | options)


@pytest.mark.parametrize("kind", STORED)
def test_second_start_maps_the_same_bits(tmp_path, reads, kind):
    """The first start packs and keeps, the second reads no quantized weight of a layer; logits are those without a cache."""
    path = STORED[kind](tmp_path)
    expected = logits_of(stored(path, weight_cache=False))
    first, second = stored(path), stored(path)
    assert (is_mapped(first), is_mapped(second)) == (False, True)
    assert first.model.weight_bytes == second.model.weight_bytes
    assert first.model.quantized_bytes == second.model.quantized_bytes > 0
    for model in (first, second):
        assert model.model.is_fused
        assert torch.equal(logits_of(model), expected)
    assert reads[:2] == [(), ()]
    assert len(reads[2]) == 2 * 7
    with second.model.computed_by_modules():
        assert torch.allclose(logits_of(second), expected, atol=0.05 * float(expected.abs().max()))


def test_each_dtype_has_its_own_file(tmp_path, folder):  # noqa: F811
    path = STORED["int8"](tmp_path)
    for dtype in ("float32", "bfloat16"):
        assert not is_mapped(stored(path, dtype=dtype))
        assert is_mapped(stored(path, dtype=dtype))
    assert len(packed_files(folder)) == 2


def test_weights_that_do_not_fit_are_not_used(tmp_path, monkeypatch, caplog, reads):
    """All weights are read then: none that was left out is computed with."""
    path = STORED["gptq"](tmp_path)
    expected = logits_of(stored(path))
    load = PackedFiles.load

    def changed(files: PackedFiles, key: str) -> list[Pack]:
        first, *rest = load(files, key)
        return [Pack(("model.layers.9.nowhere", *first.names[1:]), first.columns, first.weights), *rest]

    monkeypatch.setattr(PackedFiles, "load", changed)
    model = stored(path)
    assert "do not fit the model's modules" in caplog.text
    assert not is_mapped(model)
    assert torch.equal(logits_of(model), expected)
    assert len(reads) == 3
    assert reads[1] != ()
    assert reads[2] == ()


def test_a_weight_that_a_module_computes_with_is_read(tmp_path, monkeypatch, caplog, reads):
    """One that was left out although its module is not replaced: the model is loaded again, with all weights."""
    path = STORED["gguf"](tmp_path)
    model = stored(path)
    expected, embedding = logits_of(model), model.model._model.get_input_embeddings().weight.shape
    of_packs = packed_cache.shapes
    monkeypatch.setattr(
        packed_cache, "shapes", lambda packs: of_packs(packs) | {"model.embed_tokens.weight": embedding}
    )
    second = stored(path)
    assert torch.equal(logits_of(second), expected)
    assert "do not fit" in caplog.text
    assert "model.embed_tokens.weight" in reads[1]
    assert reads[2] == ()


def test_full_weights_of_a_gguf_file_are_not_kept(tmp_path, folder):  # noqa: F811
    """Packing them takes less time than finding them."""
    source = make_checkpoint("llama", tmp_path / "s", **SIZES)
    stored(to_gguf(source, tmp_path / "full.gguf", lambda _name: Kind.F32))
    assert not packed_files(folder)
