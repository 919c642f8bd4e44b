"""Zeroed host memory for kernels, in large pages where the system has them."""

import ctypes
import mmap

import numpy as np
import torch

LARGE_PAGE = 2 * 2**20
"""Bytes of a large page on most systems."""
# MADV_POPULATE_WRITE of linux/mman.h, since Linux 5.14: faults pages for writing and keeps their contents.
_POPULATE_WRITE = 23
_MADVISE = getattr(ctypes.CDLL(None), "madvise", None)


def host_bytes(count: int) -> torch.Tensor:
    """Allocate `count` zeros, uint8.

    Pages are faulted on first write, so a large count costs nothing at once.

    Large pages: blocks and weights are scattered over the memory, and with small pages most time goes to TLB
    misses.
    """
    held = mmap.mmap(-1, max(count, 1), mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        held.madvise(mmap.MADV_HUGEPAGE)
    return torch.from_numpy(np.frombuffer(held, np.uint8))[:count]


def make_pages(begin: int, end: int) -> bool:
    """Fault the pages of addresses [begin, end) now, large ones whole, keeping contents.

    Other threads run meanwhile. Returns False if the system does not support it.
    """
    if _MADVISE is None:
        return False
    begin = begin // mmap.PAGESIZE * mmap.PAGESIZE
    return _MADVISE(ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), _POPULATE_WRITE) == 0
