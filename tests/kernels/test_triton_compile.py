"""Every Triton kernel compiles for sm_80, sm_90 and gfx942 without a GPU, and fits there."""

import itertools
from collections.abc import Iterable

import pytest
import torch

from paged_kernels.backend import AttentionRule, CacheShape
from paged_kernels.resources.compiled import GPUS, resources
from paged_kernels.resources.forms import (
    attention_launches,
    decoder_launches,
    other_launches,
    product_launches,
    rotation_launches,
)
from paged_kernels.resources.launches import Launch

PLAIN, CAPPED_WINDOW, CHUNKS = AttentionRule(0.1), AttentionRule(0.1, 512, 30.0), AttentionRule(0.1, chunk=512)
KERNELS = {
    "attention_kernel", "combine_kernel", "plan_kernel", "write_kernel", "move_kernel", "draw_kernel", "logprob_kernel",
    "choose_kernel", "float8_kernel", "embed_kernel", "norm_kernel", "gated_kernel", "rotate_kernel", "begin_kernel",
}  # fmt: skip


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))


def attentions(found: list[Launch]) -> list[Launch]:
    """That of a decode, that of a prompt."""
    return [launch for launch in found if launch.name == "attention_kernel"]


def check(found: list[Launch], gpus: Iterable[str]) -> set[str]:
    """Compiles for these; names of the kernels."""
    for launch, gpu in itertools.product(found, gpus):
        taken = resources(launch, GPUS[gpu])
        assert taken.shared_bytes <= GPUS[gpu].shared_bytes, (launch.name, gpu, taken)
    return {launch.name for launch in found}


def ptx(launch: Launch, gpu: str) -> str:
    return str(launch.compile(GPUS[gpu].target).asm["ptx"])


def test_every_kernel_compiles(record_property):
    """All kernels, bfloat16 heads of 64, for sm_80; matrix products on the matrix units, keys by asynchronous copies."""
    shape = CacheShape(16, 8, 64)
    found = attention_launches(shape, 4, torch.bfloat16, PLAIN)
    others = decoder_launches(shape, 4, torch.bfloat16, 576) + other_launches(torch.bfloat16, 1000)
    others += product_launches(torch.bfloat16)
    assert check(found + others, ["sm_80"]) == KERNELS
    for launch in attentions(found):
        assert "cp.async" in ptx(launch, "sm_80")
        assert "mma.sync" in ptx(launch, "sm_80")
    record_property("size", f"triton compiled: {len(KERNELS)} kernels, 1 shape, sm_80")


@pytest.mark.long
def test_every_kernel_compiles_for_hopper(record_property):
    """The same for sm_90, where heads of 128 fill the matrix units of four warps."""
    shape = CacheShape(16, 8, 128)
    found = attention_launches(shape, 4, torch.bfloat16, PLAIN)
    others = decoder_launches(shape, 4, torch.bfloat16, 4096) + other_launches(torch.bfloat16, 1000)
    others += product_launches(torch.bfloat16)
    assert check(found + others, ["sm_90"]) == KERNELS
    _decode, prefill = attentions(found)
    assert "wgmma" in ptx(prefill, "sm_90")
    record_property("size", f"triton compiled: {len(KERNELS)} kernels, 1 shape, sm_90")


@pytest.mark.long
def test_every_kernel_compiles_for_amd():
    """The same for gfx942, which has less shared memory."""
    shape = CacheShape(16, 8, 128)
    found = attention_launches(shape, 4, torch.bfloat16, PLAIN)
    others = decoder_launches(shape, 4, torch.bfloat16, 4096) + other_launches(torch.bfloat16, 1000)
    others += product_launches(torch.bfloat16)
    assert check(found + others, ["gfx942"]) == KERNELS


@pytest.mark.long
@pytest.mark.parametrize("kept", [torch.int8, torch.float8_e4m3fn], ids=str)
def test_caches_with_scales_compile(kept):
    """E4M3 numbers are bytes on GPUs that have no such type."""
    shape = CacheShape(16, 8, 128)
    found = attention_launches(shape, 4, torch.bfloat16, PLAIN, kept) + rotation_launches(
        shape, 4, torch.bfloat16, kept
    )
    check(found, GPUS)


@pytest.mark.long
@pytest.mark.parametrize("kept", [None, torch.int8], ids=str)
def test_latents_compile(kept):
    """128 query heads of one kv head of 576 (DeepSeek-V3), without spilled registers."""
    found = attention_launches(CacheShape(16, 1, 576), 128, torch.bfloat16, PLAIN, kept)
    check(found, GPUS)
    for launch in attentions(found):
        assert resources(launch, GPUS["sm_90"]).spilled_bytes == 0


@pytest.mark.long
def test_samplers_of_large_vocabularies_compile():
    """Pieces of rows that are as large as they get."""
    check(other_launches(torch.bfloat16, 128_256), GPUS)


DTYPES, HEAD_DIMS = (torch.float32, torch.bfloat16, torch.float16), (64, 80, 96, 112, 128, 192, 256)


def forms(head_dim: int, dtype: torch.dtype) -> list[tuple[int, int, AttentionRule]]:
    """(heads per kv head, block size, rule) of a head size: both forms, and chunks, for the commonest, else in turn, so that
    every form meets every type and every size."""
    both = [(1, 16, PLAIN), (7, 48, CAPPED_WINDOW)]
    turn = (HEAD_DIMS.index(head_dim) + DTYPES.index(dtype)) % 2
    return [*both, (2, 32, CHUNKS)] if head_dim == 128 else [both[turn]]


def gpus_of(head_dim: int, dtype: torch.dtype) -> list[str]:
    """NVIDIA's: both for bfloat16 and the commonest size; else in turn, so that every type and every size meets both.

    Products of float32, which no matrix unit does, take a minute to compile.
    """
    both = ["sm_80", "sm_90"]
    turn = (HEAD_DIMS.index(head_dim) + (dtype is torch.float16)) % 2
    return both if head_dim == 128 or dtype is torch.bfloat16 else [both[turn]]


@pytest.mark.long
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_every_shape_compiles(head_dim, dtype, record_property):
    """Head sizes 64-256, groups of 1 to 8, odd blocks, windows and soft caps, for sm_80 and sm_90."""
    tried, targets = forms(head_dim, dtype), gpus_of(head_dim, dtype)
    for group, block_size, rule in tried:
        check(attention_launches(CacheShape(block_size, 2, head_dim), group, dtype, rule), targets)
    names = " and ".join(targets)
    record_property("size", f"triton compiled: heads of {head_dim}, {dtype}, {len(tried)} rules, {names}")


@pytest.mark.long
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("dtype", DTYPES)
def test_moves_and_draws_compile(dtype):
    """What does not depend on heads, for every type, for sm_80 and sm_90."""
    check(other_launches(dtype, 1000), GPUS)
