"""QUIRE_TEST_DEVICE: on which device tests of kernels and of the worker's engine run, where they do not say.

cpu        as a rule
cuda       a GPU (`make test-cuda`)
fake-cuda  a device that checks where tensors are and computes on the CPU (`tests/worker/fake_cuda`); with kernels in plain torch,
           since Triton's interpreter is slow
"""

import os
from collections.abc import Iterable
from typing import Any

import pytest
import torch

from worker_svc.device.devices import CUDA_DEVICES, Devices

TEST_DEVICE = os.environ.get("QUIRE_TEST_DEVICE", "cpu")
DEVICES: Devices = CUDA_DEVICES
DEVICE_SETTINGS: dict[str, Any] = {"cuda": {"device": "cuda"}}.get(TEST_DEVICE, {})
if TEST_DEVICE == "fake-cuda":  # which needs triton
    from tests.worker.fake_cuda import tensors
    from tests.worker.fake_cuda.device import FakeDevices

    tensors.install()
    DEVICES = FakeDevices(total_bytes=512 * 2**20)
    DEVICE_SETTINGS = {"device": "cuda", "backend": "reference"}

NEEDS_INVARIANCE = pytest.mark.skipif(TEST_DEVICE != "cpu", reason="the invariance contract is the CPU backend's")


def skip_without_device(items: Iterable[pytest.Item], folder: str) -> None:
    """Where a CUDA device is asked for and there is none, the tests below `folder` are skipped and say so."""
    if TEST_DEVICE == "cuda" and not torch.cuda.is_available():
        for item in items:
            if f"/{folder}/" in item.path.as_posix():
                item.add_marker(pytest.mark.skip(reason="QUIRE_TEST_DEVICE=cuda, but torch sees no CUDA device"))
