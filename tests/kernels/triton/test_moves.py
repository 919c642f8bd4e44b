"""Triton's writes and moves of keys, values and blocks: byte for byte what plain torch does."""

import random

import pytest
import torch

from paged_kernels.backend import PADDING_SLOT, TORCH_BLOCKS, CacheShape
from paged_kernels.gpu import block_moves
from paged_kernels.gpu.block_moves import TritonBlocks
from paged_kernels.reference import stored
from tests.kernels.programs import full_of_nan
from tests.kernels.triton.cases import ALLOWED, BLOCK_SIZES, DEVICE, HEAD_DIMS
from tests.kernels.triton.test_attention import Idle

QUICK, WHOLE = 3, 50
DTYPES = tuple(ALLOWED)


def random_shape(rng: random.Random, seed: int) -> CacheShape:
    return CacheShape(BLOCK_SIZES[seed % 4], rng.randint(1, 3), HEAD_DIMS[seed % 7])


def written(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(what write_kv left, what it should have left), [2, blocks, kv_heads, block_size, head_dim]."""
    rng = random.Random(seed)
    shape, tokens, num_blocks = random_shape(rng, seed), rng.randint(1, 60), rng.randint(3, 9)
    torch.manual_seed(seed)
    # The projections' result: queries, keys and values of a token lie side by side.
    merged = torch.randn(tokens, 3, shape.num_kv_heads, shape.head_dim).to(DTYPES[seed % 3]).to(DEVICE)
    key, value = merged[:, 1], merged[:, 2]
    slots = torch.randperm(num_blocks * shape.block_size)[:tokens].to(DEVICE)
    slots[:: rng.randint(2, 9)] = PADDING_SLOT
    cache = torch.full((2, num_blocks, shape.block_elements(merged.dtype)), 7.0, dtype=merged.dtype, device=DEVICE)
    expected = cache.clone().view(2, num_blocks, shape.num_kv_heads, shape.block_size, shape.head_dim)
    for token, slot in enumerate(slots.tolist()):
        if slot != PADDING_SLOT:
            expected[0, slot // shape.block_size, :, slot % shape.block_size] = key[token]
            expected[1, slot // shape.block_size, :, slot % shape.block_size] = value[token]
    block_moves.write_kv(key, value, cache, slots, shape)
    return cache.view(expected.shape), expected


def check_writes(seeds: range, record) -> None:
    for seed in seeds:
        found, expected = written(seed)
        assert torch.equal(found, expected), seed
    record("size", f"triton cache write: {len(seeds)} random shapes of {WHOLE}")


def test_writes(record_property):
    """R18: each token's keys and values at its slot, padding nowhere, nothing else touched; a sample."""
    check_writes(range(QUICK), record_property)


@pytest.mark.long
def test_writes_of_every_shape(record_property):
    """R18: the same over all random shapes."""
    check_writes(range(WHOLE), record_property)


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn], ids=str)
def test_writes_of_numbers_with_scales(dtype):
    """Those of the reference and their scales, of sizes from none to all; NaN for what is not finite; nothing else touched."""
    shape, tokens = CacheShape(16, 2, 80), 60
    heads = torch.randn(2, tokens, 2, 80, generator=torch.Generator().manual_seed(0))
    heads *= 10 ** torch.linspace(-20, 20, tokens)[:, None, None]
    heads[:, 5] = heads[:, 5].bfloat16()
    heads[:, 3, 0], heads[:, 4, 1], heads[0, 6, 0, 7], heads[1, 7, 1, 2] = 0, 1e-31, float("inf"), float("nan")
    heads[0, 8, 0, :4] = torch.tensor([448, 17, 19, 2.0**-10])
    heads[0, 8, 0, 4:] = 0
    slots = torch.randperm(5 * 16, generator=torch.Generator().manual_seed(1))[:tokens]
    cache = full_of_nan((2, 5, shape.block_elements(dtype)), dtype).to(DEVICE)
    block_moves.write_kv(*heads.to(DEVICE), cache, slots.to(DEVICE), shape)
    of_heads = cache.cpu().view(2, 5, 2, 16 * 84)
    numbers = of_heads[..., : 16 * 80].reshape(2, 5, 2, 16, 80).transpose(2, 3).reshape(2, 80, 2, 80)
    scales = of_heads[..., 16 * 80 :].contiguous().view(torch.float32).transpose(2, 3).reshape(2, 80, 2, 1)
    expected, expected_scales = stored(heads, dtype).split([80, 4], -1)
    assert torch.equal(
        scales[:, slots].nan_to_num(7.0), expected_scales.contiguous().view(torch.float32).nan_to_num(7.0)
    )
    # Of int8, the interpreter rounds the product before it is rounded to an integer.
    most = 1 if dtype == torch.int8 else 0
    assert (numbers[:, slots].float() - expected.float()).abs().max() <= most
    rest = torch.ones(80, dtype=torch.bool)
    rest[slots] = False
    assert (numbers.view(torch.uint8)[:, rest] == 255).all()
    assert scales[:, rest].isnan().all()


