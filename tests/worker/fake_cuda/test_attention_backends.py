"""A worker with a library's attention, by stand-ins: tokens are those of the modules, memory is counted, the rest is refused."""

import gc
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from paged_kernels.attention_limits import AttentionLimits, Workspace
from paged_kernels.backend import AttentionBatch
from paged_kernels.gpu import flash_attention_3, flashinfer_attention, torch_attention
from paged_kernels.gpu.backend import TritonBackend
from paged_kernels.registry import ATTENTION_BACKENDS
from svc_common.errors import ConfigError
from tests.support.attention_packages import attention_packages
from tests.support.checkpoints import make_checkpoint
from tests.support.worker.builders import step, tokens_by_row
from tests.worker.fake_cuda.device import TOTAL_BYTES
from tests.worker.fake_cuda.recorder import RECORDER
from tests.worker.fake_cuda.test_recorded import NUM_SEQUENCES, lived, started
from tests.worker.fake_cuda.test_start import loaded
from worker_svc.executor.model_engine import ModelEngine

__all__ = ["attention_packages"]
MODULES = {"flashinfer": flashinfer_attention, "flash-attn-3": flash_attention_3, "torch": torch_attention}
WORKSPACE_BYTES = 2 * 2**20
WRAPPER_BYTES = 8 * 2**20 + 4 * 32768


@pytest.fixture(autouse=True)
def _alone():
    """Engines and recordings of other tests are gone."""
    gc.collect()
    RECORDER.forget()


@pytest.fixture
def takes_small(attention_packages, monkeypatch):
    """Stand-ins compute in any type; the fake device is small."""
    monkeypatch.setattr(flashinfer_attention, "WORKSPACE", Workspace(WORKSPACE_BYTES, WRAPPER_BYTES))
    for module in MODULES.values():
        wider = replace(module.LIMITS, head_dims=range(1, 257), dtypes=(torch.float32,), softcap=True)
        monkeypatch.setattr(module, "LIMITS", wider)


def library_steps(engine: ModelEngine, monkeypatch) -> list[list[int]]:
    """Tokens of each sequence, of each call of the library from now on."""
    library, seen = engine._loaded.kernels._library, []
    attend = library.attend

    def noted(query, out, cache, batch: AttentionBatch, sequences, *rest):
        seen.append(sequences.counts.tolist())
        attend(query, out, cache, batch, sequences, *rest)

    monkeypatch.setattr(library, "attend", noted)
    return seen


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "family", "settings"),
    [
        ("flashinfer", "llama", {}),
        ("flash-attn-3", "llama", {}),
        ("torch", "llama", {}),
        ("flashinfer", "gemma3_text", {}),
        ("flash-attn-3", "mistral", {}),
        ("flashinfer", "qwen3", {"fuse": False}),
        ("flash-attn-3", "gemma2", {}),
    ],
)
def test_tokens_are_those_of_the_modules(name, family, settings, takes_small, tmp_path, monkeypatch, record_property):
    """R18: prompts, mixed steps and decode steps; recorded ones are Triton's, over the same pool."""
    path = make_checkpoint(family, tmp_path / family)
    by_modules = [tokens_by_row(result) for result in lived(started(path, fuse=False, dtype="float32"))]
    RECORDER.forget()
    engine = started(path, dtype="float32", attention_backend=name, **settings)
    recorded = bool(RECORDER.num_recorded)
    assert recorded == settings.get("fuse", True)
    seen = library_steps(engine, monkeypatch)
    assert [tokens_by_row(result) for result in lived(engine)] == by_modules
    assert [3] in seen, "the first prompt"
    assert ([1, 7, 2, 3] in seen) == (name != "torch"), "a mixed step"
    assert any(set(counts) == {1} for counts in seen) == (not recorded), "a decode step"
    seen.clear()
    engine.launch(step(11)).finish()
    assert bool(seen) == (not recorded)
    record_property(
        "size", f"fake CUDA: attention of {name} with {family}, {'recorded' if recorded else 'unrecorded'} decode"
    )


