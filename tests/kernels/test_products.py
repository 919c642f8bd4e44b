"""Products with packed weights against float64, and what a row's bits depend on: nothing but the row."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

DTYPES = [torch.float32, torch.bfloat16]
# Half a unit in the last place of a sum, and of what is stored.
SUM_ROUNDING = 2.0**-24
STORED_ROUNDING = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8}


def random(*shape, dtype=torch.float32, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def check(found, rows, weight, bias):
    """Every element is as close to the exact sum as so many roundings allow."""
    exact, size = rows.double() @ weight.double().T, rows.double().abs() @ weight.double().abs().T
    if bias is not None:
        exact, size = exact + bias.double(), size + bias.double().abs()
    allowed = (weight.shape[1] + 2) * SUM_ROUNDING * size
    allowed += STORED_ROUNDING[rows.dtype] * (exact.abs() + allowed)
    assert ((found.double() - exact).abs() <= allowed).all()


@given(
    num_rows=st.one_of(st.integers(1, 24), st.integers(1, 300)),
    columns=st.integers(1, 150),
    depth=st.integers(1, 130),
    dtype=st.sampled_from(DTYPES),
    biased=st.booleans(),
    num_threads=st.integers(1, 3),
    seed=st.integers(0, 2**31),
)
@settings(max_examples=60, deadline=None)
def test_any_shape_equals_float64(compiled, num_rows, columns, depth, dtype, biased, num_threads, seed):
    """Columns that fill no panel, any depth, one row or several blocks of rows; wide results have the same values."""
    kernels = compiled.decoder
    depth += 0 if kernels.packs(dtype, depth) else 1
    weight, rows = random(columns, depth, dtype=dtype, seed=seed), random(num_rows, depth, dtype=dtype, seed=seed + 1)
    bias = random(columns, dtype=dtype, seed=seed + 2) if biased else None
    packed = kernels.pack(weight, bias)
    assert (packed.columns, packed.depth, packed.dtype) == (columns, depth, dtype)
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        found, wide = kernels.linear(rows, packed), kernels.linear(rows, packed, wide=True)
    finally:
        torch.set_num_threads(before)
    assert (found.dtype, wide.dtype) == (dtype, torch.float32)
    assert torch.equal(found.float(), wide)
    check(found, rows, weight, bias)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("columns", "depth"), [(16, 64), (150, 98), (576, 256)])
def test_bits_do_not_depend_on_company(compiled, threads, dtype, columns, depth):
    """Alone, in any number, at any place, twice over and with any number of threads a row has the bits that it has among 300."""
    kernels, rows = compiled.decoder, random(300, depth, dtype=dtype, seed=1)
    packed = kernels.pack(random(columns, depth, dtype=dtype), random(columns, dtype=dtype, seed=2))
    expected = kernels.linear(rows, packed)
    for count in range(1, 21):
        begin = 13 * count % 280
        assert torch.equal(kernels.linear(rows[begin : begin + count], packed), expected[begin : begin + count])
    for count in (1, 2, 5):
        with threads(count):
            assert torch.equal(kernels.linear(rows, packed), expected)
            assert torch.equal(kernels.linear(rows[:1], packed), expected[:1])
    places = torch.randperm(300, generator=torch.Generator().manual_seed(3))
    assert torch.equal(kernels.linear(rows[places], packed), expected[places])


@pytest.mark.parametrize("dtype", DTYPES)
def test_bits_do_not_depend_on_packing(compiled, threads, dtype):
    """Side by side with other columns, and packed by any number of threads, a column gives the same bits."""
    kernels, rows = compiled.decoder, random(7, 50, dtype=dtype, seed=1)
    weight = random(112, 50, dtype=dtype)
    whole = kernels.linear(rows, kernels.pack(weight, None))
    for count in (1, 2):
        with threads(count):
            for begin, end in ((0, 16), (16, 112), (32, 61), (111, 112)):
                found = kernels.linear(rows, kernels.pack(weight[begin:end], None))
                assert torch.equal(found, whole[:, begin:end])


@pytest.mark.parametrize("dtype", DTYPES)
def test_values_that_are_not_finite_stay_in_their_row(compiled, dtype):
    """NaN and infinity in one row, beside columns that fill no panel, are in no other row."""
    kernels, rows = compiled.decoder, random(9, 32, dtype=dtype, seed=1)
    packed = kernels.pack(random(21, 32, dtype=dtype), None)
    expected = kernels.linear(rows, packed)
    rows[3, 5], rows[6] = float("nan"), float("inf")
    found = kernels.linear(rows, packed)
    assert found[3].isnan().all()
    assert not found[6].isfinite().any()
    kept = [0, 1, 2, 4, 5, 7, 8]
    assert torch.equal(found[kept], expected[kept])


@pytest.mark.parametrize("dtype", DTYPES)
def test_plain_weights_may_go(compiled, dtype):
    """Nothing of what was packed is referred to; a matrix that lies the other way round in memory is packed as it reads."""
    kernels, rows = compiled.decoder, random(4, 6, 40, dtype=dtype, seed=1)
    weight, bias = random(40, 33, dtype=dtype).T, random(33, dtype=dtype, seed=2)
    packed = kernels.pack(weight, bias)
    expected = torch.nn.functional.linear(rows.float(), weight.float(), bias.float())
    weight.fill_(float("nan"))
    bias.fill_(float("nan"))
    found = kernels.linear(rows, packed)
    assert found.shape == (4, 6, 33)
    torch.testing.assert_close(found.float(), expected, rtol=2.0**-8, atol=1e-4)


def test_rows_that_lie_apart_and_none(compiled):
    """Rows need not be contiguous; no row gives no result."""
    kernels, packed = compiled.decoder, compiled.decoder.pack(random(20, 8), None)
    wide = random(5, 16, seed=1)
    assert torch.equal(kernels.linear(wide[:, ::2], packed), kernels.linear(wide[:, ::2].contiguous(), packed))
    assert kernels.linear(wide[:0, :8], packed).shape == (0, 20)


def test_what_is_packed(compiled):
    """Depth in whole units of four bytes, in the two types that there are products for."""
    kernels = compiled.decoder
    assert kernels.packs(torch.float32, 7)
    assert kernels.packs(torch.bfloat16, 8)
    assert not kernels.packs(torch.bfloat16, 7)
    assert not kernels.packs(torch.float16, 8)
    assert not kernels.packs(torch.float64, 8)
