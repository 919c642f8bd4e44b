"""Memory of the host that kernels walk through: zeros, in large pages where the system has them."""

import mmap

import numpy as np
import torch


def host_bytes(count: int) -> torch.Tensor:
    """`count` zeros, uint8. Pages come to be when they are first written, so that much may be asked for at once.

    Large pages: blocks and weights lie all over it, and with small ones the processor spends most of its time on finding them.
    """
    held = mmap.mmap(-1, max(count, 1), mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        held.madvise(mmap.MADV_HUGEPAGE)
    return torch.from_numpy(np.frombuffer(held, np.uint8))[:count]
