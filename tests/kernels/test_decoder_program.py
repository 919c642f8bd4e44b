"""Each operator of a program alone against plain torch, and whole layers: by token or in one piece, in any company."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch

from paged_kernels.backend import SCALED_MOST, AttentionRule, CacheShape, written_dtype
from paged_kernels.decoder import DecodeRows
from paged_kernels.program import (
    Attend,
    Choose,
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
from tests.kernels.in_torch import ACTIVATIONS, EPS, in_torch, normed, turned
from tests.kernels.programs import Bench, Cache, moves, packed, random

DTYPES = [torch.float32, torch.bfloat16]
ROUNDED = [(dtype, kept) for kept in SCALED_MOST for dtype in DTYPES]
# Of rows, and of the cache.
CACHES = [*((d, d) for d in DTYPES), (torch.float32, torch.bfloat16), (torch.float32, torch.float16), *ROUNDED]
# Of a value that was rounded a few times on its way.
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 2.0**-6}
# Of bfloat16 results, that must be what torch gives to the last bit: the others were rounded at a tie of another sum.
EQUAL_SHARE = 0.97
STREAM, NORMED, HEADS, ATTENDED, GATED = tuple(Rows)[:5]


def close(found, expected, tolerance=None):
    tolerance = tolerance or TOLERANCE[found.dtype]
    torch.testing.assert_close(found.float(), expected.float(), rtol=tolerance, atol=tolerance)
    if found.dtype == torch.bfloat16:
        assert (found == expected).float().mean() >= EQUAL_SHARE


# --- rows by themselves ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("one_plus", [False, True])
@pytest.mark.parametrize("width", [2, 16, 90, 576])
def test_norm(compiled, dtype, one_plus, width):
    """Both forms, in place and added to what is there; large and small rows; a row of NaN stays alone."""
    bench = Bench(compiled, {STREAM: width, NORMED: width}, dtype=dtype)
    stream, weight = random(11, width, dtype=dtype) * 3, random(width, dtype=dtype, seed=1)
    stream[4] *= 1e-3
    stream[7, 1] = float("nan")
    there = [i for i in range(11) if i != 7]
    expected = normed(stream, weight, one_plus=one_plus)
    found = bench.run([Norm(STREAM, STREAM, weight, EPS, one_plus)], stream)
    close(found[there], expected[there])
    assert found[7].isnan().all()
    adding = [bench.moved(STREAM, NORMED), Norm(NORMED, STREAM, weight, EPS, one_plus, adds=True)]
    stream[7] = 0
    expected = stream + normed(stream, weight, one_plus=one_plus)
    close(bench.run(adding, stream), expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("width", "inner"), [(18, 34), (96, 160)])
def test_linear_adds(compiled, dtype, width, inner):
    """The product is rounded, then the sum; a bias is in the product."""
    bench = Bench(compiled, {STREAM: width, NORMED: width, GATED: inner}, dtype=dtype)
    stream, kernels = random(19, width, dtype=dtype), compiled.decoder
    up, down = random(inner, width, dtype=dtype, seed=1), random(width, inner, dtype=dtype, seed=2) / inner
    bias = random(width, dtype=dtype, seed=3)
    first = kernels.linear(stream, kernels.pack(up, None))
    second = kernels.linear(first, kernels.pack(down, bias))
    for adds in (False, True):
        operators = [
            Linear(STREAM, GATED, kernels.pack(up, None)),
            Linear(GATED, STREAM, kernels.pack(down, bias), adds),
        ]
        assert torch.equal(bench.run(operators, stream), stream + second if adds else second)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("biased", [False, True])
def test_gated(compiled, dtype, activation, biased):
    """Both activations over a wide range, with and without biases; columns that fill no panel."""
    width, inner, kernels = 24, 42, compiled.decoder
    bench = Bench(compiled, {STREAM: width, GATED: inner}, dtype=dtype)
    stream = random(21, width, dtype=dtype) * torch.linspace(0.01, 30, 21)[:, None].to(dtype)
    weights = [random(inner, width, dtype=dtype, seed=seed) for seed in (1, 2)]
    biases = [random(inner, dtype=dtype, seed=seed) if biased else None for seed in (3, 4)]
    gate, up = (kernels.pack(w, b) for w, b in zip(weights, biases, strict=True))
    back = kernels.pack(torch.eye(width, inner, dtype=dtype), None)
    found = bench.run([Gated(STREAM, GATED, gate, up, activation), Linear(GATED, STREAM, back)], stream)
    gates, ups = kernels.linear(stream, gate), kernels.linear(stream, up)
    expected = (ACTIVATIONS[activation](gates.float()).to(dtype) * ups)[:, :width]
    # Far below zero 1 + tanh cancels out, in torch as here.
    allowed = TOLERANCE[dtype] * expected.abs().float() + 2.0**-22 * (gates * ups).abs().float()[:, :width]
    assert ((found.float() - expected.float()).abs() <= allowed).all()
    assert (found == expected).float().mean() >= (EQUAL_SHARE if dtype == torch.bfloat16 else 0)


def test_extreme_gates(compiled):
    """Gates far from zero neither overflow nor make NaN; NaN stays NaN."""
    bench = Bench(compiled, {STREAM: 16, GATED: 16})
    gates = [-1e30, -1e4, -104.0, -87.5, -20.0, -1e-30, 0.0, 1e-30, 20.0, 88.0, 89.0, 1e4, 1e30, float("nan")]
    stream, kernels = torch.zeros(len(gates), 16), compiled.decoder
    stream[:, 0] = torch.tensor(gates)
    one, ones = moves(kernels, 16, 16, torch.float32), kernels.pack(torch.zeros(16, 16), torch.ones(16))
    for name, function in ACTIVATIONS.items():
        found = bench.run([Gated(STREAM, GATED, one, ones, name), Linear(GATED, STREAM, one)], stream)
        close(found[:-1], function(stream[:-1]))
        assert found[-1].isnan().all()


# --- positions and the cache -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtypes", CACHES)
@pytest.mark.parametrize("rotary", [None, 40, 16, 6])
@pytest.mark.parametrize("one_plus", [None, False, True])
def test_place(compiled, dtypes, rotary, one_plus):
    """Queries and keys normed and turned, keys and values in their slots in the cache's type; padding and all else untouched."""
    dtype, cache_dtype = dtypes
    heads, kv_heads, dim, size = 6, 2, 40, 5
    width, spans = (heads + 2 * kv_heads) * dim, [(1, 3, 9), (0, 0, 7), (2, 30, 31)]
    bench = Bench(compiled, {STREAM: width, HEADS: width}, heads, dtype)
    cache = Cache(CacheShape(size, kv_heads, dim), 3, 40, cache_dtype)
    batch, stream = cache.batch(spans, padding=3), random(17, width, dtype=dtype)
    angles = None if rotary is None else tuple(random(50, rotary, dtype=dtype, seed=seed) for seed in (5, 6))
    weights = [random(dim, dtype=dtype, seed=seed) for seed in (1, 2)]
    norm = None if one_plus is None else HeadNorm(*weights, EPS, one_plus)
    place = RotateAndStore(1, *(angles or (None, None)), norm)
    found = bench.run([bench.moved(STREAM, HEADS), place, bench.moved(HEADS, STREAM)], stream, cache, batch)
    assert torch.equal(found[14:], stream[14:]), "padding is not turned"
    given = stream[:14].view(14, -1, dim)
    expected = [given[:, :heads], given[:, heads : heads + kv_heads]]
    if norm is not None:
        expected = [normed(x, w, one_plus=one_plus) for x, w in zip(expected, weights, strict=True)]
    queries, keys = (turned(x, batch.positions[:14], angles) for x in expected)
    values = given[:, heads + kv_heads :]
    close(found[:14], torch.cat([queries, keys, values], 1).view(14, -1), tolerance=4 * TOLERANCE[dtype])
    other = Cache(cache.shape, 3, 40, cache_dtype)
    made = found[:14].view(14, -1, dim)[:, heads : heads + kv_heads]
    written = [x.to(written_dtype(cache_dtype)) for x in (made, values)]
    compiled.write_kv(*written, other.pool[1], batch.slots[:14], other.shape)
    torch.testing.assert_close(cache.pool, other.pool, rtol=0, atol=0, equal_nan=True)


