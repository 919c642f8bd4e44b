"""The KV tensors of a worker: a device pool, a host pool and the moves between them. Knows block ids, not sequences."""

from collections.abc import Iterable, Sequence

import torch

from paged_kernels.backend import TORCH_BLOCKS, BlockMover, CacheShape, Pairs
from protos.worker.v1 import worker_pb2
from worker_svc.block_images import BlockImages, pairs_of
from worker_svc.device.devices import Device
from worker_svc.device.swaps import HostSwaps, StagedSwaps, Swaps
from worker_svc.model.cache.prefault import PagesAhead


class CacheEngine:
    """Owns both pools, [num_layers, 2, num_blocks, block_elements], zero-initialised; index 1 of axis 1 holds values.

    `dtype` is the storage type, independent of the type the model computes in. A move transfers all its
    blocks in all layers at once. In a step, images of other workers' blocks are placed, then blocks are moved in the
    order swap in, swap out, copy, as in vLLM's v0 worker; then the model runs.
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
        elements = shape.block_elements(dtype)
        self.device_pool = device.zeros((num_layers, 2, num_gpu_blocks, elements), dtype)
        self._pages = PagesAhead(self.device_pool)
        self._host_pool = device.swap_zeros((num_layers, 2, num_cpu_blocks, elements), dtype)
        self._swaps = self._make_swaps(device)
        self.images = BlockImages(self.block_bytes, num_gpu_blocks)

    def _make_swaps(self, device: Device) -> Swaps:
        side = device.side_stream()
        if side is None:
            return HostSwaps(self.device_pool, self._host_pool)
        return StagedSwaps(self.device_pool, self._host_pool, self._blocks, side)

    @property
    def host_pool(self) -> torch.Tensor:
        """The host pool, for tests and tools: waits until all blocks that were swapped out are in it."""
        self._swaps.finish()
        return self._host_pool

    def expect(self, num_used: int) -> None:
        """Pre-fault pages beyond the first `num_used` device blocks, which are in use or will be in this step.

        Host memory only.
        """
        self._pages.expect(num_used)

    @property
    def block_bytes(self) -> int:
        """Bytes of a block over the layers of a cache group."""
        layers, two, _, elements = self.device_pool.shape
        return layers * two * elements * self.device_pool.element_size()

    @property
    def layout(self) -> str:
        """What is in a block, for workers that exchange blocks. Each backend has its own layout within a block."""
        dtype, shape = str(self.device_pool.dtype).removeprefix("torch."), self.shape
        return (
            f"{dtype}, {len(self.device_pool)} layers of {shape.num_kv_heads} x {shape.block_size} x {shape.head_dim}"
        )

    def read(self, blocks: Sequence[int]) -> torch.Tensor:
        """Copy device blocks to the host: uint8 [len(blocks), block_bytes], contiguous. Waits for the device."""
        return self._swaps.read(blocks).view(len(blocks), -1).view(torch.uint8)

    def place(self, placed: Iterable[worker_pb2.PlacedImage]) -> None:
        """Copy images to the device blocks of a step, which `images.check` has accepted."""
        for each in placed:
            contents = torch.frombuffer(self.images.take(each.image), dtype=torch.uint8)
            self.place_contents(contents.view(-1, self.block_bytes), pairs_of(each).tolist())

    def place_contents(self, contents: torch.Tensor, pairs: Pairs) -> None:
        """Copy (block of `contents`, device block) pairs; `contents`: uint8 [n, block_bytes], as from `read`."""
        layers, two, _, elements = self.device_pool.shape
        blocks = contents.contiguous().view(self.device_pool.dtype).view(-1, layers, two, elements)
        self._swaps.place(blocks, pairs)

    def swap_in(self, pairs: Pairs) -> None:
        """Copy (host block, device block) pairs to the device."""
        self._swaps.swap_in(pairs)

    def swap_out(self, pairs: Pairs) -> None:
        """Copy (device block, host block) pairs to the host."""
        self._swaps.swap_out(pairs)

    def copy(self, pairs: Pairs) -> None:
        """Copy (source, destination) device blocks; all pairs read the state before the call."""
        self._blocks.copy(self.device_pool, pairs)

    def move(self, *, swap_in: Pairs, swap_out: Pairs, copies: Pairs) -> None:
        """Perform all moves of one step: swap in, swap out, copy."""
        self.swap_in(swap_in)
        self.swap_out(swap_out)
        self.copy(copies)
