"""The few things a device with queues of its own can do beside this process: copies that do not wait, and events to wait for.

`device_queue.StreamQueue` says in which order they are done (R156); tests put a device that keeps book in the place of CUDA.
"""

import contextlib
from collections.abc import Iterator
from typing import Protocol

import torch

from worker_svc.engine import DeviceLost


class Event(Protocol):
    """A point in a stream."""

    def synchronize(self) -> None:
        """Blocks until the device has come there; other threads run meanwhile. From any thread."""
        ...


class DeviceStreams(Protocol):
    """Two streams of one device: the compute stream, which kernels are queued on, and one for copies to the host."""

    def host_buffer(self, num_bytes: int) -> torch.Tensor:
        """uint8 [num_bytes] on the host, which the device reads and writes by itself."""
        ...

    def to_device(self, source: torch.Tensor) -> torch.Tensor:
        """Compute stream: `source`, part of a host buffer, on the device. It is read later: see `record_inputs`."""
        ...

    def record_inputs(self) -> Event:
        """Compute stream: behind all that is queued."""
        ...

    def wait_for_compute(self) -> None:
        """Copy stream: goes on when the compute stream has done all that is queued now."""
        ...

    def to_host(self, source: torch.Tensor, destination: torch.Tensor) -> None:
        """Copy stream: writes `destination`, part of a host buffer, later: see `record_copies`."""
        ...

    def record_copies(self) -> Event:
        """Copy stream: behind all that is queued."""
        ...


class CudaStreams:
    """The streams of a CUDA device: its current one, and one of its own."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._copies = torch.cuda.Stream(device)

    def host_buffer(self, num_bytes: int) -> torch.Tensor:
        """See DeviceStreams: pinned."""
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)

    def to_device(self, source: torch.Tensor) -> torch.Tensor:
        """See DeviceStreams."""
        return source.to(self._device, non_blocking=True)

    def record_inputs(self) -> Event:
        """See DeviceStreams."""
        return self._recorded(self._compute)

    def wait_for_compute(self) -> None:
        """See DeviceStreams."""
        self._copies.wait_stream(self._compute)

    def to_host(self, source: torch.Tensor, destination: torch.Tensor) -> None:
        """See DeviceStreams."""
        with torch.cuda.stream(self._copies):
            destination.copy_(source, non_blocking=True)

    def record_copies(self) -> Event:
        """See DeviceStreams."""
        return self._recorded(self._copies)

    @property
    def _compute(self) -> torch.cuda.Stream:
        return torch.cuda.current_stream(self._device)

    def _recorded(self, stream: torch.cuda.Stream) -> Event:
        # Blocking: who waits for it sleeps, and leaves the processor to who prepares the next step.
        event = torch.cuda.Event(blocking=True)
        event.record(stream)
        return event


@contextlib.contextmanager
def device_errors() -> Iterator[None]:
    """Errors of the device inside are for good: DeviceLost. (Lack of memory is none of them.)"""
    try:
        yield
    except torch.AcceleratorError as error:
        raise DeviceLost(str(error).partition("\n")[0]) from error
