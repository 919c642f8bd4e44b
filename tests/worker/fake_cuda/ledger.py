"""The memory of the fake device, counted as tensors of it come and go."""

import weakref
from collections import Counter

import torch


class Ledger:
    """The device's memory: bytes of all storages that a tensor of the device refers to. `peak_bytes`: since `begin_peak`."""

    def __init__(self) -> None:
        self.num_bytes = self.peak_bytes = 0
        self._holders: Counter[int] = Counter()

    def hold(self, tensor: torch.Tensor, storage: torch.UntypedStorage) -> None:
        """Until `tensor` is gone."""
        at, num_bytes = storage.data_ptr(), storage.nbytes()
        if not self._holders[at]:
            self.num_bytes += num_bytes
            self.peak_bytes = max(self.peak_bytes, self.num_bytes)
        self._holders[at] += 1
        weakref.finalize(tensor, self._release, at, num_bytes)

    def _release(self, at: int, num_bytes: int) -> None:
        self._holders[at] -= 1
        if not self._holders[at]:
            del self._holders[at]
            self.num_bytes -= num_bytes

    def begin_peak(self) -> int:
        """Bytes now, which are the highest so far."""
        self.peak_bytes = self.num_bytes
        return self.num_bytes


LEDGER = Ledger()
