"""Copies inputs to the device and results back without waiting for it; free of cost where the host computes.

compute stream   | inputs k | model k | sampler k |--------- inputs k + 1 | model k + 1 | ...
                      ^ event: buffer may be reused     \\ waits
copy stream                                              | ids k to host | event: `Fetched.wait` synchronises
"""

import contextlib
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from worker_svc.device.streams import DeviceStreams, StreamEvent, device_errors

Array = NDArray[Any]

_ALIGNMENT = 64
_FIRST_BUFFER_BYTES = 2**20
_NUM_BUFFERS = 2
"""Number of steps with inputs in flight at the same time."""


class Fetched(Protocol):
    """Results being copied to the host."""

    @property
    def is_ready(self) -> bool:
        """True if the results were on the host from the start, because the host is the device."""
        ...

    def wait(self) -> None:
        """Block until the results are on the host. Callable from any thread, repeatedly. Raises DeviceLost."""
        ...

    def arrays(self) -> dict[str, Array]:
        """Wait, then return the results by name; they stay valid."""
        ...


class DeviceQueue(Protocol):
    """Work for one device, in call order. Used from the engine's thread."""

    def inputs(self) -> AbstractContextManager[None]:
        """Context around all `upload`s of one decode step."""
        ...

    def upload(self, *arrays: Array) -> list[torch.Tensor]:
        """Copy `arrays` to the device by one copy, without waiting for it. Call inside `inputs`.

        On the host they may be used as they are, so they must not change until the step is computed.
        """
        ...

    def fetch(self, results: Mapping[str, torch.Tensor]) -> Fetched:
        """Start copying `results` to the host, in their state after all work queued so far.

        They must not be changed later.
        """
        ...


@dataclass(frozen=True, slots=True)
class _Here:
    """Results that are on the host already."""

    results: Mapping[str, torch.Tensor]
    is_ready: bool = True

    def wait(self) -> None:
        """See Fetched."""

    def arrays(self) -> dict[str, Array]:
        """See Fetched."""
        return {name: result.numpy() for name, result in self.results.items()}


def host_tensors(*arrays: Array) -> list[torch.Tensor]:
    """The arrays themselves as tensors."""
    return [torch.from_numpy(array) for array in arrays]


class HostQueue:
    """A `DeviceQueue` for the host: no copies, no waiting."""

    inputs = staticmethod(contextlib.nullcontext)
    upload = staticmethod(host_tensors)

    def fetch(self, results: Mapping[str, torch.Tensor]) -> Fetched:
        """See DeviceQueue."""
        return _Here(results)


# --- a device with streams -------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Copying:
    """Results being copied. Holds the device tensors, so that their memory is not reused before the copy is done."""

    sources: Mapping[str, torch.Tensor]
    copies: Mapping[str, torch.Tensor]
    copied: StreamEvent
    is_ready: bool = False

    def wait(self) -> None:
        """See Fetched."""
        with device_errors():
            self.copied.synchronize()

    def arrays(self) -> dict[str, Array]:
        """See Fetched."""
        self.wait()
        return {name: copy.numpy() for name, copy in self.copies.items()}


@dataclass(slots=True)
class _InputBuffer:
    """Host memory that inputs are copied from; reused after the device has read them.

    `full`: memory too small for this step but still being read.
    """

    memory: torch.Tensor
    read: StreamEvent | None = None
    used: int = 0
    full: list[torch.Tensor] = field(default_factory=list)

    def reuse(self) -> None:
        """Wait until the device has read the previous inputs."""
        if self.read is not None:
            with device_errors():
                self.read.synchronize()
        self.read, self.used = None, 0
        self.full.clear()

    def room(self, num_bytes: int, streams: DeviceStreams) -> torch.Tensor:
        """Reserve uint8 [num_bytes]."""
        if self.used + num_bytes > len(self.memory):
            self.full.append(self.memory)
            self.memory, self.used = streams.host_buffer(max(2 * len(self.memory), num_bytes)), 0
        begin = self.used
        self.used += -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
        return self.memory[begin : begin + num_bytes]


class StreamQueue:
    """A `DeviceQueue` on two streams, as drawn above. Owns the input buffers."""

    def __init__(self, streams: DeviceStreams, *, first_buffer_bytes: int = _FIRST_BUFFER_BYTES) -> None:
        self._streams = streams
        self._buffers = [_InputBuffer(streams.host_buffer(first_buffer_bytes)) for _ in range(_NUM_BUFFERS)]

    @contextlib.contextmanager
    def inputs(self) -> Iterator[None]:
        """See DeviceQueue."""
        self._buffers.append(self._buffers.pop(0))
        buffer = self._buffers[-1]
        buffer.reuse()
        try:
            yield
        finally:
            # Also after an error: copies queued before it are still read.
            buffer.read = self._streams.record_inputs()

    def upload(self, *arrays: Array) -> list[torch.Tensor]:
        """See DeviceQueue."""
        begins = [0, *accumulate(-(-array.nbytes // _ALIGNMENT) * _ALIGNMENT for array in arrays)]
        room = self._buffers[-1].room(begins[-1], self._streams)
        staged = room.numpy()
        for begin, array in zip(begins, arrays, strict=False):
            staged[begin : begin + array.nbytes] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        there = self._streams.to_device(room)
        return [
            there[begin : begin + array.nbytes].view(torch.from_numpy(array[:0]).dtype).view(array.shape)
            for begin, array in zip(begins, arrays, strict=False)
        ]

    def fetch(self, results: Mapping[str, torch.Tensor]) -> Fetched:
        """See DeviceQueue."""
        sources = {name: result.contiguous() for name, result in results.items()}
        copies = {name: self._landing(source) for name, source in sources.items()}
        self._streams.wait_for_compute()
        for name, source in sources.items():
            self._streams.to_host(source, copies[name])
        return _Copying(sources, copies, self._streams.record_copies())

    def _landing(self, source: torch.Tensor) -> torch.Tensor:
        return self._streams.host_buffer(source.nbytes).view(source.dtype).view(source.shape)
