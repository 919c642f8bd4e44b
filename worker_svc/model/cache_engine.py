"""The KV tensors of one worker: a device pool and a host pool, and the moves between their blocks. Knows ids, not sequences."""

import torch

from paged_kernels.backend import TORCH_BLOCKS, BlockMover, CacheShape, Pairs
from worker_svc.device.devices import Device
from worker_svc.model.prefault import PagesAhead


class CacheEngine:
    """Owns both pools, [num_layers, 2, num_blocks, block_elements], zero-initialised (R123); index 1 of axis 1 = values.

    `dtype`: of what is stored, whatever the model computes in. A move takes all its blocks through all layers at once.
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
        device: Device,
        blocks: BlockMover = TORCH_BLOCKS,
    ) -> None:
        self.shape = shape
        self._blocks = blocks
        sizes = (num_layers, 2, num_gpu_blocks, shape.block_elements)
        self.device_pool = device.zeros(sizes, dtype)
        self._pages = PagesAhead(self.device_pool)
        self.host_pool = device.swap_zeros((num_layers, 2, num_cpu_blocks, shape.block_elements), dtype)

    def expect(self, num_used: int) -> None:
        """Device blocks below `num_used` are in use, or will be with the step that begins; a host makes memory for more ready."""
        self._pages.expect(num_used)

    def swap_in(self, pairs: Pairs) -> None:
        """(host block, device block) pairs."""
        self._blocks.swap_in(self.host_pool, self.device_pool, pairs)

    def swap_out(self, pairs: Pairs) -> None:
        """(device block, host block) pairs."""
        self._blocks.swap_out(self.device_pool, self.host_pool, pairs)

    def copy(self, pairs: Pairs) -> None:
        """(source, destination) device blocks; all pairs read the state before the call (R124)."""
        self._blocks.copy(self.device_pool, pairs)

    def move(self, *, swap_in: Pairs, swap_out: Pairs, copies: Pairs) -> None:
        """All moves of one step, in R3's order."""
        self.swap_in(swap_in)
        self.swap_out(swap_out)
        self.copy(copies)
