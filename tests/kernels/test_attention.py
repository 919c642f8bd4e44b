"""Every CPU backend against the reference, for prefill, chunks and decode mixed; and what makes them invariant."""

import itertools
from dataclasses import dataclass

import numpy as np
import pytest
import torch

from paged_kernels.backend import (
    PADDING_SLOT,
    SCALED_MOST,
    AttentionBatch,
    AttentionRule,
    CacheShape,
    written_dtype,
)
from paged_kernels.cpu_tiles import TiledCpuBackend
from paged_kernels.reference import ReferenceBackend, loaded, stored
from tests.kernels.programs import full_of_nan
from worker_svc.container import peak_bytes

TOLERANCE = {torch.float32: 3e-6, torch.bfloat16: 0.02, torch.float16: 0.002}
# Of queries, and of the cache.
DTYPES = [*((dtype, dtype) for dtype in TOLERANCE), *((dtype, kept) for kept in SCALED_MOST for dtype in TOLERANCE)]
QUICK_SHAPES = [(4, 4, 16, 16), (9, 3, 64, 32), (4, 2, 24, 5), (6, 2, 41, 16)]
OTHER_SHAPES = [(8, 2, 64, 16), (7, 1, 80, 8), (2, 2, 128, 1), (5, 5, 96, 48)]
SHAPES = [*QUICK_SHAPES, *(pytest.param(*shape, marks=pytest.mark.long) for shape in OTHER_SHAPES)]


@pytest.fixture
def backends(compiled):
    return [compiled, TiledCpuBackend()]