# --- attention -------------------------------------------------------------------------------------------------------

RULES = [AttentionRule(0.2), AttentionRule(0.3, 7), AttentionRule(0.25, 33, 5.0), AttentionRule(1.0, None, 2.0)]


def filled(compiled, cache, lengths, layer):
    """Random keys and values of so many tokens of each sequence, in `layer`."""
    for row, length in enumerate(lengths):
        kv = [
            random(
                length,
                cache.shape.num_kv_heads,
                cache.shape.head_dim,
                dtype=written_dtype(cache.dtype),
                seed=10 * row + i,
            )
            for i in (0, 1)
        ]
        compiled.write_kv(*kv, cache.pool[layer], cache.slots(row, 0, length), cache.shape)


@pytest.mark.parametrize("dtypes", CACHES)
@pytest.mark.parametrize(("heads", "kv_heads", "dim", "block_size"), [(4, 4, 16, 16), (9, 3, 64, 8), (7, 1, 80, 3)])
def test_attend(compiled, dtypes, heads, kv_heads, dim, block_size):
    """Bitwise what the attention kernel makes of the same queries, whose result is compared with the reference elsewhere: prompts,
    chunks, decoding and padding beside each other, NaN in free blocks."""
    dtype, cache_dtype = dtypes
    width, attended = (heads + 2 * kv_heads) * dim, heads * dim
    bench = Bench(compiled, {STREAM: width, HEADS: width, ATTENDED: attended}, heads, dtype)
    cache = Cache(CacheShape(block_size, kv_heads, dim), 4, 90, cache_dtype)
    spans = [(2, 0, 21), (0, 70, 90), (3, 50, 51), (1, 4, 8)]
    filled(compiled, cache, [90, 8, 21, 51], layer=1)
    batch, stream = cache.batch(spans, padding=2), random(48, width, dtype=dtype, seed=3)
    sinks = torch.linspace(-2.0, 4.0, heads)
    for rule in (*RULES, AttentionRule(0.3, None, None, sinks), AttentionRule(0.3, chunk=7)):
        found = bench.run(
            [bench.moved(STREAM, HEADS), Attend(1, rule), bench.moved(ATTENDED, STREAM)], stream, cache, batch
        )
        queries = stream[:, :attended].reshape(48, heads, dim)
        expected = compiled.paged_attention(queries, cache.pool[1], batch, cache.shape, rule)
        assert torch.isfinite(expected).all()
        assert torch.equal(found[:, :attended], expected.view(48, attended))
        assert not found[46:].any()