class Pools:
    """A device pool, and as many blocks in a row, of random contents, NaN among them."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        shape, layers = random_shape(self.rng, seed), self.rng.randint(1, 3)
        self.num_blocks = self.rng.randint(4, 7)
        torch.manual_seed(seed)
        dtype = DTYPES[seed % 3]
        sizes = (layers, 2, shape.block_elements(dtype))
        self.device = torch.randn(*sizes[:2], self.num_blocks, sizes[2]).to(dtype).to(DEVICE)
        self.device[:, :, 1] = float("nan")
        self.staged = torch.randn(self.num_blocks, *sizes).to(dtype).to(DEVICE)

    def pairs(self) -> list[tuple[int, int]]:
        """Of a copy."""
        count, blocks = self.rng.randint(2, self.num_blocks), range(self.num_blocks)
        return list(zip(self.rng.choices(blocks, k=count), self.rng.sample(blocks, count), strict=True))

    def ids(self) -> torch.Tensor:
        """Distinct blocks."""
        blocks = self.rng.sample(range(self.num_blocks), self.rng.randint(1, self.num_blocks))
        return torch.tensor(blocks, device=DEVICE)


def moved(seed: int, kind: str) -> tuple[torch.Tensor, torch.Tensor]:
    """(found, expected) bytes of what `kind` of move writes to."""
    pools = Pools(seed)
    both = pools.staged if kind == "gather" else pools.device
    found, expected = both.clone(), both.clone()
    for blocks, written in ((TritonBlocks(), found), (TORCH_BLOCKS, expected)):
        pools.rng.seed(seed)
        if kind == "copy":
            blocks.copy(written, pools.pairs())
        elif kind == "gather":
            ids = pools.ids()
            blocks.gather(pools.device, ids, written[: len(ids)])
        else:
            ids = pools.ids()
            blocks.scatter(pools.staged[: len(ids)], written, ids)
    return found.view(torch.uint8), expected.view(torch.uint8)


def check_moves(kind: str, seeds: range, record) -> None:
    for seed in seeds:
        found, expected = moved(seed, kind)
        assert torch.equal(found, expected), (kind, seed)
    record("size", f"triton {kind}: {len(seeds)} random pools of {WHOLE}")


@pytest.mark.parametrize("kind", ["copy", "gather", "scatter"])
def test_moves(kind, record_property):
    """R123, R124: blocks arrive over all layers with the bytes they had before the call, others stay; a sample."""
    check_moves(kind, range(QUICK), record_property)


@pytest.mark.long
@pytest.mark.parametrize("kind", ["copy", "gather", "scatter"])
def test_moves_in_every_pool(kind, record_property):
    """R123, R124: the same over all random pools."""
    check_moves(kind, range(WHOLE), record_property)


def test_a_destination_that_is_a_source():
    """R124: chains of copies read what was there before, though the programs of a launch run in any order."""
    pool = torch.arange(2 * 2 * 5 * 64, dtype=torch.float32, device=DEVICE).view(2, 2, 5, 64)
    before = pool.clone()
    TritonBlocks().copy(pool, [(0, 1), (1, 2), (2, 0), (1, 3)])
    assert torch.equal(pool, before[:, :, [2, 0, 1, 1, 4]])


def test_nothing_to_do():
    """No pairs, no tokens, no launch."""
    pool = torch.ones(1, 2, 3, 64, device=DEVICE)
    TritonBlocks().copy(pool, [])
    nothing = torch.zeros(0, 1, 64, device=DEVICE)
    block_moves.write_kv(
        nothing, nothing, pool[0], torch.zeros(0, dtype=torch.int64, device=DEVICE), CacheShape(1, 1, 64)
    )
    assert bool((pool == 1).all())


def test_kernels_that_do_nothing_are_noticed(monkeypatch):
    """The comparisons see it when nothing was moved."""
    # Fresh memory may be what plain torch has just gathered the same blocks in.
    monkeypatch.setattr(block_moves.torch, "empty", torch.zeros)
    monkeypatch.setattr(block_moves, "write_kernel", Idle())
    monkeypatch.setattr(block_moves, "move_kernel", Idle())
    found, expected = written(1)
    assert not torch.equal(found, expected)
    for kind in ("copy", "gather", "scatter"):
        pairs = [moved(seed, kind) for seed in range(QUICK)]
        assert sum(torch.equal(found, expected) for found, expected in pairs) < 2, kind
