"""`--quantization`: how close to full weights, that a decoder is tried against modules with the same weights, what is refused."""

from dataclasses import replace
from pathlib import Path
from pydoc_data.topics import topics

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer

from quire.built_in_model import default_model
from quire.cli.options.settings import as_arguments
from quire.offline.llm import LLM
from svc_common.errors import ConfigError
from tests.support.checkpoints import make_checkpoint
from worker_svc.device.devices import HOST
from worker_svc.invariance import FREE
from worker_svc.model import checkpoint
from worker_svc.model.dummy_batch import Chunk, of_groups, pack
from worker_svc.model.input_batch import model_inputs
from worker_svc.model.loading import LoadedModel, load
from worker_svc.settings import WorkerSettings

BLOCK_SIZE = 16


def loaded(path: Path, *, backend: str = "cpu", **options: object) -> LoadedModel:
    settings = WorkerSettings.of(model=path, device="cpu", backend=backend, block_size=BLOCK_SIZE, **options)
    return load(settings, HOST, backend, lambda _stage, _fraction: None)


def logits_of(model: LoadedModel, chunks: list[list[int]]) -> torch.Tensor:
    """The logits of every token of a sequence that is computed chunk by chunk."""
    tables = of_groups(np.arange(-(-sum(map(len, chunks)) // BLOCK_SIZE), dtype=np.int32)[None], model.num_groups)
    model.model.bind(model.new_cache(tables.size).device_pool)
    found, begin = [], 0
    for chunk in chunks:
        packed = pack([Chunk(0, begin, chunk)], tables, BLOCK_SIZE)
        packed = replace(packed, sampled_at=np.arange(len(chunk), dtype=np.int32))
        found.append(model.model.logits(model_inputs(packed, torch.from_numpy(tables), FREE)))
        begin += len(chunk)
    return torch.cat(found)


def deviation(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Mean over the rows, as a share of a row's size."""
    return float(((found - expected).norm(dim=-1) / expected.norm(dim=-1)).mean())


@pytest.fixture(scope="module")
def tiny() -> dict[str, LoadedModel]:
    """The built-in model with full weights and with rounded ones."""
    return {stored: loaded(default_model(), quantization=stored) for stored in ("none", "int8", "int4")}


# --- quality ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def texts(tiny) -> list[tuple[list[int], torch.Tensor]]:
    """Tokens of some texts, and their logits with full weights."""
    tokenizer = AutoTokenizer.from_pretrained(default_model())
    names = ("assert", "with", "if", "lambda", "try", "yield", "import")
    tokens = [tokenizer(topics[name])["input_ids"][:300] for name in names]
    return [(text, logits_of(tiny["none"], [text])) for text in tokens]


@pytest.mark.parametrize(("stored", "share", "most_off"), [("int8", 0.97, 0.015), ("int4", 0.75, 0.15)])
def test_close_to_full_weights(tiny, texts, stored, share, most_off):
    """Over some texts most next tokens are the same ones, with 8 bits nearly all; how far logits are off."""
    same, off = [], []
    for tokens, full in texts:
        rounded = logits_of(tiny[stored], [tokens])
        same.append(full.argmax(-1) == rounded.argmax(-1))
        off.append(deviation(rounded, full))
        assert not torch.equal(full, rounded)
    assert len(torch.cat(same)) > 1_500
    assert torch.cat(same).float().mean() > share
    assert max(off) < most_off


def test_memory_of_weights(tiny):
    """Of linear modules and the head, 8.5 or 4.5 bits of 16; the embedding and norms stay as they are."""
    full = tiny["none"].model
    assert full.quantized_bytes == 0
    for stored, bits in (("int8", 8.5), ("int4", 4.5)):
        rounded = tiny[stored].model
        saved = rounded.quantized_bytes * (16 / bits - 1)
        assert full.weight_bytes - rounded.weight_bytes == pytest.approx(saved, rel=0.03)


# --- the same whatever runs it ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("stored", ["int8", "int4"])
def test_bits_do_not_depend_on_chunks(tiny, stored):
    """Token by token, in one piece and in pieces of any size a token has the same logits, bit by bit."""
    tokens = [(5 + 37 * i) % 4_000 for i in range(60)]
    whole = logits_of(tiny[stored], [tokens])
    pieces = [tokens[:3], *([token] for token in tokens[3:20]), tokens[20:28], tokens[28:37], tokens[37:]]
    assert torch.equal(logits_of(tiny[stored], pieces), whole)


@pytest.mark.parametrize("stored", ["int8", "int4"])
@pytest.mark.parametrize("family", ["qwen2", "phi3", "gemma3_text"])
def test_tried_against_modules_with_the_same_weights(family, stored, tmp_path, caplog):
    """Biases, merged modules, norms on both sides: only a few numbers of rows are rounded the other way. The log tells how far off
    the model is."""
    caplog.set_level("INFO")
    model = loaded(
        make_checkpoint(family, tmp_path / family), dtype="float32", quantization=stored, quantization_group=128
    )
    assert model.model.is_fused
    assert "hidden states deviate by" in caplog.text
    tokens = list(range(40, 90))
    program = logits_of(model, [tokens])
    with model.model.computed_by_modules():
        modules = logits_of(model, [tokens])
    assert 0 < deviation(modules, program) < 1e-2


def test_models_that_are_not_fused(tmp_path):
    """Of an unknown build, with modules that are not packed: what is packed is rounded."""
    path = make_checkpoint("gpt_neox", tmp_path / "gpt_neox")
    full, rounded = (loaded(path, dtype="float32", quantization=stored) for stored in ("none", "int8"))
    assert not rounded.model.is_fused
    assert rounded.model.quantized_bytes > 0
    tokens = list(range(40, 70))
    assert 0 < deviation(logits_of(rounded, [tokens]), logits_of(full, [tokens])) < 0.1


# --- options ---------------------------------------------------------------------------------------------------------


def test_refused_where_nothing_packs_weights(tmp_path, monkeypatch):
    """Other kernels, no compiled library, float16, module by module: each refused in words, before weights are read."""
    path = make_checkpoint("llama", tmp_path / "llama")
    monkeypatch.setattr(checkpoint, "load_model", lambda *_: pytest.fail("weights are read"))
    with pytest.raises(ConfigError, match="--quantization int8 needs the compiled CPU kernels"):
        loaded(path, backend="reference", quantization="int8")
    with pytest.raises(ConfigError, match="--quantization int8 does not support float16: use --dtype bfloat16 or"):
        loaded(path, dtype="float16", quantization="int8")
    monkeypatch.setenv("QUIRE_CPU_KERNELS", "torch")
    with pytest.raises(ConfigError, match=r"a C.. compiler") as caught:
        loaded(path, quantization="int8")
    assert caught.value.reason == "NO_INT8_KERNELS"
    with pytest.raises(ConfigError, match="--fuse: off excludes --quantization int8"):
        WorkerSettings.of(model=path, quantization="int8", fuse=False)
    with pytest.raises(ConfigError, match=r"--quantization: .*'none', 'int8' or 'int4'"):
        WorkerSettings.of(model=path, quantization="int3")
    with pytest.raises(ConfigError, match=r"--quantization-group: .*32 or 128"):
        WorkerSettings.of(model=path, quantization="int4", quantization_group=64)


def test_options_reach_the_worker(tmp_path):
    """From the command line to settings and to `quire serve worker`, and from Python, where the error names the argument."""
    given = {"quantization": "int8", "quantization_group": 128, "fuse": True}
    settings = WorkerSettings.of(model=tmp_path, **given)
    assert (settings.quantization, settings.quantization_group, settings.fuse) == ("int8", 128, True)
    assert as_arguments(given) == ["--quantization", "int8", "--quantization-group", "128", "--fuse"]
    assert as_arguments({"fuse": False}) == ["--no-fuse"]
    assert as_arguments({}) == []
    with pytest.raises(ConfigError, match=r"quantization: .*'int8'"):
        LLM(quantization="int3")
