"""How a worker starts on a CUDA device: which one it takes, how weights get there, how many blocks fit, what is said if none do."""

import gc
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import modeling_utils

from protos.worker.v1 import worker_pb2
from svc_common.errors import ConfigError
from tests.support.checkpoints import make_checkpoint
from tests.support.quantized_files import fp8_blocks, pack_quantized, stored_so
from tests.worker.fake_cuda import tensors
from tests.worker.fake_cuda.device import CONTEXT_BYTES, TOTAL_BYTES, FakeDevices
from tests.worker.fake_cuda.ledger import LEDGER
from worker_svc.executor.model_engine import ModelEngine
from worker_svc.model.weight_reader import OnDemand
from worker_svc.settings import WorkerSettings

MIB = 2**20


def loaded(path: Path, others_bytes: int = 0, **settings: Any) -> ModelEngine:
    gc.collect()  # Engines of other tests give their memory back.
    given = {"device": "cuda", "backend": "reference", "max_model_len": 256, "swap_space_gib": 0.001, **settings}
    engine = ModelEngine(WorkerSettings.of(model=path, **given), FakeDevices(others_bytes))
    engine.load(lambda _stage, _fraction: None)
    return engine


def profiled(path: Path, others_bytes: int = 0, **settings: Any) -> worker_pb2.ProfileCacheResponse:
    return loaded(path, others_bytes, **settings).profile(64, 8)


# --- how many blocks (R9) --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("utilization", [0.5, 0.9])
def test_utilization_decides_how_many_blocks(checkpoint, utilization):
    """R9: the device's memory times --gpu-memory-utilization, less weights and the largest step, in whole blocks."""
    found = profiled(checkpoint, gpu_memory_utilization=utilization)
    assert found.weight_bytes > 400_000
    assert found.peak_activation_bytes > 50_000
    room = int(TOTAL_BYTES * utilization - found.weight_bytes - found.peak_activation_bytes)
    assert found.num_gpu_blocks == room // found.block_bytes
    assert (found.total_bytes, found.utilization) == (TOTAL_BYTES, pytest.approx(utilization))
    assert f"{utilization:.0%} of it may be used" in found.readable


def test_so_many_blocks_can_be_allocated(checkpoint):
    """What is left over is CUDA's own and what allocators lose."""
    engine = loaded(checkpoint)
    found = engine.profile(64, 8)
    engine.allocate(found.num_gpu_blocks, 0)
    assert FakeDevices().cuda(0).free_bytes() > found.peak_activation_bytes


@pytest.mark.parametrize(
    ("settings", "option"),
    [
        ({}, "--gpu-memory-utilization"),
        ({"kv_cache_memory_bytes": 40 * MIB}, "--kv-cache-memory"),
        ({"num_gpu_blocks_override": 6000}, "--num-gpu-blocks-override"),
    ],
)
def test_more_than_is_free_is_refused(checkpoint, settings, option):
    """Where others use the device: what is free, what is needed, and the value that fits, which does."""
    others = TOTAL_BYTES // 2
    refusal = refused(checkpoint, others, **settings)
    assert refusal.reason == "MEMORY_TOO_SMALL"
    assert f"of the device's {TOTAL_BYTES // MIB}.0 MiB are free" in refusal.message
    value = float(refusal.message.partition(f"{option} ")[2].split()[0].removesuffix("MiB"))
    field = next(iter(settings), "gpu_memory_utilization")
    fits = {field: int(value * MIB) if "memory_bytes" in field else value}
    assert profiled(checkpoint, others, **fits).num_gpu_blocks > 1000


def refused(path: Path, others_bytes: int, **settings: Any) -> ConfigError:
    """Without the frames, which hold on to the engine and its memory."""
    try:
        profiled(path, others_bytes, **settings)
    except ConfigError as error:
        return error.with_traceback(None)
    raise AssertionError("it fits")


