"""The fake device in place of CUDA in this process and in workers that it starts: for rehearsals of what needs a GPU."""

import os
from collections.abc import Mapping
from pathlib import Path

import torch

from paged_kernels import ranks
from tests.worker.fake_cuda import tensors
from tests.worker.fake_cuda.collectives import FakeCollectives
from tests.worker.fake_cuda.device import FakeDevices
from worker_svc.device.devices import CudaDevices

_SITE = Path(__file__).resolve().parent / "site"


def take_over() -> torch.device:
    """From now on CUDA_DEVICES is the fake device, and NCCL connects fake devices."""
    tensors.install()
    ranks.nccl = FakeCollectives  # type: ignore[assignment]
    fake = FakeDevices()
    CudaDevices.num_cuda = lambda self: fake.num_cuda()  # type: ignore[method-assign]
    CudaDevices.cuda = lambda self, index: fake.cuda(index)  # type: ignore[method-assign]
    return tensors.DEVICE


def environment(environ: Mapping[str, str]) -> dict[str, str]:
    """`environ` of services that do the same if they are workers (`site/sitecustomize.py`)."""
    return {**environ, "PYTHONPATH": os.pathsep.join([str(_SITE), environ.get("PYTHONPATH", "")])}
