"""Host memory for kernels, zeroed or mapped from files, in large pages where the system has them; and giving pages back."""

import ctypes
import mmap
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Self

import numpy as np
import torch

LARGE_PAGE = 2 * 2**20
"""Bytes of a large page on most systems."""
# MADV_POPULATE_WRITE of linux/mman.h, since Linux 5.14: faults pages for writing and keeps their contents.
_POPULATE_WRITE = 23
_ALIGNMENT = 64
_ARENA_BYTES = 32 * LARGE_PAGE
_SMAPS = Path("/proc/self/smaps")
_MADVISE = getattr(ctypes.CDLL(None), "madvise", None)


def host_bytes(count: int) -> torch.Tensor:
    """Allocate `count` zeros, uint8.

    Pages are faulted on first write, so a large count costs nothing at once.

    Large pages: blocks and weights are scattered over the memory, and with small pages most time goes to TLB
    misses.
    """
    return _in_large_pages(mmap.mmap(-1, max(count, 1), mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))[:count]


def file_bytes(file: IO[bytes]) -> torch.Tensor:
    """Map a file that is not empty, uint8. Writes stay private; the file's pages are shared with other processes.

    Whether a file's pages are large is up to the file system.
    """
    return _in_large_pages(mmap.mmap(file.fileno(), 0, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_WRITE))


def _in_large_pages(held: mmap.mmap) -> torch.Tensor:
    if hasattr(mmap, "MADV_HUGEPAGE"):
        held.madvise(mmap.MADV_HUGEPAGE)
    return torch.from_numpy(np.frombuffer(held, np.uint8))


class HostArena:
    """Hands out zeroed pieces of large mappings, so that neighbouring pieces share large pages.

    A mapping is unmapped once none of its pieces is in use.
    """

    def __init__(self) -> None:
        self._rest = torch.empty(0, dtype=torch.uint8)

    def bytes(self, count: int) -> torch.Tensor:
        """Allocate `count` zeros, uint8, from a multiple of 64 bytes on. See `host_bytes`."""
        size = -(-count // _ALIGNMENT) * _ALIGNMENT
        if size > len(self._rest):
            self._rest = host_bytes(max(size, _ARENA_BYTES))
        piece, self._rest = self._rest[:count], self._rest[size:]
        return piece


@dataclass(frozen=True, slots=True)
class CleanFilePages:
    """Private file mappings to which nothing was written: dropping their pages changes no contents.

    `ranges`: their addresses [begin, end) when this was made; mappings made later are not known.
    """

    ranges: tuple[tuple[int, int], ...] = ()

    @classmethod
    def of_process(cls) -> Self:
        """Those of this process now; none where the system does not list them."""
        try:
            lines = _SMAPS.read_text(encoding="utf-8", errors="replace").splitlines()
        except OSError:
            return cls()
        ranges: list[tuple[int, int]] = []
        found, has_file = (0, 0), False
        for words in map(str.split, lines):
            if not words[0].endswith(":"):
                begin, end = (int(address, 16) for address in words[0].split("-"))
                found, has_file = (begin, end), words[4] != "0"
            elif words[0] == "Anonymous:" and has_file and words[1] == "0":
                ranges.append(found)
        return cls(tuple(ranges))

    def drop(self, tensor: torch.Tensor) -> None:
        """Unmap the pages that hold only `tensor`, contiguous; they are read from the file again on the next access.

        No-op for other memory.
        """
        begin, end = tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes
        begin, end = -(-begin // mmap.PAGESIZE) * mmap.PAGESIZE, end // mmap.PAGESIZE * mmap.PAGESIZE
        is_known = any(first <= begin and end <= last for first, last in self.ranges)
        if _MADVISE is not None and is_known and begin < end and tensor.is_contiguous():
            _MADVISE(ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), mmap.MADV_DONTNEED)


def make_pages(begin: int, end: int) -> bool:
    """Fault the pages of addresses [begin, end) now, large ones whole, keeping contents.

    Other threads run meanwhile. Returns False if the system does not support it.
    """
    if _MADVISE is None:
        return False
    begin = begin // mmap.PAGESIZE * mmap.PAGESIZE
    return _MADVISE(ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), _POPULATE_WRITE) == 0
