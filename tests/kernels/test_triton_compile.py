"""Every Triton kernel compiles for sm_80 and sm_90 without a GPU, and fits there."""

import itertools
from collections.abc import Iterable

import numpy as np
import pytest
import torch

from paged_kernels import triton_sampling
from paged_kernels.backend import AttentionBatch, AttentionRule, CacheShape
from paged_kernels.triton_backend import TritonBackend
from paged_kernels.triton_plan import Sharing
from tests.kernels.compiling import SHARED_BYTES, Launch, launches
from worker_svc.sampling.sampler import SamplingRows

PLAIN, CAPPED_WINDOW = AttentionRule(0.1), AttentionRule(0.1, 512, 30.0)
H200 = Sharing(4 * 132, 32 * 1024)
KERNELS = {
    "attention_kernel", "combine_kernel", "plan_kernel", "write_kernel", "move_kernel", "draw_kernel", "logprob_kernel",
}  # fmt: skip


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))


def attention_launches(shape: CacheShape, group: int, dtype: torch.dtype, rule: AttentionRule) -> list[Launch]:
    """What a step with a decoding sequence and a prompt launches for one layer."""
    tokens = 1 + 100
    kv = torch.zeros(tokens, shape.num_kv_heads, shape.head_dim, dtype=dtype)
    batch = AttentionBatch(
        torch.zeros(tokens, dtype=torch.int32),
        torch.zeros(tokens, dtype=torch.int32),
        torch.zeros(tokens, dtype=torch.int64),
        torch.zeros(2, 16, dtype=torch.int32),
        np.array([0, 1, tokens], np.int32),
    )
    cache, backend = torch.zeros(2, 8, shape.block_elements(dtype), dtype=dtype), TritonBackend(H200)
    with launches() as found:
        backend.write_kv(kv, kv, cache, batch.slots, shape)
        backend.paged_attention(kv.repeat(1, group, 1), cache, batch, shape, rule)
    return found


def other_launches(dtype: torch.dtype, vocab_size: int) -> list[Launch]:
    """Copies of blocks and draws of tokens."""
    rows, ones = 4, torch.ones(4, dtype=torch.int64)
    parameters = SamplingRows(
        torch.ones(rows), ones, torch.ones(rows), ones, ones, ones, ones.bool(), torch.zeros(rows)
    )
    with launches() as found:
        TritonBackend(H200).blocks.copy(torch.zeros(2, 2, 4, 1024, dtype=dtype), [(0, 1)])
        triton_sampling.draw(torch.zeros(rows, vocab_size), parameters, ones.bool())
        triton_sampling.chosen_logprobs(torch.zeros(rows, vocab_size), ones, ones.bool())
    return found


def attentions(found: list[Launch]) -> list[Launch]:
    """That of a decode, that of a prompt."""
    return [launch for launch in found if launch.name == "attention_kernel"]


def check(found: list[Launch], capabilities: Iterable[int] = SHARED_BYTES) -> set[str]:
    """Compiles for these; names of the kernels."""
    for launch, capability in itertools.product(found, capabilities):
        limit = SHARED_BYTES[capability]
        made = launch.compile(capability)
        assert f".target sm_{capability}" in made.asm["ptx"]
        assert len(made.asm["cubin"]) > 0
        assert made.metadata.shared <= limit, (launch.name, capability)
    return {launch.name for launch in found}


def test_every_kernel_compiles(record_property):
    """All kernels, bfloat16 heads of 64, for sm_80; matrix products on the matrix units, keys by asynchronous copies."""
    found = attention_launches(CacheShape(16, 8, 64), 4, torch.bfloat16, PLAIN)
    assert check(found + other_launches(torch.bfloat16, 1000), [80]) == KERNELS
    for launch in attentions(found):
        assert "cp.async" in launch.compile(80).asm["ptx"]
        assert "mma.sync" in launch.compile(80).asm["ptx"]
    record_property("size", f"triton compiled: {len(KERNELS)} kernels, 1 shape, sm_80")


@pytest.mark.long
def test_every_kernel_compiles_for_hopper(record_property):
    """The same for sm_90, where heads of 128 fill the matrix units of four warps."""
    found = attention_launches(CacheShape(16, 8, 128), 4, torch.bfloat16, PLAIN)
    assert check(found + other_launches(torch.bfloat16, 1000), [90]) == KERNELS
    _decode, prefill = attentions(found)
    assert "wgmma" in prefill.compile(90).asm["ptx"]
    record_property("size", f"triton compiled: {len(KERNELS)} kernels, 1 shape, sm_90")


@pytest.mark.long
def test_samplers_of_large_vocabularies_compile():
    """Pieces of rows that are as large as they get."""
    check(other_launches(torch.bfloat16, 128_256))


DTYPES, HEAD_DIMS = (torch.float32, torch.bfloat16, torch.float16), (64, 80, 96, 112, 128, 192, 256)


def forms(head_dim: int, dtype: torch.dtype) -> list[tuple[int, int, AttentionRule]]:
    """(heads per kv head, block size, rule) of a head size: both forms for the commonest, else in turn, so that every form meets
    every type and every size."""
    both = [(1, 16, PLAIN), (7, 48, CAPPED_WINDOW)]
    turn = (HEAD_DIMS.index(head_dim) + DTYPES.index(dtype)) % 2
    return both if head_dim == 128 else [both[turn]]


def capabilities(head_dim: int, dtype: torch.dtype) -> list[int]:
    """Both for bfloat16 and the commonest size, which is what models have; else in turn, so that every type and every size meets
    both. Products of float32, which no matrix unit does, take a minute to compile."""
    both = list(SHARED_BYTES)
    turn = (HEAD_DIMS.index(head_dim) + (dtype is torch.float16)) % 2
    return both if head_dim == 128 or dtype is torch.bfloat16 else [both[turn]]


@pytest.mark.long
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_every_shape_compiles(head_dim, dtype, record_property):
    """Head sizes 64-256, groups of 1 to 8, odd blocks, windows and soft caps, for sm_80 and sm_90."""
    tried, targets = forms(head_dim, dtype), capabilities(head_dim, dtype)
    for group, block_size, rule in tried:
        check(attention_launches(CacheShape(block_size, 2, head_dim), group, dtype, rule), targets)
    names = " and ".join(f"sm_{target}" for target in targets)
    record_property("size", f"triton compiled: heads of {head_dim}, {dtype}, {len(tried)} rules, {names}")


@pytest.mark.long
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("dtype", DTYPES)
def test_moves_and_draws_compile(dtype):
    """What does not depend on heads, for every type, for sm_80 and sm_90."""
    check(other_launches(dtype, 1000))
