"""The fake device's stream for large copies: it copies as late as waits allow, and finds uses of memory that nothing orders.

The compute stream computes at once. Each stream counts its uses of memory that both may use. A stream has *seen* the other's work
up to the last event that it waited for. To use memory before the other's last use of it was seen is an error: on a real device
either may be first.
"""

import math
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from tests.worker.fake_cuda.tensors import DEVICE, LAUNCHES, DeviceTensor


class Unordered(AssertionError):
    """Two streams use the same memory, and no event says which of them is first."""


@dataclass(slots=True)
class _Shared:
    """Memory of both streams, with the number of each stream's last use."""

    values: torch.Tensor
    copied: int = 0
    computed: int = 0


@dataclass(frozen=True, slots=True)
class _Event:
    """A point behind so many copies and so much computing."""

    stream: "FakeSideStream"
    copied: int = 0
    computed: int = 0

    def synchronize(self) -> None:
        self.stream.run_up_to(self.copied)


class FakeSideStream:
    """A `SideStream`."""

    def __init__(self) -> None:
        self._shared: dict[int, _Shared] = {}
        self._num_copied = self._num_computed = 0
        self._copies_saw = self._compute_saw = 0
        self._late: list[tuple[int, Callable[[], Any]]] = []
        LIVE.add(self)

    # --- memory ------------------------------------------------------------------------------------------------------

    def memory(self, sizes: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        garbage = torch.full((math.prod(sizes) * dtype.itemsize,), 255, dtype=torch.uint8, device=DEVICE)
        made = garbage.view(dtype).view(sizes)
        assert isinstance(made, DeviceTensor)
        self._shared[_place(made.inner)] = _Shared(made.inner)
        return made

    def upload(self, ids: Sequence[int]) -> torch.Tensor:
        return torch.tensor(ids, dtype=torch.int64).to(DEVICE, non_blocking=True)

    # --- the side stream ---------------------------------------------------------------------------------------------

    def copy(self, source: torch.Tensor, destination: torch.Tensor) -> None:
        self._num_copied += 1
        inner = [x.inner if isinstance(x, DeviceTensor) else x for x in (source, destination)]
        [memory] = [self._shared[_place(x)] for x in inner if _place(x) in self._shared]
        if memory.computed > self._copies_saw:
            raise Unordered("a copy does not wait for the kernel that used the buffer")
        memory.copied = self._num_copied
        self._late.append((self._num_copied, lambda: inner[1].copy_(inner[0])))

    def record_copies(self) -> _Event:
        return _Event(self, copied=self._num_copied)

    def copies_wait(self, event: _Event) -> None:
        self._copies_saw = max(self._copies_saw, event.computed)

    def run_up_to(self, copied: int) -> None:
        """Copies up to that number are done."""
        with torch.inference_mode():
            while self._late and self._late[0][0] <= copied:
                self._late.pop(0)[1]()

    # --- the compute stream ------------------------------------------------------------------------------------------

    def record_compute(self) -> _Event:
        return _Event(self, computed=self._num_computed)

    def compute_waits(self, event: _Event) -> None:
        self._compute_saw = max(self._compute_saw, event.copied)
        self.run_up_to(event.copied)

    def note(self, used: Sequence[Any]) -> None:
        """An operator or kernel with these arguments."""
        for memory in {id(m): m for x in used if (m := self._of(x)) is not None}.values():
            if memory.copied > self._compute_saw:
                raise Unordered("a kernel does not wait for the copy that used the buffer")
            self._num_computed += 1
            memory.computed = self._num_computed

    def _of(self, value: Any) -> _Shared | None:
        return self._shared.get(_place(value.inner)) if isinstance(value, DeviceTensor) else None


def _place(values: torch.Tensor) -> int:
    return values.untyped_storage().data_ptr()


LIVE: "weakref.WeakSet[FakeSideStream]" = weakref.WeakSet()


def _note(used: Sequence[Any]) -> None:
    for stream in LIVE:
        stream.note(used)


LAUNCHES.append(_note)
