"""Whole decoders in Triton: what each program computes is what its operators compute in plain torch."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch

from paged_kernels.backend import AttentionBatch, AttentionRule, CacheShape
from paged_kernels.decoder import KeptRows
from paged_kernels.gpu.backend import make
from paged_kernels.program import (
    Attend,
    Embed,
    Gated,
    Head,
    HeadNorm,
    Linear,
    Norm,
    Operator,
    Program,
    RotateAndStore,
    Rows,
)
from paged_kernels.reference import ReferenceBackend
from tests.kernels.in_torch import EPS, in_torch
from tests.kernels.programs import Cache, Spans
from tests.kernels.triton.cases import DEVICE
from worker_svc.model.fused.packed_linear import part

QUICK, WHOLE = 3, 50
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
ALLOWED = {torch.float32: 1e-4, torch.bfloat16: 6e-2, torch.float16: 8e-3}
"""Of a row, relative to its norm."""
STEPS = {torch.int8: 0.02, torch.float8_e4m3fn: 0.1}
"""More of it, where keys and values that lie on the border between two numbers become either."""
STREAM, NORMED, HEADS, ATTENDED, GATED = tuple(Rows)[:5]


@dataclass
class Case:
    """A random decoder with what it needs, on the host."""

    operators: list[Operator]
    widths: dict[Rows, int]
    num_heads: int
    shape: CacheShape
    dtype: torch.dtype
    table: torch.Tensor
    head: torch.Tensor


def tensors(rng: torch.Generator, dtype: torch.dtype):
    def made(*sizes: int, scale: float = 1.0) -> torch.Tensor:
        return (torch.randn(sizes, generator=rng) * scale).to(dtype)

    return made


def random_case(seed: int, kernels) -> Case:
    """Layers of one kind: with and without biases, head norms, rotation of all or a part, windows, chunks, norms behind parts."""
    draw, dtype = random.Random(seed), DTYPES[seed % 3]
    made = tensors(torch.Generator().manual_seed(seed), dtype)
    kv_heads, group, dim = draw.randint(1, 3), draw.choice([1, 2, 4, 5]), draw.choice([32, 64, 80, 128])
    heads, width, inner, most = kv_heads * group, draw.choice([48, 96, 100]), draw.choice([32, 80]), 120
    widths = {STREAM: width, NORMED: width, HEADS: (heads + 2 * kv_heads) * dim, ATTENDED: heads * dim, GATED: inner}
    biased, one_plus = draw.random() < 0.5, draw.random() < 0.5
    rotated = draw.choice([None, dim, dim // 2])
    has_norms, after = draw.random() < 0.5, draw.random() < 0.5
    reach = draw.choice([{}, {"sliding_window": 9}, {"chunk": 9}])
    rule = AttentionRule(dim**-0.5, softcap=draw.choice([None, 20.0]), **reach)
    activation = draw.choice(["silu", "gelu_tanh"])

    def weights(columns: int, depth: int):
        return kernels.pack(made(columns, depth, scale=depth**-0.5), made(columns) if biased else None)

    def norm(source: Rows, target: Rows, *, adds: bool = False) -> Norm:
        return Norm(source, target, made(width), EPS, one_plus, adds)

    def joining(source: Rows) -> list[Operator]:
        whole = weights(width, widths[source])
        if not after:
            return [Linear(source, STREAM, whole, adds=True)]
        return [Linear(source, NORMED, whole), norm(NORMED, STREAM, adds=True)]

    operators: list[Operator] = []
    for layer in range(1 + seed % 2):
        angle = torch.rand(most, rotated or 2, generator=torch.Generator().manual_seed(seed + layer)) * 6
        angles = (None, None) if rotated is None else (angle.cos().to(dtype), angle.sin().to(dtype))
        gates = weights(2 * inner, width)
        pair = (part(gates, 0, inner), part(gates, inner, inner)) if draw.random() < 0.7 else None
        operators += [
            norm(STREAM, NORMED),
            Linear(NORMED, HEADS, weights(widths[HEADS], width)),
            RotateAndStore(layer, *angles, HeadNorm(made(dim), made(dim), EPS, one_plus) if has_norms else None),
            Attend(layer, rule),
            *joining(ATTENDED),
            norm(STREAM, NORMED),
            Gated(NORMED, GATED, *(pair or (weights(inner, width), weights(inner, width))), activation),
            *joining(GATED),
        ]
    operators.append(norm(STREAM, STREAM))
    shape = CacheShape(draw.choice([16, 32]), kv_heads, dim)
    vocab = draw.choice([50, 130])
    return Case(operators, widths, heads, shape, dtype, made(vocab, width), made(vocab, width))


def on_device(value):
    """The same operator, batch or weights with its tensors on the device."""
    if isinstance(value, torch.Tensor):
        return value.to(DEVICE)
    if isinstance(value, AttentionBatch):
        return value.to(DEVICE)
    if hasattr(value, "__dataclass_fields__"):
        return type(value)(**{name: on_device(getattr(value, name)) for name in value.__dataclass_fields__})
    return value


def near(found: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype) -> float:
    """The largest deviation of a row, as a multiple of what is allowed."""
    off = (found.cpu().float() - expected.float()).norm(dim=-1) / expected.float().norm(dim=-1)
    return float(off.max()) / ALLOWED[dtype]


def check_programs(seeds: Sequence[int], record, cache_dtype: torch.dtype | None = None) -> None:
    backend = make()
    for seed in seeds:
        case = random_case(seed, backend.decoder)
        program = Program([on_device(op) for op in case.operators], case.widths, case.num_heads, case.shape, case.dtype)
        prepared = backend.decoder.prepare(program, cache_dtype or case.dtype)
        sizes = (case.shape, 3, 100, cache_dtype or case.dtype)
        cache, other = Cache(*sizes), Cache(*sizes)
        pool = cache.pool.to(DEVICE)
        steps: list[tuple[Spans, int]] = [
            ([(0, 0, 33), (1, 0, 5)], 2),
            ([(1, 5, 6), (2, 0, 17), (0, 33, 34)], 0),
            ([(0, 34, 35), (2, 17, 18), (1, 6, 7)], 0),
        ]
        for i, (spans, padding) in enumerate(steps):
            batch = cache.batch(spans, padding)
            stream = tensors(torch.Generator().manual_seed(97 * seed + i), case.dtype)(
                len(batch.slots), case.table.shape[1]
            )
            expected = in_torch(
                backend.decoder, ReferenceBackend(), case.operators, stream, case.num_heads, other, batch
            )
            rows = stream.to(DEVICE)
            prepared.run(rows, [on_device(batch)], pool)
            count = int(batch.offsets[-1])
            off = ALLOWED[case.dtype] * near(rows[:count], expected[:count], case.dtype)
            assert off < ALLOWED[case.dtype] + STEPS.get(cache_dtype, 0), (seed, i)
    record("size", f"triton decoders: {len(seeds)} random ones of {WHOLE}")


def test_programs(record_property):
    """R18: chunks, mixed steps and decode steps, padding among them; a sample."""
    check_programs(range(QUICK), record_property)


@pytest.mark.long
@pytest.mark.parametrize("cache_dtype", [torch.int8, torch.float8_e4m3fn], ids=str)
def test_programs_over_numbers_with_scales(cache_dtype, record_property):
    """R18: rotation writes numbers with scales, attention reads them."""
    check_programs(range(QUICK), record_property, cache_dtype)


@pytest.mark.long
def test_many_programs(record_property):
    """R18: the same for all."""
    check_programs(range(WHOLE), record_property)


def check_fixed_steps(seeds: Sequence[int], record) -> None:
    """Steps of fewer and more rows through the same memory; what padding leaves behind is never read."""
    backend = make()
    for seed in seeds:
        case = random_case(seed, backend.decoder)
        operators = [Embed(case.table, 0.5), *case.operators, Head(backend.decoder.pack(case.head, None))]
        program = Program([on_device(op) for op in operators], case.widths, case.num_heads, case.shape, case.dtype)
        sizes = (case.shape, 4, 100, case.dtype)
        cache, other = Cache(*sizes), Cache(*sizes)
        other.pool[:], pool = 0, cache.pool.to(DEVICE)
        pool[:] = 0
        kept = KeptRows.zeros(len(cache.tables), 3 + cache.tables.shape[1], pool.device)
        kept.block_tables[0, :, : cache.tables.shape[1]] = cache.tables.to(DEVICE)
        steps = backend.decoder.fixed_steps(program, 4, kept, pool)
        assert steps is not None
        for i, rows in enumerate([(0, 1, 2), (3,), (2, 0, 3, 1), (1, 3)]):
            spans = [(row, 20 + i, 21 + i) for row in rows]
            ids = torch.tensor([(7 * row + i) % len(case.table) for row in rows])
            batch = cache.batch(spans)
            stream = in_torch(
                backend.decoder, ReferenceBackend(), case.operators, case.table[ids] * 0.5, case.num_heads, other, batch
            )
            count = 1 if len(rows) == 1 else 4
            for row, token_id in zip(rows, ids.tolist(), strict=True):
                kept.token_ids[row], kept.positions[row] = token_id, 20 + i
            given = steps.columns.packed(
                rows=np.array(rows, np.int32), temperatures=np.full(len(rows), i % 2, np.float32)
            )
            steps.columns.memory.copy_(torch.from_numpy(given).to(DEVICE))
            steps.run(count)
            logits, (tokens, finite) = steps.logits(len(rows)), steps.chosen(len(rows))
            assert near(logits, stream @ case.head.T, case.dtype) < 1, (seed, i)
            assert finite.all()
            assert kept.token_ids[list(rows)].tolist() == tokens.tolist()
            assert kept.positions[list(rows)].tolist() == [21 + i] * len(rows)
            if not i % 2:
                assert tokens.tolist() == logits.argmax(-1).tolist()
    record("size", f"triton fixed decode steps: {len(seeds)} random decoders of {WHOLE}")


def test_fixed_steps(record_property):
    """R18: a sample."""
    check_fixed_steps(range(QUICK), record_property)


@pytest.mark.long
def test_fixed_steps_of_many_programs(record_property):
    """R18: all."""
    check_fixed_steps(range(WHOLE), record_property)


@pytest.mark.long
def test_layers_of_two_cache_groups_share_a_pool():
    """R18: a program and fixed decode steps whose two layers have block tables of their own in one pool entry: bitwise those of
    a pool entry for each layer."""
    backend, seed = make(), 1
    case = random_case(seed, backend.decoder)
    joint = [
        replace(op, layer=0, group=op.layer) if isinstance(op, RotateAndStore | Attend) else op for op in case.operators
    ]
    assert {op.group for op in joint if isinstance(op, Attend)} == {0, 1}
    plain, shared = Cache(case.shape, 3, 40, case.dtype), Cache(case.shape, 6, 40, case.dtype, num_layers=1)
    pools = [plain.pool.to(DEVICE), shared.pool.to(DEVICE)]
    groups = [shared.tables[:3].contiguous(), shared.tables[3:].contiguous()]

    def program(operators: Sequence[Operator]) -> Program:
        return Program([on_device(op) for op in operators], case.widths, case.num_heads, case.shape, case.dtype)

    programs = [backend.decoder.prepare(program(operators), case.dtype) for operators in (case.operators, joint)]
    for spans, padding in (([(0, 0, 33), (1, 0, 5)], 2), ([(1, 5, 6), (2, 0, 17), (0, 33, 34)], 0)):
        batch = plain.batch(spans, padding)
        slots = [shared.batch([(row + 3 * g, *span) for row, *span in spans], padding).slots for g in (0, 1)]
        both = [on_device(replace(batch, slots=s, block_tables=t)) for s, t in zip(slots, groups, strict=True)]
        stream = tensors(torch.Generator().manual_seed(seed), case.dtype)(len(batch.slots), case.table.shape[1])
        rows = [stream.clone().to(DEVICE), stream.clone().to(DEVICE)]
        programs[0].run(rows[0], [on_device(batch)], pools[0])
        programs[1].run(rows[1], both, pools[1])
        assert torch.equal(rows[0], rows[1])
    found = []
    for operators, tables, pool in (
        (case.operators, plain.tables[None], pools[0]),
        (joint, torch.stack(groups), pools[1]),
    ):
        whole = [Embed(case.table, 0.5), *operators, Head(backend.decoder.pack(case.head, None))]
        kept = KeptRows.zeros(3, tables.shape[2] + 1, pool.device, len(tables))
        kept.block_tables[:, :, : tables.shape[2]] = tables.to(DEVICE)
        kept.positions[:] = torch.tensor([34, 6, 17])
        steps = backend.decoder.fixed_steps(program(whole), 4, kept, pool)
        assert steps is not None
        steps.columns.memory.copy_(
            torch.from_numpy(steps.columns.packed(rows=np.array([2, 0, 1], np.int32))).to(DEVICE)
        )
        for _ in range(2):
            steps.run(4)  # one of them is padding
        found.append(steps.logits(3).clone())
    assert found[0].isfinite().all()
    assert torch.equal(found[0], found[1])
