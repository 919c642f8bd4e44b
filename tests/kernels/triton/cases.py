"""Random attention problems: shapes, contents, and what a backend makes of them."""

import dataclasses
import random
from dataclasses import dataclass

import numpy as np
import torch

from paged_kernels.backend import (
    PADDING_SLOT,
    AttentionBatch,
    AttentionRule,
    CacheShape,
    KernelBackend,
    written_dtype,
)
from tests.kernels.programs import full_of_nan
from tests.support.cuda import TEST_DEVICE
from tests.worker.fake_cuda import tensors

DEVICE = tensors.DEVICE if TEST_DEVICE == "fake-cuda" else torch.device(TEST_DEVICE)
ALLOWED = {torch.float32: (1e-5, 0.0), torch.bfloat16: (0.01, 2**-7), torch.float16: (0.002, 2**-10)}
"""How far a result may be off: an absolute part (weights of that type) and a relative one (a last bit of the result)."""
HEAD_DIMS = (64, 80, 96, 112, 128, 192, 256)
BLOCK_SIZES = (16, 32, 48, 64)
PADDING = 3


@dataclass(frozen=True)
class Problem:
    """Sequences of (already cached, new) tokens under one rule."""

    shape: CacheShape
    group: int
    dtype: torch.dtype
    sequences: tuple[tuple[int, int], ...]
    rule: AttentionRule
    seed: int
    cache_dtype: torch.dtype | None = None
    """None: that of the rows."""


def random_problem(kind: str, seed: int) -> Problem:
    """`kind`: "decode" (one new token each), "prefill" (nothing cached) or "mixed" (both, chunks, several new tokens, none)."""
    rng = random.Random(f"{kind} {seed}")
    shape = CacheShape(BLOCK_SIZES[seed % 4], rng.randint(1, 4), HEAD_DIMS[seed % 7])
    longest = 5 * shape.block_size

    def lengths() -> tuple[int, int]:
        if kind == "decode":
            return rng.randrange(longest), 1
        if kind == "prefill":
            return 0, rng.randint(1, longest // 2)
        return rng.choice([(rng.randrange(longest), n) for n in (0, 1, 1, rng.randint(2, 7), rng.randint(8, 60))])

    rule = AttentionRule(
        shape.head_dim**-0.5,
        rng.randint(1, longest // 2) if rng.random() < 0.4 else None,
        rng.choice([5.0, 50.0]) if rng.random() < 0.3 else None,
    )
    if rule.sliding_window is None and rng.random() < 0.4:
        rule = dataclasses.replace(rule, chunk=rng.randint(1, longest // 2))
    group = rng.randint(1, 8)
    if rng.random() < 0.4:
        sinks = [rng.uniform(-4.0, 6.0) for _ in range(shape.num_kv_heads * group)]
        rule = dataclasses.replace(rule, sinks=torch.tensor(sinks).to(DEVICE))
    sequences = [lengths() for _ in range(rng.randint(1, 4))] + [(rng.randrange(longest), 1)]
    if kind == "prefill":
        sequences[-1] = (0, longest // 2)
    return Problem(shape, group, tuple(ALLOWED)[seed % 3], tuple(sequences), rule, seed)


@dataclass
class Inputs:
    """Packed tensors of one step: `old` and `new` are (keys, values) per packed token, PADDING tokens behind the new ones."""

    query: torch.Tensor
    old: tuple[torch.Tensor, torch.Tensor]
    new: tuple[torch.Tensor, torch.Tensor]
    old_slots: torch.Tensor
    batch: AttentionBatch
    stale_blocks: torch.Tensor
    num_blocks: int


def make_inputs(problem: Problem) -> Inputs:
    """The same contents for every backend; blocks in random order."""
    rng = torch.Generator().manual_seed(problem.seed)
    shape, size = problem.shape, problem.shape.block_size
    width = max(-(-(old + new) // size) for old, new in problem.sequences) + 1
    count = len(problem.sequences)
    order = torch.randperm(count * width + 3, generator=rng)
    tables = order[: count * width].view(count, width)

    def slots(row: int, begin: int, end: int) -> torch.Tensor:
        places = torch.arange(begin, end)
        return tables[row, places // size] * size + places % size

    def contents(tokens: int, heads: int) -> torch.Tensor:
        return torch.randn(tokens, heads, shape.head_dim, generator=rng).to(problem.dtype).to(DEVICE)

    news = [new for _, new in problem.sequences]
    num_old, num_new = sum(old for old, _ in problem.sequences), sum(news) + PADDING
    positions = torch.cat([torch.arange(old, old + new) for old, new in problem.sequences] + [torch.zeros(PADDING)])
    rows = torch.cat([torch.arange(count).repeat_interleave(torch.tensor(news)), torch.zeros(PADDING)])
    new_slots = [slots(i, old, old + new) for i, (old, new) in enumerate(problem.sequences)]
    batch = AttentionBatch(
        sequences=rows.int().to(DEVICE),
        positions=positions.int().to(DEVICE),
        slots=torch.cat([*new_slots, torch.full((PADDING,), PADDING_SLOT)]).to(DEVICE),
        block_tables=tables.int().to(DEVICE),
        offsets=np.cumsum([0, *news], dtype=np.int32),
        lengths=np.array([old + new for old, new in problem.sequences], np.int32),
    )
    firsts = problem.rule.first_keys(torch.tensor([old for old, _ in problem.sequences])).tolist()
    stale = [tables[i, : first // size] for i, first in enumerate(firsts)]
    heads = shape.num_kv_heads
    return Inputs(
        contents(num_new, heads * problem.group),
        (contents(num_old, heads), contents(num_old, heads)),
        (contents(num_new, heads), contents(num_new, heads)),
        torch.cat([slots(i, 0, old) for i, (old, _) in enumerate(problem.sequences)]).to(DEVICE),
        batch,
        torch.cat(stale).to(DEVICE),
        len(order),
    )


def attend(backend: KernelBackend, problem: Problem) -> torch.Tensor:
    """float32 [new tokens, heads, dim]. Blocks that were never written, or left a window or chunk, hold NaN; padding gives zero."""
    given, cache_dtype = make_inputs(problem), problem.cache_dtype or problem.dtype
    cache = full_of_nan((2, given.num_blocks, problem.shape.block_elements(cache_dtype)), cache_dtype).to(DEVICE)
    nothing = cache[:, :1].clone()
    for (key, value), slots in ((given.old, given.old_slots), (given.new, given.batch.slots)):
        written = written_dtype(cache_dtype)
        backend.write_kv(key.to(written), value.to(written), cache, slots, problem.shape)
    cache[:, given.stale_blocks] = nothing
    out = backend.paged_attention(given.query, cache, given.batch, problem.shape, problem.rule).float().cpu()
    assert not out[-PADDING:].any(), "padding attends to nothing"
    return out[:-PADDING]


def distance(found: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype) -> float:
    """Largest difference as a multiple of what is allowed; NaN where one is NaN."""
    absolute, relative = ALLOWED[dtype]
    return float(((found - expected).abs() / (absolute + relative * expected.abs())).max())


def narrowed(problem: Problem, **changes: object) -> Problem:
    """The same with other fields."""
    return dataclasses.replace(problem, **changes)
