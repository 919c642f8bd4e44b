"""Swaps in pieces beside the compute stream: the right bytes, whatever is late, and a missing wait is found, in each direction."""

import random

import pytest
import torch

from paged_kernels.backend import TORCH_BLOCKS, BlockMover, CacheShape, Pairs, swap_blocks
from paged_kernels.gpu.block_moves import TritonBlocks
from protos.worker.v1 import worker_pb2
from svc_common import wire_arrays
from tests.worker.fake_cuda.device import FakeCuda
from tests.worker.fake_cuda.ledger import LEDGER
from tests.worker.fake_cuda.side_stream import FakeSideStream, Unordered
from worker_svc.device import swaps
from worker_svc.device.streams import SideStream, StreamEvent
from worker_svc.model.cache.cache_engine import CacheEngine

NUM_BLOCKS, NUM_HOST_BLOCKS, SHAPE = 12, 10, CacheShape(2, 1, 8)
BLOCK_BYTES = 2 * 2 * SHAPE.block_elements(torch.float32) * 4


class CopiesDoNotWait(FakeSideStream):
    """The side stream takes no notice of kernels."""

    def copies_wait(self, event: StreamEvent) -> None:
        pass


class ComputeDoesNotWait(FakeSideStream):
    """The compute stream takes no notice of copies."""

    def compute_waits(self, event: StreamEvent) -> None:
        pass


class Device(FakeCuda):
    """Its side streams are of the class `kind`."""

    def __init__(self, kind: type[FakeSideStream]) -> None:
        super().__init__()
        self._kind = kind

    def side_stream(self) -> SideStream:
        return self._kind()


def made(
    monkeypatch: pytest.MonkeyPatch, num_staged: int = 2, kind: type[FakeSideStream] = FakeSideStream,
    blocks: BlockMover = TORCH_BLOCKS, dtype: torch.dtype = torch.float32,
) -> CacheEngine:  # fmt: skip
    """A cache of two layers with buffers of `num_staged` blocks, full of numbers."""
    monkeypatch.setattr(swaps, "_BUFFER_BYTES", num_staged * BLOCK_BYTES * dtype.itemsize // 4)
    cache = CacheEngine(
        SHAPE, num_layers=2, num_gpu_blocks=NUM_BLOCKS, num_cpu_blocks=NUM_HOST_BLOCKS, dtype=dtype, device=Device(kind),
        blocks=blocks,
    )  # fmt: skip
    numbers = torch.arange(cache.device_pool.numel()).view(cache.device_pool.shape) % 251
    cache.device_pool.copy_(numbers.to(dtype))
    return cache


@pytest.mark.parametrize("num_staged", [1, 2, 3, 5])
def test_there_and_back(num_staged, monkeypatch):
    """R123: blocks are overwritten as soon as the call returns, and the host has what was in them; then they return."""
    cache = made(monkeypatch, num_staged)
    before, places = cache.device_pool.cpu(), [7, 0, 3, 1, 6, 2, 9]
    cache.swap_out(list(enumerate(places)))
    cache.device_pool.fill_(-1.0)
    assert torch.equal(cache.host_pool[:, :, places], before[:, :, : len(places)])
    cache.swap_in([(place, block + 5) for block, place in enumerate(places)])
    assert torch.equal(cache.device_pool[:, :, 5:].cpu(), before[:, :, : len(places)])
    assert (cache.device_pool[:, :, :5] == -1).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8, torch.float8_e4m3fn], ids=str)
def test_with_the_kernels(dtype, monkeypatch):
    """R123: the same bytes in each type of cache, gathered and scattered by Triton's kernel."""
    cache = made(monkeypatch, 2, blocks=TritonBlocks(), dtype=dtype)
    before, places = cache.device_pool.cpu().view(torch.uint8), [4, 5, 6, 1, 0]
    cache.swap_out(list(enumerate(places)))
    cache.device_pool.zero_()
    cache.swap_in([(place, block + 6) for block, place in enumerate(places)])
    assert torch.equal(cache.device_pool.cpu().view(torch.uint8)[:, :, 6:11], before[:, :, :5])


def _moves(rng: random.Random) -> tuple[Pairs, Pairs, Pairs]:
    """Of one step: swap in, swap out to places that may have just been read, copies."""
    device, hosts = rng.sample(range(NUM_BLOCKS), NUM_BLOCKS), range(NUM_HOST_BLOCKS)
    num_in, num_out = rng.randint(0, 5), rng.randint(0, 5)
    swap_in = list(zip(rng.sample(hosts, num_in), device[:num_in], strict=True))
    swap_out = list(zip(device[num_in : num_in + num_out], rng.sample(hosts, num_out), strict=True))
    copies = [(swap_out[0][0], device[-1])] if swap_out else []
    return swap_in, swap_out, copies