# --- whole layers ----------------------------------------------------------------------------------------------------


def layers_of(compiled, shape, heads, dtype, rule, *, width=48, num_layers=2, bits=0):
    """Operators of a small decoder with random weights, and the widths of its rows."""
    kernels, (_, dim, kv_heads) = compiled.decoder, (0, shape.head_dim, shape.num_kv_heads)
    widths = {STREAM: width, NORMED: width, HEADS: (heads + 2 * kv_heads) * dim, ATTENDED: heads * dim, GATED: 72}
    seeds = itertools.count(100)

    def weights(columns, depth):
        return packed(kernels, random(columns, depth, dtype=dtype, seed=next(seeds)) / depth**0.5, None, bits)

    def norm(source, target, *, adds=False):
        return Norm(source, target, 1 + random(width, dtype=dtype, seed=next(seeds)) / 8, EPS, adds=adds)

    angle = torch.arange(200)[:, None] / 10 ** torch.linspace(0, 3, dim // 2).repeat(2)
    operators: list[Operator] = []
    for layer in range(num_layers):
        operators += [
            norm(STREAM, NORMED),
            Linear(NORMED, HEADS, weights(widths[HEADS], width)),
            RotateAndStore(layer, angle.cos().to(dtype), angle.sin().to(dtype)),
            Attend(layer, rule),
            Linear(ATTENDED, STREAM, weights(width, heads * dim), adds=True),
            norm(STREAM, NORMED),
            Gated(NORMED, GATED, weights(72, width), weights(72, width), "silu"),
            Linear(GATED, NORMED, weights(width, 72)),
            norm(NORMED, STREAM, adds=True),
        ]
    return [*operators, norm(STREAM, STREAM)], widths


def lives(prepared, cache, streams, chunks, padding=0):
    """Results of every sequence, of whose tokens each step takes `chunks[row]`."""
    results, done = [[] for _ in streams], [0] * len(streams)
    while any(n < len(stream) for n, stream in zip(done, streams, strict=True)):
        ends = [min(n + chunk, len(s)) for n, chunk, s in zip(done, chunks, streams, strict=True)]
        spans = [(row, n, end) for row, (n, end) in enumerate(zip(done, ends, strict=True)) if n < end]
        rows = torch.cat([*(streams[row][n:end] for row, n, end in spans), random(padding, 48).to(streams[0].dtype)])
        prepared.run(rows, [cache.batch(spans, padding)], cache.pool)
        for (row, _, _), part in zip(spans, rows.split([*(e - n for _, n, e in spans), padding]), strict=False):
            results[row].append(part)
        done = ends
    return [torch.cat(parts) for parts in results]


def check_lives(compiled, heads, kv_heads, dim, block_size, dtype, threads, cache_dtype=None):
    """Bitwise the same in one piece, token by token, in chunks beside padding, alone, and with other threads."""
    reach = {"sliding_window": 29} if kv_heads > 1 else {"chunk": 13}
    shape, rule = CacheShape(block_size, kv_heads, dim), AttentionRule(dim**-0.5, **reach)
    operators, widths = layers_of(compiled, shape, heads, dtype, rule)
    cache_dtype = cache_dtype or dtype
    prepared = compiled.decoder.prepare(Program(operators, widths, heads, shape, dtype), cache_dtype)
    streams = [random(n, 48, dtype=dtype, seed=n) for n in (37, 14, 1)]

    def lived(chunks, seed, streams=streams, padding=0):
        return lives(prepared, Cache(shape, 3, 40, cache_dtype, seed=seed), streams, chunks, padding)

    expected = lived((40, 40, 40), 0)
    for one in expected:
        assert torch.isfinite(one).all()
        assert len(one.unique(dim=0)) == len(one)
    others = [lived((1, 1, 1), 1), lived((7, 5, 1), 2, padding=3)]
    with threads(1):
        others.append(lived((13, 40, 40), 3))
    with threads(3):
        # In the second step the tokens of two sequences stand at 1, 2 and 3.
        others.append(lived((1, 2, 40), 4))
    for other in others:
        assert all(torch.equal(a, b) for a, b in zip(expected, other, strict=True))
    assert torch.equal(lived((6,), 5, streams[:1])[0], expected[0])


GROUPS = [1, 2, 3, 4, 7, 8, 9, 12]
DIMS = [16, 64, 80, 96, 128]
SIZES = [1, 8, 16, 32, 5, 20, 48]
SAMPLE = [
    (2, 2, 16, 16), (2, 1, 64, 8), (9, 3, 64, 32), (4, 1, 80, 5), (14, 2, 96, 16), (8, 1, 128, 1), (9, 1, 16, 20),
    (12, 1, 64, 48),
]  # fmt: skip


@pytest.mark.parametrize("dtypes", [*((d, d) for d in DTYPES), *ROUNDED])
@pytest.mark.parametrize(("heads", "kv_heads", "dim", "block_size"), SAMPLE)
def test_bits_do_not_depend_on_how_a_prompt_came(compiled, threads, heads, kv_heads, dim, block_size, dtypes):
    """Tiles of several tokens, single tokens, blocks in any order: the same bits through two layers. A sample."""
    check_lives(compiled, heads, kv_heads, dim, block_size, dtypes[0], threads, dtypes[1])


@pytest.mark.long
@pytest.mark.parametrize("library", ["native"], indirect=True)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("dim", DIMS)
def test_bits_of_all_shapes(compiled, threads, group, dim, dtype):
    """The same for every group of heads and head size, each with three block sizes."""
    first = GROUPS.index(group) + DIMS.index(dim)
    for i in range(3):
        kv_heads = 1 + i % 2
        size = SIZES[(first + 2 * i) % len(SIZES)]
        check_lives(compiled, group * kv_heads, kv_heads, dim, size, dtype, threads)


@pytest.mark.parametrize("dtype", DTYPES)
def test_layers_equal_torch(compiled, dtype):
    """A whole program is what its operators are one by one in plain torch, over the attention kernel."""
    heads, shape, rule = 6, CacheShape(16, 2, 32), AttentionRule(32**-0.5)
    operators, widths = layers_of(compiled, shape, heads, dtype, rule)
    cache, other = Cache(shape, 2, 40, dtype), Cache(shape, 2, 40, dtype)
    batch, stream = cache.batch([(0, 0, 33), (1, 0, 9)]), random(42, 48, dtype=dtype)
    found = Bench(compiled, widths, heads, dtype).run(operators, stream, cache, batch)
    expected = in_torch(compiled.decoder, compiled, operators, stream, heads, other, batch)
    tolerance = 2e-5 if dtype == torch.float32 else 0.1
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


def test_room_grows_and_stays(compiled, threads):
    """A program that ran a small step runs a large one and a small one again; steps of nothing but padding write nothing."""
    shape = CacheShape(16, 1, 16)
    operators, widths = layers_of(compiled, shape, 4, torch.float32, AttentionRule(0.25))
    prepared = compiled.decoder.prepare(Program(operators, widths, 4, shape, torch.float32), torch.float32)
    cache = Cache(shape, 1, 200)
    stream = random(200, 48)
    parts = [stream[:2].clone(), stream[2:180].clone(), stream[180:].clone()]
    for part, span in zip(parts, [(0, 0, 2), (0, 2, 180), (0, 180, 200)], strict=True):
        prepared.run(part, [cache.batch([span])], cache.pool)
    whole = stream.clone()
    prepared.run(whole, [cache.batch([(0, 0, 200)])], Cache(shape, 1, 200).pool)
    assert torch.equal(torch.cat(parts), whole)
    untouched = Cache(shape, 1, 200)
    prepared.run(stream[:3].clone(), [replace(untouched.batch([], padding=3))], untouched.pool)
    assert untouched.pool.isnan().all()


@pytest.mark.parametrize("dtypes", [*((d, d) for d in DTYPES), (torch.float32, torch.bfloat16), *ROUNDED])
@pytest.mark.parametrize("bits", [0, 8, 4, "fp8"])
def test_decode_program(compiled, dtypes, bits, threads):
    """From ids to ids, step by step: bitwise the lookup, the program, the product and the choice; a row of NaN is told."""
    (dtype, cache_dtype), shape, kernels = dtypes, CacheShape(4, 1, 16), compiled.decoder
    operators, widths = layers_of(compiled, shape, 4, dtype, AttentionRule(0.25), bits=bits)
    table, vocab = random(70, widths[STREAM], dtype=dtype, seed=8), 70
    head = packed(kernels, random(vocab, widths[STREAM], dtype=dtype, seed=9), None, bits)
    whole = Program([Embed(table, 0.5), *operators, Head(head), Choose(vocab)], widths, 4, shape, dtype)
    alone = kernels.prepare(Program(operators, widths, 4, shape, dtype), cache_dtype)
    cache, other = (Cache(shape, 5, 20, cache_dtype) for _ in range(2))
    ids, lengths = np.array([3, 60, 7], np.int32), [0, 5, 2]
    for places in (cache, other):
        filled(compiled, places, [0, 5, 0, 0, 2], layer=0)
        filled(compiled, places, [0, 5, 0, 0, 2], layer=1)
    rows = DecodeRows(ids, np.array(lengths, np.int32), np.array([2, 1, 4], np.int32), cache.tables.numpy()[None])
    with threads(2):
        run = kernels.prepare_decode(whole, cache_dtype).begin(rows, cache.pool)
        for step in range(9):
            stream = table[torch.from_numpy(ids).long()] * 0.5
            batch = other.batch([(row, n + step, n + step + 1) for row, n in zip((2, 1, 4), lengths, strict=True)])
            alone.run(stream, [batch], other.pool)
            logits = kernels.linear(stream, head, wide=True)
            assert run.step()
            assert torch.equal(run.logits, logits)
            assert ids.tolist() == logits.argmax(-1).tolist()
            assert rows.positions.tolist() == [n + step + 1 for n in lengths]
        torch.testing.assert_close(cache.pool, other.pool, rtol=0, atol=0, equal_nan=True)
        table[int(ids[1])] = float("nan")
        assert not run.step()
    assert run.finite.tolist() == [True, False, True]


def test_layers_of_two_cache_groups_share_a_pool(compiled, threads):
    """R18: each layer writes to and reads from the blocks of its group's tables alone, whole programs and decode programs alike;
    every other block of the pool stays NaN. Bitwise as with a pool entry for each layer."""
    shape, kernels, dtype = CacheShape(4, 1, 16), compiled.decoder, torch.float32
    operators, widths = layers_of(compiled, shape, 4, dtype, AttentionRule(0.25))
    shared = [replace(op, layer=0, group=op.layer) if hasattr(op, "layer") else op for op in operators]
    assert {op.group for op in shared if hasattr(op, "group")} == {0, 1}
    table, vocab = random(70, widths[STREAM], seed=8), 70
    head = kernels.pack(random(vocab, widths[STREAM], seed=9), None)
    plain = Cache(shape, 3, 24, dtype)
    joint = Cache(shape, 6, 24, dtype, num_layers=1)  # rows 3 to 5 are the sequences' tables in the second group
    groups = [joint.tables[:3].contiguous(), joint.tables[3:].contiguous()]

    def of_groups(spans, padding=0):
        one, both = plain.batch(spans, padding), joint.batch([(row + 3, *span) for row, *span in spans], padding)
        first = joint.batch(spans, padding)
        return [replace(one, slots=each.slots, block_tables=t) for each, t in zip((first, both), groups, strict=True)]

    with threads(2):
        programs = [kernels.prepare(Program(ops, widths, 4, shape, dtype), dtype) for ops in (operators, shared)]
        for spans, padding in (([(0, 0, 9), (2, 0, 5)], 2), ([(2, 5, 6), (0, 9, 14), (1, 0, 1)], 0)):
            stream = random(sum(end - begin for _, begin, end in spans) + padding, widths[STREAM], seed=3)
            other = stream.clone()
            programs[0].run(stream, [plain.batch(spans, padding)], plain.pool)
            programs[1].run(other, of_groups(spans, padding), joint.pool)
            assert torch.equal(stream, other)
        runs = []
        for ops, cache, tables in ((operators, plain, plain.tables[None]), (shared, joint, torch.stack(groups))):
            whole = Program([Embed(table, 0.5), *ops, Head(head), Choose(vocab)], widths, 4, shape, dtype)
            columns = np.array([3, 60, 7], np.int32), np.array([14, 1, 6], np.int32), np.arange(3, dtype=np.int32)
            runs.append(kernels.prepare_decode(whole, dtype).begin(DecodeRows(*columns, tables.numpy()), cache.pool))
        for _ in range(5):
            assert runs[0].step()
            assert runs[1].step()
            assert torch.equal(runs[0].logits, runs[1].logits)
    free = sorted(set(range(joint.pool.shape[2])) - set(joint.tables.unique().tolist()))
    assert joint.pool[:, :, free].isnan().all()


def test_what_runs(compiled):
    """Types of rows and caches that there are programs for."""
    runs = compiled.decoder.runs
    assert runs(torch.float32, torch.float16)
    assert runs(torch.bfloat16, torch.bfloat16)
    assert runs(torch.bfloat16, torch.int8)
    assert runs(torch.float32, torch.float8_e4m3fn)
    assert not runs(torch.float16, torch.float16)
    assert not runs(torch.float16, torch.int8)
    assert not runs(torch.bfloat16, torch.float32)
