"""Device operations that run asynchronously: copies that do not block, and events to wait for.

`queue.StreamQueue` and `device.swaps` decide their order; tests replace CUDA by a device that records them.
"""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Protocol

import torch

from worker_svc.engine import DeviceLost


class StreamEvent(Protocol):
    """A point in a stream."""

    def synchronize(self) -> None:
        """Block until the device has reached the point. Callable from any thread; other threads run meanwhile."""
        ...


class DeviceStreams(Protocol):
    """Two streams of one device: the compute stream, which runs kernels, and one for copies to the host."""

    def host_buffer(self, num_bytes: int) -> torch.Tensor:
        """uint8 [num_bytes] on the host that the device can read and write directly."""
        ...

    def to_device(self, source: torch.Tensor) -> torch.Tensor:
        """Compute stream: copy `source`, part of a host buffer, to the device. It is read later: see `record_inputs`."""
        ...

    def record_inputs(self) -> StreamEvent:
        """Compute stream: record an event after all queued work."""
        ...

    def wait_for_compute(self) -> None:
        """Copy stream: wait for all work now queued on the compute stream."""
        ...

    def to_host(self, source: torch.Tensor, destination: torch.Tensor) -> None:
        """Copy stream: write `destination`, part of a host buffer. Done later: see `record_copies`."""
        ...

    def record_copies(self) -> StreamEvent:
        """Copy stream: record an event after all queued work."""
        ...


class SideStream(Protocol):
    """A stream for large copies between device and host, beside the compute stream of one device.

    Only events order the work of one with that of the other.
    """

    def memory(self, sizes: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Allocate device memory that both streams may use, with any contents."""
        ...

    def upload(self, ids: Sequence[int]) -> torch.Tensor:
        """Compute stream: copy `ids` to the device, int64 [n], without waiting for it."""
        ...

    def copy(self, source: torch.Tensor, destination: torch.Tensor) -> None:
        """Side stream: copy between `memory` and a host pool, which must not change before. Done later."""
        ...

    def record_copies(self) -> StreamEvent:
        """Side stream: record an event after all queued work."""
        ...

    def record_compute(self) -> StreamEvent:
        """Compute stream: record an event after all queued work."""
        ...

    def copies_wait(self, event: StreamEvent) -> None:
        """Side stream: wait for `event` before work that is queued later."""
        ...

    def compute_waits(self, event: StreamEvent) -> None:
        """Compute stream: wait for `event` before work that is queued later."""
        ...


class CudaStreams:
    """The streams of a CUDA device: its current one, and one for copies."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._copies = torch.cuda.Stream(device)

    def host_buffer(self, num_bytes: int) -> torch.Tensor:
        """See DeviceStreams. Pinned."""
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)

    def to_device(self, source: torch.Tensor) -> torch.Tensor:
        """See DeviceStreams."""
        return source.to(self._device, non_blocking=True)

    def record_inputs(self) -> StreamEvent:
        """See DeviceStreams."""
        return self._recorded(self._compute)

    def wait_for_compute(self) -> None:
        """See DeviceStreams."""
        self._copies.wait_stream(self._compute)

    def to_host(self, source: torch.Tensor, destination: torch.Tensor) -> None:
        """See DeviceStreams."""
        with torch.cuda.stream(self._copies):
            destination.copy_(source, non_blocking=True)

    def record_copies(self) -> StreamEvent:
        """See DeviceStreams."""
        return self._recorded(self._copies)

    @property
    def _compute(self) -> torch.cuda.Stream:
        return torch.cuda.current_stream(self._device)

    def _recorded(self, stream: torch.cuda.Stream) -> StreamEvent:
        # Blocking: a waiting thread sleeps and leaves the processor to the thread that prepares the next
        # step.
        event = torch.cuda.Event(blocking=True)
        event.record(stream)
        return event


class CudaSideStream:
    """See SideStream."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._side = torch.cuda.Stream(device)

    def memory(self, sizes: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """See SideStream."""
        made = torch.empty(sizes, dtype=dtype, device=self._device)
        # Once freed, it is not used again before the side stream has finished with it.
        made.record_stream(self._side)
        return made

    def upload(self, ids: Sequence[int]) -> torch.Tensor:
        """See SideStream. Torch reuses the pinned memory once it has been read."""
        return torch.tensor(ids, dtype=torch.int64, pin_memory=True).to(self._device, non_blocking=True)

    def copy(self, source: torch.Tensor, destination: torch.Tensor) -> None:
        """See SideStream."""
        with torch.cuda.stream(self._side):
            destination.copy_(source, non_blocking=True)

    def record_copies(self) -> StreamEvent:
        """See SideStream."""
        return self._recorded(self._side)

    def record_compute(self) -> StreamEvent:
        """See SideStream."""
        return self._recorded(torch.cuda.current_stream(self._device))

    def copies_wait(self, event: StreamEvent) -> None:
        """See SideStream."""
        self._side.wait_event(event)

    def compute_waits(self, event: StreamEvent) -> None:
        """See SideStream."""
        torch.cuda.current_stream(self._device).wait_event(event)

    def _recorded(self, stream: torch.cuda.Stream) -> StreamEvent:
        event = torch.cuda.Event()
        event.record(stream)
        return event


@contextlib.contextmanager
def device_errors() -> Iterator[None]:
    """Convert device errors, which are permanent, to DeviceLost. Out of memory is not one of them."""
    try:
        yield
    except torch.AcceleratorError as error:
        raise DeviceLost(str(error).partition("\n")[0]) from error
