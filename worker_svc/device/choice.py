"""The device that a worker runs on, and its kernel backend, by its settings and what the machine has."""

import os

import torch

from paged_kernels.registry import interprets_triton
from svc_common.errors import ConfigError
from worker_svc.device.devices import HOST, Device, Devices
from worker_svc.settings import WorkerSettings


def choose_device(settings: WorkerSettings, devices: Devices) -> Device:
    """The device to run the model on. Raises ConfigError if it does not exist.

    "auto" is a CUDA device, or the CPU if there is none or another option needs the CPU. Without a number, ranks of a group take
    the CUDA devices in turn.
    """
    if settings.device == "auto":
        return _automatic(settings, devices)
    if settings.device == "cpu":
        if settings.backend == "cuda" and not interprets_triton(os.environ):
            raise ConfigError(
                "--backend cuda does not support --device cpu: use --backend cpu", reason="NO_CUDA_DEVICE"
            )
        return HOST
    if settings.backend == "cpu":
        raise ConfigError(
            f"--backend cpu does not support {settings.device}: use --backend cuda", reason="NO_CUDA_KERNELS"
        )
    index = torch.device(settings.device).index
    return _cuda_device(_turn_of(settings, devices) if index is None else index, devices)


def _automatic(settings: WorkerSettings, devices: Devices) -> Device:
    if settings.backend == "cuda":
        return HOST if interprets_triton(os.environ) else _cuda_device(_turn_of(settings, devices), devices)
    for_cpu_alone = settings.backend == "cpu" or settings.quantization != "none" or settings.invariant
    return HOST if for_cpu_alone or not devices.num_cuda() else devices.cuda(_turn_of(settings, devices))


def _turn_of(settings: WorkerSettings, devices: Devices) -> int:
    return settings.rank % (devices.num_cuda() or 1)


def _cuda_device(index: int, devices: Devices) -> Device:
    count = devices.num_cuda()
    if index >= count:
        raise ConfigError(
            f"there is no device cuda:{index}, torch finds {count} CUDA devices: use --device cpu and --backend cpu",
            reason="NO_CUDA_DEVICE",
        )
    return devices.cuda(index)


def choose_backend(settings: WorkerSettings, device: Device) -> str:
    """Name of the kernel backend: the configured one, or the one that suits the device."""
    if settings.backend != "auto":
        return settings.backend
    return "cpu" if device is HOST else "cuda"