def test_nothing_is_left(checkpoint):
    """The account is in the message, with what to do."""
    with pytest.raises(
        ConfigError, match=r"not hold a single block \(0\.005 of 64\.0 MiB are 327\.7 KiB; weights take .* raise"
    ):
        profiled(checkpoint, gpu_memory_utilization=0.005)


def test_weights_that_do_not_fit(checkpoint):
    """Known before they are read."""
    others = TOTAL_BYTES - CONTEXT_BYTES - 300 * 1024
    with pytest.raises(ConfigError, match=r"weights take .* only .* are free on cuda:0"):
        loaded(checkpoint, others)


# --- weights ---------------------------------------------------------------------------------------------------------


class _Counted:
    """A file of safetensors, or a part of it, that counts the tensors read from it."""

    def __init__(self, inner: Any, reads: list[int]) -> None:
        self._inner, self._reads = inner, reads

    def get_slice(self, name: str) -> "_Counted":
        return _Counted(self._inner.get_slice(name), self._reads)

    def __getitem__(self, index: Any) -> torch.Tensor:
        self._reads.append(1)
        return self._inner[index]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


def test_weights_do_not_gather_on_the_host(tmp_path, monkeypatch):
    """Each goes to the device as it is read: at any time only a few were read and are not there yet."""
    path = make_checkpoint("llama", tmp_path / "deep", num_hidden_layers=12)
    reads, copies, ahead = [], [], []
    opened, run = modeling_utils.safe_open, tensors._run

    def watched(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if func.overloadpacket is tensors.aten.copy_ and not isinstance(args[1], tensors.DeviceTensor):
            ahead.append(len(reads) - len(copies))
            copies.append(1)
        return run(func, args, kwargs)

    monkeypatch.setattr(modeling_utils, "safe_open", lambda *args, **kwargs: _Counted(opened(*args, **kwargs), reads))
    monkeypatch.setattr(tensors, "_run", watched)
    on_device = LEDGER.num_bytes
    engine = loaded(path)
    assert engine.device == "cuda:0"
    assert len(reads) > 100
    assert len(copies) >= len(reads)
    assert LEDGER.num_bytes - on_device > 0.9 * (path / "model.safetensors").stat().st_size
    assert max(ahead) < len(reads) / 4, ahead


@pytest.mark.parametrize("stored", [fp8_blocks((32, 32)), pack_quantized(4, 32)], ids=["fp8", "int4"])
def test_quantized_weights_do_not_gather_on_the_host(stored, tmp_path, monkeypatch):
    """They are dequantized as transformers takes them, and are on the device before many others are read."""
    source = make_checkpoint("llama", tmp_path / "source", num_hidden_layers=12)
    path = stored_so(source, tmp_path / "stored", stored)
    reads, copies, ahead = [], [], []
    take, run = OnDemand.take, tensors._run

    def counted(*args: Any) -> Any:
        reads.append(1)
        return take(*args)

    def watched(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if func.overloadpacket is tensors.aten.copy_ and not isinstance(args[1], tensors.DeviceTensor):
            ahead.append(len(reads) - len(copies))
            copies.append(1)
        return run(func, args, kwargs)

    monkeypatch.setattr(OnDemand, "take", counted)
    monkeypatch.setattr(tensors, "_run", watched)
    gc.collect()
    on_device = LEDGER.num_bytes
    engine = loaded(path)
    assert engine.device == "cuda:0"
    assert len(reads) > 100
    assert len(copies) >= len(reads)
    assert LEDGER.num_bytes - on_device > 0.9 * (source / "model.safetensors").stat().st_size
    assert max(ahead) < len(reads) / 4, ahead


# --- which device ----------------------------------------------------------------------------------------------------


def test_the_log_says_which_device_was_taken(checkpoint, caplog):
    """`--device auto` takes the GPU that is there."""
    with caplog.at_level(logging.INFO):
        engine = loaded(checkpoint, device="auto", backend="auto")
    assert (engine.device, engine.backend) == ("cuda:0", "cuda")
    assert "--device auto: the model runs on cuda:0 (fake) with the backend cuda" in caplog.text
