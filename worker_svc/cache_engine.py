"""The KV tensors of one worker: a device pool and a host pool, and the moves between their blocks. Knows ids, not sequences."""

import math

import numpy as np
import torch

from paged_kernels.backend import CacheShape, Pairs, copy_blocks, swap_blocks


class CacheEngine:
    """Owns both pools, [num_layers, 2, num_blocks, block_elements], zero-initialised (R123); index 1 of axis 1 = values.

    Steps move blocks in the order of R3: swap in, swap out, copy, then the model runs.
    """

    def __init__(
        self,
        shape: CacheShape,
        *,
        num_layers: int,
        num_gpu_blocks: int,
        num_cpu_blocks: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.shape = shape
        sizes = (num_layers, 2, num_gpu_blocks, shape.block_elements)
        on_host = device.type == "cpu"
        self.device_pool = _host_zeros(sizes, dtype) if on_host else torch.zeros(sizes, dtype=dtype, device=device)
        self.host_pool = _host_zeros((num_layers, 2, num_cpu_blocks, shape.block_elements), dtype)

    def swap_in(self, pairs: Pairs) -> None:
        """(host block, device block) pairs."""
        swap_blocks(self.host_pool, self.device_pool, pairs)

    def swap_out(self, pairs: Pairs) -> None:
        """(device block, host block) pairs."""
        swap_blocks(self.device_pool, self.host_pool, pairs)

    def copy(self, pairs: Pairs) -> None:
        """(source, destination) device blocks; all pairs read the state before the call (R124)."""
        copy_blocks(self.device_pool, pairs)

    def move(self, *, swap_in: Pairs, swap_out: Pairs, copies: Pairs) -> None:
        """All moves of one step, in R3's order."""
        self.swap_in(swap_in)
        self.swap_out(swap_out)
        self.copy(copies)


def _host_zeros(sizes: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Zeros whose pages come to be when they are first written; `torch.zeros` writes them all, which takes about a second."""
    if 0 in sizes:
        return torch.zeros(sizes, dtype=dtype)
    return torch.from_numpy(np.zeros(math.prod(sizes) * dtype.itemsize, np.uint8)).view(dtype).view(sizes)