@pytest.mark.parametrize("seed", range(6))
def test_steps_of_all_moves(seed, monkeypatch):
    """R122: swap in, swap out, copy, then a step that writes any block: pools are those of moves one after the other."""
    rng, cache = random.Random(seed), made(monkeypatch, 1 + seed % 3)
    device, host = cache.device_pool.cpu(), cache.host_pool.clone()
    for step in range(20):
        swap_in, swap_out, copies = _moves(rng)
        cache.move(swap_in=swap_in, swap_out=swap_out, copies=copies)
        swap_blocks(host, device, swap_in)
        swap_blocks(device, host, swap_out)
        for source, destination in copies:
            device[:, :, destination] = device[:, :, source]
        written = rng.sample(range(NUM_BLOCKS), 3)
        for pool in (cache.device_pool, device):
            pool[:, :, written] = float(step)
    assert torch.equal(cache.device_pool.cpu(), device)
    assert torch.equal(cache.host_pool, host)


@pytest.mark.parametrize("num_staged", [1, 3])
def test_images_beside_swaps(num_staged, monkeypatch):
    """Blocks that are read for another worker, and blocks of another worker, go through the same buffers."""
    cache, other = made(monkeypatch, num_staged), made(monkeypatch, num_staged, dtype=torch.float32)
    other.device_pool.zero_()
    blocks = [9, 0, 4, 5, 2]
    cache.swap_out(SIX[:4])
    image = cache.read(blocks)
    cache.swap_out([(7, 6), (8, 7)])
    other.swap_out(SIX[:3])
    other.images.put("a", 0, image.numpy().tobytes())
    pairs = [(1, 3), (2, 11), (4, 0)]
    other.place([worker_pb2.PlacedImage(image="a", blocks=wire_arrays.pack_pairs(pairs))])
    assert not other.host_pool.any()
    for place, block in pairs:
        assert torch.equal(other.device_pool[:, :, block].cpu(), cache.device_pool[:, :, blocks[place]].cpu())
    assert int(other.device_pool.cpu().any(dim=(0, 1, 3)).sum()) == len(pairs)


# --- a missing wait is found -----------------------------------------------------------------------------------------

SIX = [(i, i) for i in range(6)]


@pytest.mark.parametrize(
    ("kind", "swap", "message"),
    [
        (CopiesDoNotWait, "swap_out", "a copy does not wait for the kernel"),
        (CopiesDoNotWait, "swap_in", "a copy does not wait for the kernel"),
        (ComputeDoesNotWait, "swap_out", "a kernel does not wait for the copy"),
        (ComputeDoesNotWait, "swap_in", "a kernel does not wait for the copy"),
    ],
)
def test_a_missing_wait_is_found(kind, swap, message, monkeypatch):
    """Each of the four: a copy out before its piece is gathered, a copy in over a piece that is not scattered yet,
    a gather over a piece that is not copied yet, a scatter before its piece has come."""  # fmt: skip
    cache = made(monkeypatch, 2, kind)
    with pytest.raises(Unordered, match=message):
        getattr(cache, swap)(SIX)


def test_a_piece_waits_only_for_its_own_buffer(monkeypatch):
    """The gather of a piece is launched while the piece before it is copied: three pieces, one wait of the compute stream."""
    waits = []

    class Counted(FakeSideStream):
        def compute_waits(self, event):
            waits.append(self._num_copied - event.copied)
            super().compute_waits(event)

    made(monkeypatch, 2, Counted).swap_out(SIX)
    assert waits == [1]


def test_host_memory_is_late(monkeypatch):
    """Behind the call, the host has nothing yet: what has been swapped out is read with a wait."""
    cache = made(monkeypatch)
    cache.swap_out(SIX[:4])
    assert not cache._host_pool.any()
    assert cache.host_pool[:, :, :4].any()


# --- memory ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("num_host_blocks", "num_staged"), [(0, 1), (1, 1), (5, 3), (1000, 4)])
def test_buffers_are_bounded_and_counted(num_host_blocks, num_staged, monkeypatch):
    """Two, each of the bytes that a piece may have, or of half the swap space, but of one block at least; the same
    number as the worker's budget."""  # fmt: skip
    monkeypatch.setattr(swaps, "_BUFFER_BYTES", 4 * BLOCK_BYTES)
    before = LEDGER.num_bytes
    cache = CacheEngine(
        SHAPE, num_layers=2, num_gpu_blocks=1, num_cpu_blocks=num_host_blocks, dtype=torch.float32, device=FakeCuda()
    )
    staged = LEDGER.num_bytes - before - cache.device_pool.nbytes
    assert staged == 2 * num_staged * BLOCK_BYTES == swaps.staging_bytes(BLOCK_BYTES, num_host_blocks * BLOCK_BYTES)
    assert swaps.staging_bytes(BLOCK_BYTES * 100, 1000 * BLOCK_BYTES) == 2 * 100 * BLOCK_BYTES
