"""Devices that a model may run on: their memory, pools and queues.

All queries to CUDA itself, other than through tensors, are here and in `streams.py`; tests substitute their
own device.
"""

import math
from collections.abc import Callable
from typing import Protocol

import torch

from paged_kernels.host_memory import host_bytes
from worker_svc import container
from worker_svc.device.queue import DeviceQueue, HostQueue, StreamQueue
from worker_svc.device.streams import CudaSideStream, CudaStreams, SideStream

Work = Callable[[], None]


class Device(Protocol):
    """One device. Used from the engine's thread."""

    @property
    def torch_device(self) -> torch.device:
        """Device of its tensors, with an index unless it is the host."""
        ...

    def describe(self) -> str:
        """Name and memory, for the log."""
        ...

    def use(self) -> None:
        """Make it the device that the calling thread launches kernels on."""
        ...

    def free_bytes(self) -> int:
        """Memory that can be allocated now."""
        ...

    def total_bytes(self) -> int:
        """Total memory, used or not."""
        ...

    def peak_bytes(self, work: Callable[[], object]) -> int:
        """Run `work` and return how far memory use rose above its previous level, at its peak."""
        ...

    def zeros(self, sizes: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Allocate a zeroed pool in device memory."""
        ...

    def swap_zeros(self, sizes: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Allocate a pool [layers, 2, blocks, elements] in host memory that the device can copy from and to."""
        ...

    def queue(self) -> DeviceQueue:
        """Create a queue on the device."""
        ...

    def side_stream(self) -> SideStream | None:
        """Create a stream for large copies; None on the host, where nothing is asynchronous."""
        ...

    def recorded(self, work: Work) -> Work:
        """What repeats `work`, as one launch where the device can do that.

        `work` runs twice: once to prepare what it launches, once to be recorded. Each time it must launch the same
        kernels on the same addresses, and neither wait for the device nor copy from host memory. Memory that it
        allocates is shared by all recordings, so only one of them is repeated at a time, and results must be copied
        to memory from before.
        """
        ...


class Devices(Protocol):
    """The CUDA devices of this machine."""

    def num_cuda(self) -> int:
        """Number of devices torch can use; 0 without CUDA."""
        ...

    def cuda(self, index: int) -> Device:
        """The device "cuda:`index`", with `index` below `num_cuda`."""
        ...


class HostDevice:
    """The processor and its memory."""

    torch_device = torch.device("cpu")

    def describe(self) -> str:
        """See Device."""
        return "cpu"

    def use(self) -> None:
        """See Device. No-op."""

    def free_bytes(self) -> int:
        """See Device. Limited by the container."""
        return container.free_memory_bytes()

    def total_bytes(self) -> int:
        """See Device. Memory available now, since other processes use the host too."""
        return container.free_memory_bytes()

    def peak_bytes(self, work: Callable[[], object]) -> int:
        """See Device. Measures this process's resident memory."""
        return container.peak_bytes(work)

    def zeros(self, sizes: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """See Device. Pages are faulted on first write; `torch.zeros` writes them all, which takes about a second."""
        return host_bytes(math.prod(sizes) * dtype.itemsize).view(dtype).view(sizes)

    def swap_zeros(self, sizes: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """See Device."""
        return self.zeros(sizes, dtype)

    def queue(self) -> DeviceQueue:
        """See Device. Computes synchronously."""
        return HostQueue()

    def side_stream(self) -> None:
        """See Device."""

    def recorded(self, work: Work) -> Work:
        """See Device. There is nothing to launch: `work` itself."""
        return work


class CudaDevice:
    """A CUDA device, through torch."""

    def __init__(self, index: int) -> None:
        self.torch_device = torch.device("cuda", index)
        self._graph_memory: tuple[int, int] | None = None

    def describe(self) -> str:
        """See Device."""
        name = torch.cuda.get_device_name(self.torch_device)
        return f"{self.torch_device} ({name}, {self.total_bytes() / 2**30:.1f} GiB)"

    def use(self) -> None:
        """See Device."""
        torch.cuda.set_device(self.torch_device)

    def free_bytes(self) -> int:
        """See Device. Excludes other processes, CUDA itself and torch's reserved memory."""
        return int(torch.cuda.mem_get_info(self.torch_device)[0])

    def total_bytes(self) -> int:
        """See Device."""
        return int(torch.cuda.mem_get_info(self.torch_device)[1])

    def peak_bytes(self, work: Callable[[], object]) -> int:
        """See Device. Measured by torch's allocator, which then releases what `work` left unused."""
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
        """See Device. Pinned and block-major: a block is one contiguous run of bytes over all layers."""
        layers, two, blocks, elements = sizes
        return torch.zeros(blocks, layers, two, elements, dtype=dtype, pin_memory=True).permute(1, 2, 0, 3)

    def queue(self) -> DeviceQueue:
        """See Device."""
        return StreamQueue(CudaStreams(self.torch_device))

    def side_stream(self) -> SideStream:
        """See Device."""
        return CudaSideStream(self.torch_device)

    def recorded(self, work: Work) -> Work:
        """See Device. A CUDA graph."""
        current, aside = torch.cuda.current_stream(self.torch_device), torch.cuda.Stream(self.torch_device)
        aside.wait_stream(current)
        with torch.cuda.stream(aside):
            work()
        current.wait_stream(aside)
        if self._graph_memory is None:
            self._graph_memory = torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        # Of this thread only: others may copy results or read a tokenizer meanwhile.
        with torch.cuda.graph(graph, pool=self._graph_memory, capture_error_mode="thread_local"):
            work()
        return graph.replay


class CudaDevices:
    """See Devices. Those that torch sees."""

    def num_cuda(self) -> int:
        """See Devices."""
        return torch.cuda.device_count() if torch.cuda.is_available() else 0

    def cuda(self, index: int) -> Device:
        """See Devices."""
        return CudaDevice(index)


HOST = HostDevice()
CUDA_DEVICES = CudaDevices()