@dataclass
class Case:
    """Sequences of (already cached, new) tokens with random contents; blocks in random order, unused ones full of NaN."""

    sequences: list[tuple[int, int]]
    heads: int
    shape: CacheShape
    dtype: torch.dtype = torch.float32
    cache_dtype: torch.dtype = torch.float32
    seed: int = 0

    def __post_init__(self):
        self.rng = torch.Generator().manual_seed(self.seed)
        self.contents = [self._random(old + new) for old, new in self.sequences]

    def _random(self, tokens):
        kv = (tokens, self.shape.num_kv_heads, self.shape.head_dim)
        query = torch.randn(tokens, self.heads, self.shape.head_dim, generator=self.rng).to(self.dtype)
        return query, *(torch.randn(kv, generator=self.rng).to(self.dtype) for _ in range(2))

    def run(self, backend, rule, *, chunks=None, shuffle=1, padding=0):
        """Results [tokens, heads, dim] of each sequence's new tokens. `chunks`: number of new tokens of each step (None = all)."""
        size = self.shape.block_size
        width = max(-(-(old + new) // size) for old, new in self.sequences)
        order = torch.randperm(len(self.sequences) * width + 3, generator=torch.Generator().manual_seed(shuffle))
        tables = order[: len(self.sequences) * width].view(-1, width).to(torch.int32)
        cache = full_of_nan((2, len(order), self.shape.block_elements(self.cache_dtype)), self.cache_dtype)
        for i, (old, _) in enumerate(self.sequences):
            _, keys, values = self.contents[i]
            backend.write_kv(
                self._written(keys[:old]),
                self._written(values[:old]),
                cache,
                self._slots(tables[i], 0, old),
                self.shape,
            )
        done = [old for old, _ in self.sequences]
        results = [[] for _ in self.sequences]
        while any(d < old + new for d, (old, new) in zip(done, self.sequences, strict=True)):
            ends = [min(d + (chunks or 10**9), sum(s)) for d, s in zip(done, self.sequences, strict=True)]
            for i, part in enumerate(self._step(backend, rule, cache, tables, done, ends, padding)):
                results[i].append(part)
            done = ends
        return [torch.cat(parts) for parts in results]

    def _written(self, x):
        return x.to(written_dtype(self.cache_dtype))

    def _slots(self, table, begin, end):
        places = torch.arange(begin, end)
        size = self.shape.block_size
        return table.long()[places // size] * size + places % size

    def _step(self, backend, rule, cache, tables, begins, ends, padding):
        spans = [range(begin, end) for begin, end in zip(begins, ends, strict=True)]
        counts = [len(span) for span in spans]
        packed = [
            torch.cat([content[k][s.start : s.stop] for content, s in zip(self.contents, spans, strict=True)])
            for k in range(3)
        ]
        packed = [torch.cat([x, torch.randn(padding, *x.shape[1:]).to(x.dtype)]) for x in packed]
        slots = torch.cat([self._slots(t, s.start, s.stop) for t, s in zip(tables, spans, strict=True)])
        pad = torch.zeros(padding, dtype=torch.int32)
        batch = AttentionBatch(
            sequences=torch.cat(
                [torch.arange(len(spans), dtype=torch.int32).repeat_interleave(torch.tensor(counts)), pad]
            ),
            positions=torch.cat([torch.tensor([*itertools.chain(*spans)], dtype=torch.int32), pad]),
            slots=torch.cat([slots, torch.full((padding,), PADDING_SLOT)]),
            block_tables=tables,
            offsets=np.cumsum([0, *counts], dtype=np.int32),
        )
        query, key, value = packed
        backend.write_kv(self._written(key), self._written(value), cache, batch.slots, self.shape)
        out = backend.paged_attention(query, cache, batch, self.shape, rule)
        assert not out[sum(counts) :].any(), "padding attends to nothing"
        return out[: sum(counts)].split(counts)


@pytest.mark.parametrize(("dtype", "cache_dtype"), DTYPES)
@pytest.mark.parametrize(("heads", "kv_heads", "dim", "block_size"), SHAPES)
def test_equals_reference(backends, heads, kv_heads, dim, block_size, dtype, cache_dtype):
    """R18: prefill, chunked prefill and decode in one call; GQA; odd sizes; window, chunk, softcap, sinks; stale NaNs ignored."""
    shape = CacheShape(block_size, kv_heads, dim)
    case = Case([(0, 1), (10, 3), (33, 20), (200, 1), (5, 65)], heads, shape, dtype, cache_dtype)
    # Scales are multiplied with a score and a weight, in the reference with each element.
    tolerance = TOLERANCE[dtype] * (2 if cache_dtype in SCALED_MOST else 1)
    sinks = torch.linspace(-4.0, 6.0, heads)
    for rule in (
        AttentionRule(dim**-0.5),
        AttentionRule(0.2, 7),
        AttentionRule(dim**-0.5, 40, 5.0),
        AttentionRule(0.2, 7, None, sinks),
        AttentionRule(dim**-0.5, None, 5.0, sinks),
        AttentionRule(0.2, chunk=7),
        AttentionRule(dim**-0.5, None, 5.0, sinks, chunk=40),
    ):
        expected = case.run(ReferenceBackend(), rule)
        for backend in backends:
            for one, other in zip(expected, case.run(backend, rule, padding=3), strict=True):
                assert (one.float() - other.float()).abs().max() <= tolerance


@pytest.mark.parametrize(("dtype", "cache_dtype"), [pair for pair in DTYPES if torch.float16 not in pair])
@pytest.mark.parametrize(("heads", "kv_heads", "dim", "block_size"), SHAPES)
@pytest.mark.parametrize("reach", [{"sliding_window": 61}, {"chunk": 37}], ids=str)
def test_bits_do_not_depend_on_batch_chunks_or_blocks(
    backends, heads, kv_heads, dim, block_size, dtype, cache_dtype, reach
):
    """The kernels' part of the invariance contract."""
    rng = np.random.default_rng(block_size)
    sequences = [(int(rng.integers(0, 90)), int(rng.integers(1, 24))) for _ in range(4)]
    shape, rule = CacheShape(block_size, kv_heads, dim), AttentionRule(dim**-0.5, **reach)
    case = Case(sequences, heads, shape, dtype, cache_dtype)
    for backend in backends:
        expected = case.run(backend, rule)
        for other in (
            case.run(backend, rule, chunks=1, shuffle=2),
            case.run(backend, rule, chunks=7, shuffle=3, padding=5),
        ):
            assert all(torch.equal(a, b) for a, b in zip(expected, other, strict=True))
        single = Case(sequences[:1], heads, shape, dtype, cache_dtype)
        assert torch.equal(single.run(backend, rule)[0], expected[0])


@pytest.mark.parametrize("reach", [{"sliding_window": 24}, {"chunk": 24}, {"chunk": 300}, {"chunk": 1}], ids=str)
def test_keys_before_the_first_one_are_never_read(backends, reach):
    """NaN in every block that a window or a chunk has left, for one new token, several, and those that begin a chunk."""
    rule, shape = AttentionRule(0.25, **reach), CacheShape(8, 2, 16)
    for old, new in ((23, 1), (24, 1), (47, 3), (299, 2), (300, 1), (700, 40)):
        case = Case([(old, new)], 4, shape)
        expected = case.run(ReferenceBackend(), rule)[0]
        first = int(rule.first_keys(torch.tensor(old))) // shape.block_size * shape.block_size
        for content in case.contents[0][1:]:
            content[:first] = float("nan")
        for backend in [ReferenceBackend(), *backends]:
            assert (case.run(backend, rule)[0] - expected).abs().max() <= TOLERANCE[torch.float32]


def test_windows_and_chunks_exclude_each_other():
    """A rule has one or the other."""
    with pytest.raises(ValueError, match="exclude each other"):
        AttentionRule(1.0, 24, chunk=24)


def test_thread_count_changes_nothing(backends):
    """The number of threads decides which thread computes, not the result."""
    case = Case([(100, 30), (0, 50)], 8, CacheShape(16, 2, 32))
    before = torch.get_num_threads()
    try:
        for backend in backends:
            results = []
            for threads in (1, 2, 5):
                torch.set_num_threads(threads)
                results.append(torch.cat(case.run(backend, AttentionRule(0.2))))
            assert torch.equal(results[0], results[1])
            assert torch.equal(results[0], results[2])
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("cache_dtype", [torch.float32, *SCALED_MOST])
@pytest.mark.parametrize(("which", "number"), [(1, "nan"), (2, "nan"), (1, "inf"), (2, "-inf")])
def test_nan_stays_in_its_sequence(backends, which, number, cache_dtype):
    """A sequence with a key or a value that is not finite gives what is not finite; its neighbours are untouched."""
    case = Case([(20, 4), (20, 4)], 4, CacheShape(16, 2, 16), cache_dtype=cache_dtype)
    clean = case.run(ReferenceBackend(), AttentionRule(0.25))[1]
    case.contents[0][which][3] = float(number)
    for backend in backends:
        spoiled, other = case.run(backend, AttentionRule(0.25))
        assert not spoiled.isfinite().all()
        assert torch.allclose(other, clean, atol=3e-6)


class Measured:
    """A backend whose attention calls are watched for memory."""

    def __init__(self, backend):
        self.write_kv, self._attention, self.peak_bytes = backend.write_kv, backend.paged_attention, 0

    def paged_attention(self, *args):
        found = []
        self.peak_bytes = peak_bytes(lambda: found.append(self._attention(*args)))
        return found[0]


def test_long_context_is_not_gathered(backends):
    """Decoding over a long context needs memory for a tile, not for the context."""
    tokens, shape = 16_384, CacheShape(16, 4, 64)
    context_bytes = 2 * tokens * 4 * 64 * 4
    case = Case([(tokens - 1, 1)], 4, shape)
    reference = Measured(ReferenceBackend())
    expected = case.run(reference, AttentionRule(0.125))[0]
    assert reference.peak_bytes > context_bytes / 2, "the measurement sees gathering"
    for backend in map(Measured, backends):
        assert (case.run(backend, AttentionRule(0.125))[0] - expected).abs().max() < 1e-6
        assert backend.peak_bytes < context_bytes / 8


@pytest.mark.parametrize("dim", [64, 20])
def test_int8_rounding(backends, dim):
    """Each backend keeps the same integers and scales: off by half a scale at most, ties to even, NaN if not all is finite."""
    heads = rounded_heads(dim)
    heads[5, 1, :5] = torch.tensor([127, 0.5, 1.5, -2.5, 126.5])
    kept = loaded(stored(heads, torch.int8))
    assert kept[5, 1, :5].tolist() == [127, 0, 2, -2, 126]
    scale, usual = scales_of(heads, torch.int8)
    assert (((heads - kept).abs() <= scale * (0.5 + 1e-4)) | ~usual).all()
    check_rounding(backends, heads, kept, torch.int8)


@pytest.mark.parametrize("dim", [64, 20])
def test_fp8_rounding(backends, dim):
    """Each backend keeps the same E4M3 numbers and scales: off by a sixteenth, or by half of the smallest number, at most;
    ties to even, NaN if not all is finite."""
    heads = rounded_heads(dim)
    heads[5, 1, :5] = torch.tensor([448, 17, 19, -(2.0**-10), 3 * 2.0**-10])
    kept = loaded(stored(heads, torch.float8_e4m3fn))
    assert kept[5, 1, :5].tolist() == [448, 16, 20, 0, 2.0**-8]
    scale, usual = scales_of(heads, torch.float8_e4m3fn)
    most = torch.maximum(heads.abs() / 16, scale * 2.0**-10) * (1 + 1e-4)
    assert (((heads - kept).abs() <= most) | ~usual).all()
    check_rounding(backends, heads, kept, torch.float8_e4m3fn)


def rounded_heads(dim):
    """Keys or values of all sizes: with ties, zeros, tiny ones, and some that are not finite."""
    rng = torch.Generator().manual_seed(0)
    heads = torch.randn(400, 2, dim, generator=rng) * 10 ** torch.linspace(-20, 20, 400)[:, None, None]
    heads[10:300] = heads[10:300].bfloat16()  # ties are frequent among them
    heads[3, 0] = 0
    heads[4, 1] = 1e-31
    heads[5, 1] = 0
    heads[6, 0, 7], heads[7, 1, 2], heads[8, 1, dim - 1] = float("inf"), float("nan"), 3e38
    return heads


def scales_of(heads, dtype):
    """Scales of heads, and which are those of numbers within the range of float32."""
    scale = heads.abs().amax(-1, keepdim=True) / SCALED_MOST[dtype]
    return scale, scale.isfinite() & (scale > 1e-32)


def check_rounding(backends, heads, kept, dtype):
    """Every backend stores these heads as `kept`, and gives back just that."""
    assert not kept[3, 0].any() and not kept[4, 1].any()
    assert kept[6, 0].isnan().all() and kept[7, 1].isnan().all() and kept[6, 1].isfinite().all()
    shape = CacheShape(4, 2, heads.shape[2])
    rows, slots, counts = torch.arange(400, dtype=torch.int32), torch.arange(400) * 4, np.arange(401, dtype=np.int32)
    batch = AttentionBatch(rows, torch.zeros_like(rows), slots, rows[:, None], counts)
    for backend in [ReferenceBackend(), *backends]:
        cache = full_of_nan((2, 400, shape.block_elements(dtype)), dtype)
        backend.write_kv(torch.ones_like(heads), heads, cache, slots, shape)
        # Of one key alone the result is its value.
        found = backend.paged_attention(torch.zeros_like(heads), cache, batch, shape, AttentionRule(1.0))
        torch.testing.assert_close(found, kept, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtypes", DTYPES)
@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "block_size"),
    [(9, 3, 64, 16), (4, 2, 24, 5), pytest.param(2, 1, 40, 48, marks=pytest.mark.long)],
)
@pytest.mark.parametrize("reach", [{}, {"sliding_window": 300}, {"chunk": 300}], ids=str)
def test_bits_beside_sequences_that_share_blocks(backends, heads, kv_heads, dim, block_size, dtypes, reach):
    """Rows whose sequences begin with the same blocks, some for longer than others: each as if it were alone."""
    (dtype, cache_dtype), shape = dtypes, CacheShape(block_size, kv_heads, dim)
    rule = AttentionRule(dim**-0.5, **reach)
    keys, rng = [700, 523, 700, 600, 610, 20, 540], torch.Generator().manual_seed(0)
    width = -(-max(keys) // block_size)
    tables = torch.randperm(len(keys) * width, generator=rng).view(-1, width).to(torch.int32)
    for row, shared in ((1, 520), (2, 520), (3, 260), (4, 10), (6, 530)):
        tables[row, : shared // block_size] = tables[0, : shared // block_size]
    cache = torch.zeros(2, len(keys) * width, shape.block_elements(cache_dtype), dtype=cache_dtype)
    contents = torch.randn(2, cache.shape[1] * block_size, kv_heads, dim, generator=rng).to(written_dtype(cache_dtype))
    query = torch.randn(len(keys), heads, dim, generator=rng).to(dtype)
    positions = torch.tensor(keys, dtype=torch.int32) - 1

    def attended(backend, rows):
        places = positions[rows].long()
        slots = tables[rows, places // block_size].long() * block_size + places % block_size
        offsets = np.arange(len(rows) + 1, dtype=np.int32)
        batch = AttentionBatch(torch.tensor(rows, dtype=torch.int32), positions[rows], slots, tables, offsets)
        return backend.paged_attention(query[rows], cache, batch, shape, rule)

    for backend in backends:
        backend.write_kv(*contents, cache, torch.arange(contents.shape[1]), shape)
        together = attended(backend, [*range(len(keys))])
        alone = torch.cat([attended(backend, [row]) for row in range(len(keys))])
        assert torch.isfinite(together).all()
        assert torch.equal(together, alone)
        assert torch.equal(attended(backend, [6, 3, 0])[2], together[0])