@pytest.mark.parametrize("fuse", [pytest.param(True, marks=pytest.mark.long), False])
def test_the_workspace_is_counted(fuse, takes_small, tmp_path):
    """R9: whether it is allocated before the profile step (by the trial of a fused decoder) or in it."""
    path = make_checkpoint("llama", tmp_path / "llama")
    sizes = {"backend": "auto", "dtype": "float32", "fuse": fuse}
    plain = loaded(path, **sizes).profile(64, NUM_SEQUENCES)
    engine = loaded(path, attention_backend="flashinfer", **sizes)
    found = engine.profile(64, NUM_SEQUENCES)
    held = engine._loaded.workspace_bytes
    assert held == WORKSPACE_BYTES + WRAPPER_BYTES
    more = found.peak_activation_bytes - plain.peak_activation_bytes
    assert held - 2**20 < more < held + 2**20, "what either attention takes for a step is small"
    room = int(TOTAL_BYTES * 0.9 - found.weight_bytes - found.peak_activation_bytes)
    assert found.num_gpu_blocks == room // found.block_bytes
    assert re.search(r"attention's workspace +10\.1 MiB", found.readable), found.readable
    engine.allocate(found.num_gpu_blocks, 0)


@pytest.mark.long
def test_the_largest_step_is_triton_s_too(takes_small, checkpoint, monkeypatch):
    """R9: a library for fresh prompts leaves other steps of that size to Triton, with the memory that it takes."""
    engine = loaded(checkpoint, attention_backend="torch", backend="auto", dtype="float32")
    seen, attend = [], TritonBackend.attend
    monkeypatch.setattr(
        TritonBackend, "attend", lambda self, query, *rest: seen.append(len(query)) or attend(self, query, *rest)
    )
    by_library = library_steps(engine, monkeypatch)
    engine.profile(64, NUM_SEQUENCES)
    assert 64 in seen
    assert 64 in map(sum, by_library)


@pytest.mark.parametrize(
    ("name", "family", "settings", "message"),
    [
        ("flashinfer", "llama", {}, "takes head sizes of 64, 128 or 256, not 16"),
        ("flash-attn-3", "llama", {"block_size": 64}, r"takes 1 to 63 tokens per block \(--block-size\), not 64"),
        ("torch", "llama", {"dtype": "float32"}, "takes --dtype bfloat16 or float16, not float32"),
        (
            "torch",
            "llama",
            {"kv_cache_dtype": "float16"},
            "a cache of the compute type bfloat16, not --kv-cache-dtype float16",
        ),
        ("torch", "gemma2", {}, "takes no soft cap of scores, and the model's is 4"),
        ("flash-attn-3", "llama", {"backend": "reference"}, "and this worker has the backend reference on cuda:0"),
        ("torch", "llama", {"device": "cpu", "backend": "cpu"}, "and this worker has the backend cpu on cpu"),
        ("torch", "llama", {"device": "cpu", "backend": "cuda"}, "and this worker has the backend cuda on cpu"),
        ("fast", "llama", {}, "is not known; there are: auto, flash-attn-3, flashinfer, torch"),
    ],
)
def test_what_is_not_taken_is_refused(name, family, settings, message, attention_packages, tmp_path):
    """When the worker starts, with the value, the limit and what to use instead."""
    path = make_checkpoint(family, tmp_path / family)
    with pytest.raises(ConfigError, match=rf"--attention-backend {name} .*{message}") as refusal:
        loaded(path, **{"dtype": "bfloat16", "backend": "auto", "attention_backend": name, **settings})
    assert "auto" in refusal.value.message


@pytest.mark.parametrize(
    ("name", "package"), [("flashinfer", "flashinfer-python"), ("flash-attn-3", "flash_attn_interface")]
)
def test_a_library_that_is_not_there(name, package, checkpoint: Path):
    """It says what to install."""
    with pytest.raises(
        ConfigError, match=rf"--attention-backend {name} needs .*{package}.* \(No module named"
    ) as refusal:
        loaded(checkpoint, backend="auto", attention_backend=name)
    assert refusal.value.reason == "NO_ATTENTION_LIBRARY"


def test_all_of_this_repository_are_tested():
    """Each has its limits."""
    assert MODULES.keys() == ATTENTION_BACKENDS.keys()
    assert all(isinstance(module.LIMITS, AttentionLimits) for module in MODULES.values())
