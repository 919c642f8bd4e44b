"""Memory of the host that kernels walk through: zeros, in large pages where the system has them."""

import ctypes
import mmap

import numpy as np
import torch

LARGE_PAGE = 2 * 2**20
"""Bytes of a large page of most systems."""
# Of linux/mman.h, since Linux 5.14: pages as a write would make them, contents as they are.
_POPULATE_WRITE = 23
_MADVISE = getattr(ctypes.CDLL(None), "madvise", None)


def host_bytes(count: int) -> torch.Tensor:
    """`count` zeros, uint8. Pages come to be when they are first written, so that much may be asked for at once.

    Large pages: blocks and weights lie all over it, and with small ones the processor spends most of its time on finding them.
    """
    held = mmap.mmap(-1, max(count, 1), mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        held.madvise(mmap.MADV_HUGEPAGE)
    return torch.from_numpy(np.frombuffer(held, np.uint8))[:count]


def make_pages(begin: int, end: int) -> bool:
    """Has the pages that the addresses [begin, end) lie in come to be now, large ones whole, contents as they are.

    Other threads go on meanwhile. False where the system made none.
    """
    if _MADVISE is None:
        return False
    begin = begin // mmap.PAGESIZE * mmap.PAGESIZE
    return _MADVISE(ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), _POPULATE_WRITE) == 0
