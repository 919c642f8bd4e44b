"""FP8 on a CUDA device: weights stay as they are stored from the file to the products; caches of numbers with scales."""

import gc
from pathlib import Path

import pytest
import torch

from quire_tools.plan.model_sizes import model_sizes
from tests.support.checkpoints import make_checkpoint
from tests.support.quantized_files import Stored, float_quantized, fp8_blocks, stored_so
from tests.support.worker.builders import Row, step, tokens_by_row
from tests.support.worker.generated import greedy, reference_model
from tests.worker.fake_cuda.device import FakeDevices
from tests.worker.fake_cuda.ledger import LEDGER
from tests.worker.fake_cuda.recorder import RECORDER
from worker_svc.executor.model_engine import ModelEngine
from worker_svc.model.fused.packed_linear import PackedLinear
from worker_svc.settings import WorkerSettings

WIDE = {"hidden_size": 128, "intermediate_size": 256}
PROMPTS = [[5, 9, 200, 31, 8], [17] * 7 + [80]]
LENGTH, LAYERS = 5, 6


@pytest.fixture(autouse=True)
def _alone():
    """Recordings and engines of other tests are gone."""
    gc.collect()
    RECORDER.forget()


def started(path: Path, **settings: object) -> ModelEngine:
    given = {"backend": "cuda", "dtype": "float32", "max_model_len": 64, "swap_space_gib": 0.001, **settings}
    engine = ModelEngine(WorkerSettings.of(model=path, device="cuda", **given), FakeDevices())
    engine.load(lambda _stage, _fraction: None)
    return engine


def tokens(engine: ModelEngine) -> list[list[int]]:
    """Of each prompt, in steps of both."""
    engine.profile(24, 4)
    engine.allocate(20, 1)
    rows = [Row(i, prompt, range(2 * i, 2 * i + 2), len(prompt)) for i, prompt in enumerate(PROMPTS)]
    made = [tokens_by_row(engine.launch(step(1, add=rows)).finish())]
    made += [tokens_by_row(engine.launch(step(number)).finish()) for number in range(2, LENGTH + 1)]
    return [[int(token) for result in made for token in result[i]] for i in range(len(PROMPTS))]


KINDS = pytest.mark.parametrize(
    ("family", "stored"),
    [("llama", fp8_blocks((128, 128))), pytest.param("qwen3", float_quantized((1, 0)), marks=pytest.mark.long)],
    ids=["llama-blocks", "qwen3-channels"],
)


@pytest.mark.long
@KINDS
def test_weights_stay_as_they_are_stored(family: str, stored: Stored, tmp_path: Path) -> None:
    """R9: the device never holds a matrix dequantized; `quire plan` counts the same bytes."""
    source = make_checkpoint(family, tmp_path / "source", num_hidden_layers=LAYERS, **WIDE)
    path = stored_so(source, tmp_path / "stored", stored)
    before = LEDGER.begin_peak()
    model = started(path)._loaded.model
    packed = [part for part in model._model.modules() if isinstance(part, PackedLinear)]
    floats = [part for part in packed if part.weights.form.stored == "fp8"]
    assert model.is_fused and len(floats) == 7 * LAYERS
    full = sum(part.in_features * part.out_features for part in floats) * 4
    rest = model.weight_bytes - model.quantized_bytes
    assert model.quantized_bytes < 0.3 * full
    assert LEDGER.peak_bytes - before < rest + 0.7 * full
    kept = {"dtype": "float32", "kv_cache_dtype": "auto", "max_model_len": None, "packs": (torch.float8_e4m3fn,)}
    # Scales are filled up to 16 bytes, of which one group has 4.
    assert model.weight_bytes == pytest.approx(model_sizes(path, **kept).weight_bytes, rel=0.06)


@pytest.mark.long
@KINDS
def test_tokens_are_those_of_the_values_meant(family: str, stored: Stored, tmp_path: Path) -> None:
    """R18: those of transformers with these values."""
    source = make_checkpoint(family, tmp_path / "source", **WIDE)
    engine = started(stored_so(source, tmp_path / "stored", stored))
    assert engine._loaded.model.is_fused
    oracle = reference_model(source)
    assert tokens(engine) == [greedy(oracle, prompt, LENGTH).token_ids for prompt in PROMPTS]
    assert RECORDER.num_recorded


@pytest.mark.long
def test_experts_are_dequantized(tmp_path: Path) -> None:
    """R18: transformers merges them; the matrices beside them stay as they are stored."""
    source = make_checkpoint("qwen3_moe", tmp_path / "source", **WIDE)
    engine = started(stored_so(source, tmp_path / "stored", fp8_blocks((32, 32))))
    packed = [part for part in engine._loaded.model._model.modules() if isinstance(part, PackedLinear)]
    assert sum(part.weights.form.stored == "fp8" for part in packed) >= 8
    oracle = reference_model(source)
    assert tokens(engine) == [greedy(oracle, prompt, LENGTH).token_ids for prompt in PROMPTS]


@pytest.mark.long
@pytest.mark.parametrize("kept", ["int8", "fp8"])
def test_caches_of_numbers_with_scales(kept: str, shallow: Path) -> None:
    """R18: tokens of recorded steps are those that the reference makes over the same kind of cache, in fewer bytes."""
    engine, plain = started(shallow, kv_cache_dtype=kept), started(shallow, kv_cache_dtype=kept, backend="reference")
    assert engine._loaded.block_bytes == plain._loaded.block_bytes
    assert engine._loaded.cache_dtype in {torch.int8, torch.float8_e4m3fn}
    assert engine._loaded.model.is_fused
    assert tokens(engine) == tokens(plain)
    assert RECORDER.num_recorded
