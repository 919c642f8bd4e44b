"""The KV tensors of one worker: a device pool and a host pool, and the moves between their blocks. Knows ids, not sequences."""

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
        self.device_pool = torch.zeros(num_layers, 2, num_gpu_blocks, shape.block_elements, dtype=dtype, device=device)
        self.host_pool = torch.zeros(num_layers, 2, num_cpu_blocks, shape.block_elements, dtype=dtype)

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
