"""The fake device as the worker asks for it (`worker_svc.device.devices`): memory that is counted, streams as late as may be."""

from collections.abc import Callable

import torch

from tests.support.worker.async_device import FakeStreams
from tests.worker.fake_cuda.ledger import LEDGER
from tests.worker.fake_cuda.recorder import RECORDER
from tests.worker.fake_cuda.side_stream import FakeSideStream
from tests.worker.fake_cuda.tensors import DEVICE, DeviceTensor
from worker_svc.device.devices import Device
from worker_svc.device.queue import DeviceQueue, StreamQueue
from worker_svc.device.streams import SideStream

TOTAL_BYTES = 64 * 2**20
CONTEXT_BYTES = 4 * 2**20
"""What CUDA itself takes."""


class DeviceStreams(FakeStreams):
    """Inputs become tensors of the device."""

    def to_device(self, source: torch.Tensor) -> torch.Tensor:
        return super().to_device(source).to(DEVICE)

    def to_host(self, source: torch.Tensor, destination: torch.Tensor) -> None:
        assert isinstance(source, DeviceTensor), "results of a step are on the device"
        super().to_host(source.inner, destination)


class FakeCuda:
    """A `Device` with `total_bytes` of memory. `others_bytes`: what other processes hold of it."""

    torch_device = DEVICE

    def __init__(self, others_bytes: int = 0, total_bytes: int = TOTAL_BYTES) -> None:
        self.others_bytes = others_bytes
        self._total_bytes = total_bytes
        self.is_used = False

    def describe(self) -> str:
        return "cuda:0 (fake)"

    def use(self) -> None:
        self.is_used = True

    def free_bytes(self) -> int:
        return self._total_bytes - CONTEXT_BYTES - self.others_bytes - LEDGER.num_bytes

    def total_bytes(self) -> int:
        return self._total_bytes

    def peak_bytes(self, work: Callable[[], object]) -> int:
        before = LEDGER.begin_peak()
        work()
        return LEDGER.peak_bytes - before

    def zeros(self, sizes: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.zeros(sizes, dtype=dtype, device=DEVICE)

    def swap_zeros(self, sizes: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        layers, two, blocks, elements = sizes
        return torch.zeros(blocks, layers, two, elements, dtype=dtype).permute(1, 2, 0, 3)

    def queue(self) -> DeviceQueue:
        return StreamQueue(DeviceStreams(), first_buffer_bytes=256)

    def side_stream(self) -> SideStream:
        return FakeSideStream()

    def recorded(self, work: Callable[[], None]) -> Callable[[], None]:
        work()
        return RECORDER.recorded(work)


class FakeDevices:
    """`Devices` with one."""

    def __init__(self, others_bytes: int = 0, total_bytes: int = TOTAL_BYTES) -> None:
        self._device = FakeCuda(others_bytes, total_bytes)

    def num_cuda(self) -> int:
        return 1

    def cuda(self, index: int) -> Device:
        assert index == 0
        return self._device
