"""The devices that a model may run on, and what only they know: memory, pools, queues.

Everything that is asked of CUDA itself, and not of a tensor, is asked here and in `streams.py`; tests put a device of their own in
its place.
"""

import math
from collections.abc import Callable
from typing import Protocol

import torch

from paged_kernels.host_memory import host_bytes
from worker_svc import container
from worker_svc.device.queue import DeviceQueue, HostQueue, StreamQueue
from worker_svc.device.streams import CudaStreams


class Device(Protocol):
    """One device. Used from the engine's thread."""

    @property
    def torch_device(self) -> torch.device:
        """Where its tensors are, with an index unless it is the host."""
        ...

    def describe(self) -> str:
        """Name and memory, for the log."""
        ...

    def use(self) -> None:
        """Kernels of the calling thread are launched on it from now on."""
        ...

    def free_bytes(self) -> int:
        """Memory that can be allocated now."""
        ...

    def total_bytes(self) -> int:
        """All its memory, used or not."""
        ...

    def peak_bytes(self, work: Callable[[], object]) -> int:
        """Runs `work`; by how much more memory was in use during it than before, at its highest."""
        ...

    def zeros(self, sizes: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """A pool in its memory."""
        ...

    def swap_zeros(self, sizes: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """A pool [layers, 2, blocks, elements] in the host's memory, which the device copies from and to by itself."""
        ...

    def queue(self) -> DeviceQueue:
        """A queue of its own."""
        ...


class Devices(Protocol):
    """The CUDA devices of this machine."""

    def num_cuda(self) -> int:
        """How many torch can use; 0 without CUDA."""
        ...

    def cuda(self, index: int) -> Device:
        """The device "cuda:`index`", `index` below `num_cuda`."""
        ...


class HostDevice:
    """The processor and its memory."""

    torch_device = torch.device("cpu")

    def describe(self) -> str:
        """See Device."""
        return "cpu"

    def use(self) -> None:
        """See Device: nothing to do."""

    def free_bytes(self) -> int:
        """See Device: what the container leaves."""
        return container.free_memory_bytes()

    def total_bytes(self) -> int:
        """See Device: what can be had now, since others use the host too."""
        return container.free_memory_bytes()

    def peak_bytes(self, work: Callable[[], object]) -> int:
        """See Device: resident memory of this process."""
        return container.peak_bytes(work)

    def zeros(self, sizes: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """See Device. Pages are made when they are first written; `torch.zeros` writes them all, which takes about a second."""
        return host_bytes(math.prod(sizes) * dtype.itemsize).view(dtype).view(sizes)

    def swap_zeros(self, sizes: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """See Device."""
        return self.zeros(sizes, dtype)

    def queue(self) -> DeviceQueue:
        """See Device: it computes at once."""
        return HostQueue()


class CudaDevice:
    """A CUDA device as torch has it."""

    def __init__(self, index: int) -> None:
        self.torch_device = torch.device("cuda", index)

    def describe(self) -> str:
        """See Device."""
        name = torch.cuda.get_device_name(self.torch_device)
        return f"{self.torch_device} ({name}, {self.total_bytes() / 2**30:.1f} GiB)"

    def use(self) -> None:
        """See Device."""
        torch.cuda.set_device(self.torch_device)

    def free_bytes(self) -> int:
        """See Device: after other processes, CUDA itself and what torch holds."""
        return int(torch.cuda.mem_get_info(self.torch_device)[0])

    def total_bytes(self) -> int:
        """See Device."""
        return int(torch.cuda.mem_get_info(self.torch_device)[1])

    def peak_bytes(self, work: Callable[[], object]) -> int:
        """See Device: by torch's allocator, which gives back what `work` left unused."""
        device = self.torch_device
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        work()
        torch.cuda.synchronize(device)
        peak = torch.cuda.max_memory_allocated(device) - before
        torch.cuda.empty_cache()
        return max(0, peak)

    def zeros(self, sizes: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """See Device."""
        return torch.zeros(sizes, dtype=dtype, device=self.torch_device)

    def swap_zeros(self, sizes: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """See Device. Pinned and block-major: a block is one run of bytes through all layers."""
        layers, two, blocks, elements = sizes
        return torch.zeros(blocks, layers, two, elements, dtype=dtype, pin_memory=True).permute(1, 2, 0, 3)

    def queue(self) -> DeviceQueue:
        """See Device."""
        return StreamQueue(CudaStreams(self.torch_device))


class CudaDevices:
    """See Devices: those that torch sees."""

    def num_cuda(self) -> int:
        """See Devices."""
        return torch.cuda.device_count() if torch.cuda.is_available() else 0

    def cuda(self, index: int) -> Device:
        """See Devices."""
        return CudaDevice(index)


HOST = HostDevice()
CUDA_DEVICES = CudaDevices()
