"""Pools that grow and shrink while blocks are in use."""

import pytest

from block_manager import integrity
from block_manager.compat.free_stack import FreeStack, StackThenEvictor
from block_manager.compat.vllm_063 import Vllm063Rules
from block_manager.compat.vllm_2023 import Vllm2023Rules
from block_manager.eviction_queue import EvictionQueue
from block_manager.ledger import Ledger
from block_manager.pool import BlockPool, FreeBlocks


def _pools() -> list[BlockPool]:
    free: list[FreeBlocks] = [
        EvictionQueue(6),
        FreeStack(range(6)),
        StackThenEvictor(range(6), keep_all=True),
        StackThenEvictor(range(6), keep_all=False),
    ]
    return [BlockPool(6, free_blocks=blocks) for blocks in free]


@pytest.mark.parametrize("kind", range(4))
def test_new_blocks_are_taken_last(kind: int) -> None:
    """What was free before is taken first, then the new ones in order."""
    pool = _pools()[kind]
    held = pool.allocate(2)
    before = list(pool.free_blocks)
    pool.resize(9)
    assert (pool.num_blocks, pool.num_free, pool.num_usable) == (9, 7, 9)
    assert pool.allocate(7) == [*before, 6, 7, 8]
    pool.release([*held, 8])
    assert pool.num_free == 3


@pytest.mark.parametrize("kind", range(4))
def test_only_free_blocks_go(kind: int) -> None:
    """Those in use stay, whatever their ids; blocks that went come back before new ones."""
    pool = _pools()[kind]
    held = pool.allocate(4)
    with pytest.raises(ValueError, match="cannot remove 3 blocks: 2 are free"):
        pool.resize(3)
    assert pool.num_free == 2
    gone = list(pool.free_blocks)
    pool.resize(4)
    assert (pool.num_free, pool.num_usable) == (0, 4)
    pool.resize(7)
    assert pool.allocate(3) == [*gone, 6]
    pool.release(held)


def test_what_a_block_that_went_held_is_forgotten() -> None:
    """R110: no prefix is found in it any more; others are still found."""
    pool = BlockPool(3)
    first, second, _ = pool.allocate(3)
    pool.register(first, b"a")
    pool.register(second, b"b")
    pool.release([first])
    pool.resize(2)
    assert (pool.lookup(b"a"), pool.lookup(b"b")) == (None, second)
    pool.reset_prefixes()
    pool.resize(5)
    assert pool.lookup(b"b") is None
    assert len(pool.hash_of) == 5


def test_both_pools_or_none() -> None:
    """R200: where the host cannot shrink the device does not either; the ledger adds up after all."""
    ledger = Ledger(4, gpu=BlockPool(8, num_reserved=1), cpu=BlockPool(4))
    ledger.tables["a/0"] = ledger.gpu.allocate(3)
    ledger.host_tables["b/0"] = ledger.cpu.allocate(3)
    with pytest.raises(ValueError, match="cannot remove 2 blocks: 1 are free"):
        ledger.resize(6, 2)
    assert ledger.gpu.num_blocks == 8
    ledger.resize(4, 6)
    assert (ledger.gpu.num_free, ledger.cpu.num_free) == (0, 3)
    assert integrity.check(ledger) == []


@pytest.mark.parametrize("rules", [Vllm063Rules, Vllm2023Rules])
@pytest.mark.parametrize("prefix_caching", [False, True])
def test_rules_go_on_in_a_larger_pool(rules: type[Vllm063Rules | Vllm2023Rules], *, prefix_caching: bool) -> None:
    """R93, R115: new blocks can be marked as computed like others."""
    made = rules.make(
        block_size=4,
        num_gpu_blocks=2,
        num_cpu_blocks=1,
        max_model_len=64,
        prefix_caching=prefix_caching,
        watermark_blocks=0,
    )
    made.resize(6, 3)
    assert (made.num_free_gpu, made.num_free_cpu, made.capacity_tokens) == (6, 3, 24)
    made.reset_prefixes()
    made.resize(8, 1)
    assert (made.num_free_gpu, made.num_free_cpu) == (8, 1)
