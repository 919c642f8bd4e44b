"""The device of a run: the first CUDA device, or in a rehearsal one that checks the same rules and computes on the CPU."""

import os
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from worker_svc.device.devices import CUDA_DEVICES, Devices

ENVIRONMENT = {"TRITON_INTERPRET": "1", "QUIRE_TEST_DEVICE": "fake-cuda", "OMP_NUM_THREADS": "1"}
"""Of the processes of a rehearsal. Triton reads it when it is imported."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where to measure. `environ`: of worker processes."""

    torch_device: torch.device
    devices: Devices
    environ: Mapping[str, str]


def place(*, rehearse: bool) -> Place:
    """The device. In a rehearsal, workers of this process and of its children use the stand-in from now on."""
    if not rehearse:
        return Place(torch.device("cuda", 0), CUDA_DEVICES, os.environ)
    # For rehearsals alone: it stands in for CUDA in the whole process.
    from tests.worker.fake_cuda import process  # noqa: PLC0415

    return Place(process.take_over(), CUDA_DEVICES, process.environment(os.environ))
