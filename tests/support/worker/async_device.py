"""A device with streams that is none: it computes at once, on the CPU, but moves bytes as late as it may and keeps book.

What is copied to the host is there when the event behind the copy is synchronised, not before; until then the host's buffer holds
garbage. A copy that did not wait for the compute stream brings garbage. An input buffer that is written again before the event
behind its last copy was synchronised spoils what is copied from it.
"""

import threading
from collections.abc import Callable
from dataclasses import dataclass

import torch

_GARBAGE = 1


@dataclass(slots=True)
class _Event:
    happens: Callable[[], None]

    def synchronize(self) -> None:
        self.happens()


@dataclass(frozen=True, slots=True)
class _Copy:
    source: torch.Tensor
    destination: torch.Tensor
    is_late: bool


class FakeStreams:
    """A `DeviceStreams`. `log`: what was done, in order."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self._lock = threading.Lock()
        self._num_kernels = 0
        self._num_waited_for = 0
        self._copies: list[_Copy] = []
        self._reads: list[tuple[int, int]] = []
        self.num_spoilt = 0
        self.num_buffers = 0
        self.loss: Exception | None = None

    def host_buffer(self, num_bytes: int) -> torch.Tensor:
        self.num_buffers += 1
        return torch.full((num_bytes,), _GARBAGE, dtype=torch.uint8)

    # --- inputs ------------------------------------------------------------------------------------------------------

    def to_device(self, source: torch.Tensor) -> torch.Tensor:
        self.log.append("upload")
        self._num_kernels += 1
        begin, end = source.data_ptr(), source.data_ptr() + source.nbytes
        spoilt = any(begin < other_end and other_begin < end for other_begin, other_end in self._reads)
        self._reads.append((begin, end))
        self.num_spoilt += spoilt
        return torch.zeros_like(source) if spoilt else source.clone()

    def record_inputs(self) -> _Event:
        self.log.append("record inputs")
        reads = list(self._reads)

        def happen() -> None:
            self.log.append("synchronise inputs")
            with self._lock:
                self._reads = [read for read in self._reads if read not in reads]

        return _Event(happen)

    # --- results -----------------------------------------------------------------------------------------------------

    def wait_for_compute(self) -> None:
        self.log.append("wait")
        self._num_waited_for = self._num_kernels

    def to_host(self, source: torch.Tensor, destination: torch.Tensor) -> None:
        self.log.append("copy")
        self._copies.append(_Copy(source, destination, self._num_waited_for < self._num_kernels))

    def record_copies(self) -> _Event:
        self.log.append("record")
        copies, self._copies = self._copies, []

        def happen() -> None:
            self.log.append("synchronise")
            if self.loss is not None:
                raise self.loss
            with self._lock, torch.inference_mode():
                while copies:
                    copy = copies.pop()
                    copy.destination.copy_(torch.zeros_like(copy.source) if copy.is_late else copy.source)

        return _Event(happen)


# --- devices used wrongly --------------------------------------------------------------------------------------------


class WithoutWait(FakeStreams):
    """The copy stream does not wait for the compute stream."""

    def wait_for_compute(self) -> None:
        pass


class WithoutGuard(FakeStreams):
    """Does not wait until inputs were read."""

    def record_inputs(self) -> _Event:
        return _Event(lambda: None)


class RecordedTooEarly(FakeStreams):
    """The event stands in front of the copies."""

    def record_copies(self) -> _Event:
        return _Event(lambda: None)
