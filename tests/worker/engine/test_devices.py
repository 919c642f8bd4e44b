"""Where a model runs, what is said where it cannot, and that all of a pass gets there."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from paged_kernels.backend import AttentionBatch
from paged_kernels.registry import make_backend
from svc_common.errors import ConfigError
from worker_svc.device.choice import choose_backend, choose_device
from worker_svc.device.devices import CUDA_DEVICES, HOST, CudaDevice, HostDevice
from worker_svc.model import device_memory, memory, weight_choices
from worker_svc.model.input_batch import ModelInput
from worker_svc.settings import WorkerSettings

CPU = torch.device("cpu")


def chosen(
    monkeypatch, device: str, backend: str, *, interpret: bool = False, num_devices: int = 0, **settings: object
) -> tuple[str, str]:
    if interpret:
        monkeypatch.setenv("TRITON_INTERPRET", "1")
    else:
        monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: num_devices > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: num_devices)
    given = WorkerSettings.of(model="models/tiny", device=device, backend=backend, **settings)
    found = choose_device(given, CUDA_DEVICES)
    return str(found.torch_device), choose_backend(given, found)


@pytest.mark.parametrize(
    ("device", "backend", "how", "expected"),
    [
        ("auto", "auto", {}, ("cpu", "cpu")),
        ("auto", "auto", {"num_devices": 2}, ("cuda:0", "cuda")),
        ("auto", "cpu", {"num_devices": 1}, ("cpu", "cpu")),
        ("auto", "auto", {"num_devices": 1, "quantization": "int8"}, ("cpu", "cpu")),
        ("auto", "auto", {"num_devices": 1, "kv_cache_dtype": "int8"}, ("cuda:0", "cuda")),
        ("auto", "auto", {"num_devices": 1, "invariant": True}, ("cpu", "cpu")),
        ("auto", "auto", {"num_devices": 1, "invariant": False}, ("cuda:0", "cuda")),
        ("cpu", "auto", {"num_devices": 1}, ("cpu", "cpu")),
        ("auto", "reference", {}, ("cpu", "reference")),
        ("auto", "reference", {"num_devices": 1}, ("cuda:0", "reference")),
        ("auto", "cuda", {"interpret": True}, ("cpu", "cuda")),
        ("cpu", "cuda", {"interpret": True}, ("cpu", "cuda")),
        ("auto", "cuda", {"num_devices": 1}, ("cuda:0", "cuda")),
        ("cuda", "auto", {"num_devices": 1}, ("cuda:0", "cuda")),
        ("cuda:1", "reference", {"num_devices": 2}, ("cuda:1", "reference")),
    ],
)
def test_device_and_backend(device, backend, how, expected, monkeypatch):
    """ "auto" takes a CUDA device that is there unless something else is for the CPU; Triton's kernels on a CPU are interpreted."""
    assert chosen(monkeypatch, device, backend, **how) == expected


@pytest.mark.parametrize(
    ("device", "backend", "num_devices", "message"),
    [
        ("cuda", "auto", 0, "no device cuda:0, torch finds 0 CUDA devices: use --device cpu"),
        ("cuda:1", "cuda", 1, "no device cuda:1, torch finds 1"),
        ("auto", "cuda", 0, "no device cuda:0"),
        ("cpu", "cuda", 1, "use --backend cpu"),
        ("cuda", "cpu", 1, "use --backend cuda"),
    ],
)
def test_what_does_not_go_together(device, backend, num_devices, message, monkeypatch):
    """Refused before anything is loaded, with what to do."""
    with pytest.raises(ConfigError, match=message):
        chosen(monkeypatch, device, backend, num_devices=num_devices)


def test_the_variable_must_be_there_from_the_start():
    """Triton decides when it is imported: a variable that came later is refused, not half obeyed."""
    with pytest.raises(ConfigError, match="TRITON_INTERPRET before"):
        make_backend("cuda", {"TRITON_INTERPRET": "1"}, print)


def test_all_of_a_pass_is_moved():
    """Every tensor of a forward pass goes to the model's device; what the host needs stays."""
    ones = torch.ones(3, dtype=torch.int64)
    batch = AttentionBatch(ones.int(), ones.int(), ones, ones.int()[None], np.array([0, 3], np.int32))
    step = ModelInput(token_ids=ones[None], positions=ones[None], attention=(batch,), logit_rows=ones, num_logits=3)
    assert step.to(CPU) is step
    moved = step.to(torch.device("meta"))
    tensors = [getattr(at, name) for at in (moved, moved.attention[0]) for name in at.__slots__]
    kinds = [x.device.type for x in tensors if isinstance(x, torch.Tensor)]
    assert kinds == ["meta"] * 7
    assert moved.attention[0].offsets is batch.offsets
    assert (moved.num_tokens, moved.num_logits) == (3, 3)


def test_room_for_the_cache(monkeypatch):
    """R9: a GPU's memory, all of it and what is free; on the host a modest cache beside the swap space."""
    asked = memory.MemoryBudget(16, 10, weight_bytes=300, activation_bytes=200, swap_bytes=10**9, utilization=0.8)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (1000, 5000))
    found = device_memory.measured(CudaDevice(0), asked)
    assert (found.total_bytes, found.free_bytes, found.cache_bytes) == (5000, 1000, None)
    assert memory.count_blocks(found).num_gpu_blocks == (4000 - 500) // 10
    monkeypatch.setattr(HostDevice, "free_bytes", lambda self: 10**9 + 4096)
    found = device_memory.measured(HOST, asked)
    assert (found.free_bytes, found.cache_bytes) == (None, 4096)


def test_peak_of_work_on_a_gpu(monkeypatch):
    """R8: the allocator's own high-water mark during the work, over what was there before."""
    calls: list[str] = []
    marks = SimpleNamespace(before=100, peak=350)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: calls.append("synchronize"))
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: calls.append("reset"))
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: marks.before)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: marks.peak)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: calls.append("empty"))
    assert CudaDevice(0).peak_bytes(lambda: calls.append("work")) == 250
    assert calls == ["synchronize", "reset", "work", "synchronize", "empty"]
    assert HOST.peak_bytes(lambda: bytearray(1 << 20)) >= 0


def test_loading_onto_a_gpu_needs_accelerate(monkeypatch):
    """Said before weights are read, with both ways out."""
    monkeypatch.setattr(weight_choices.importlib.util, "find_spec", lambda name: None)
    assert weight_choices.loaded_onto(HOST) is None
    with pytest.raises(ConfigError, match="pip install accelerate, or use --device cpu"):
        weight_choices.loaded_onto(CudaDevice(0))
