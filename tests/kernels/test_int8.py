"""Weights of 8 bits: rounded as they should be, multiplied exactly, with the same bits whatever rows are computed together."""

import pytest
import torch
from torch.nn import functional

from paged_kernels.decoder import Gated, Linear, Rows
from tests.kernels.programs import Bench, random

DTYPES = [torch.float32, torch.bfloat16]
# Of one tile, of several, of more than a block of rows.
COUNTS = (1, 2, 3, 6, 7, 8, 9, 33, 130)


def rounded(weight):
    """What int8 makes of weights [columns, depth]: multiples, as float32, and the scale of each column."""
    scales = weight.float().abs().amax(1) / 127
    return torch.round(weight.float() / scales[:, None]).clamp(-127, 127), scales


def lossless(columns, depth, dtype, seed=0):
    """Weights that int8 keeps as they are: whole numbers up to 127 times a power of two, another for each column."""
    generator = torch.Generator().manual_seed(seed)
    numbers = torch.randint(-127, 128, (columns, depth), generator=generator).float()
    numbers[:, -1] = 127
    return (numbers * 2.0 ** torch.randint(-9, 3, (columns, 1), generator=generator)).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("depth", [4, 36, 256])
def test_weights_are_rounded_to_a_127th_of_the_largest(compiled, threads, dtype, depth):
    """A matrix multiplied with one row for each depth shows its weights: bit by bit those that torch makes, by any threads."""
    kernels, weight = compiled.decoder, random(53, depth, dtype=dtype)
    numbers, scales = rounded(weight)
    for count in (1, 2):
        with threads(count):
            packed = kernels.pack(weight, None, stored="int8")
        assert (packed.stored, packed.data.nbytes, packed.num_bytes) == ("int8", 64 * depth, 64 * depth + 53 * 4)
        assert torch.equal(packed.scales, scales)
        found = kernels.linear(torch.eye(depth, dtype=dtype), packed)
        assert torch.equal(found, (numbers * scales[:, None]).T.to(dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("columns", "depth", "biased"), [(48, 64, False), (150, 100, True), (9, 1000, True)])
def test_products_have_the_bits_of_plain_weights(compiled, threads, dtype, columns, depth, biased):
    """Where rounding changes no weight, no bit of a result changes: few rows, which read 8 bits, and many, alike."""
    kernels, weight = compiled.decoder, lossless(columns, depth, dtype)
    bias = random(columns, dtype=dtype, seed=2) if biased else None
    plain, packed = kernels.pack(weight, bias), kernels.pack(weight, bias, stored="int8")
    rows = random(max(COUNTS), depth, dtype=dtype, seed=1)
    expected = kernels.linear(rows, plain)
    for count in COUNTS:
        assert torch.equal(kernels.linear(rows[:count], packed), expected[:count])
    with threads(1):
        assert torch.equal(kernels.linear(rows, packed, wide=True), expected.float())


@pytest.mark.parametrize("dtype", DTYPES)
def test_bits_do_not_depend_on_company(compiled, dtype):
    """With scales of any size as well, and a bias: a row alone, among few and among many."""
    kernels, rows = compiled.decoder, random(140, 84, dtype=dtype, seed=1)
    packed = kernels.pack(random(70, 84, dtype=dtype), random(70, dtype=dtype, seed=2), stored="int8")
    expected = kernels.linear(rows, packed)
    for count in COUNTS:
        begin = 7 * count % 10
        assert torch.equal(kernels.linear(rows[begin : begin + count], packed), expected[begin : begin + count])


def test_the_scale_is_multiplied_once_at_the_end(compiled):
    """float32: the sum of whole numbers times the scale, rounded once each; so close to full weights as half a step allows."""
    kernels, weight, rows = compiled.decoder, random(40, 128), random(11, 128, seed=1)
    numbers, scales = rounded(weight)
    found = kernels.linear(rows, kernels.pack(weight, None, stored="int8"))
    assert torch.equal(found, kernels.linear(rows, kernels.pack(numbers, None)) * scales)
    off = (found.double() - rows.double() @ weight.double().T).abs()
    assert (off <= rows.double().abs().sum(1)[:, None] * scales * 0.5001 + 1e-5).all()
    assert off.max() > 0


@pytest.mark.parametrize("dtype", DTYPES)
def test_columns_of_nothing_and_of_no_numbers(compiled, dtype):
    """A column of zeros gives its bias; one with NaN or infinity gives NaN, and its neighbours what they give without it."""
    kernels, weight, rows = compiled.decoder, random(20, 32, dtype=dtype), random(10, 32, dtype=dtype, seed=1)
    bias = random(20, dtype=dtype, seed=2)
    expected = kernels.linear(rows, kernels.pack(weight, bias, stored="int8"))
    weight[3], weight[5, 7], weight[16, 0] = 0, float("nan"), float("-inf")
    found = kernels.linear(rows, kernels.pack(weight, bias, stored="int8"))
    assert torch.equal(found[:, 3], bias[3].expand(10))
    assert found[:, [5, 16]].isnan().all()
    kept = [i for i in range(20) if i not in {3, 5, 16}]
    assert torch.equal(found[:, kept], expected[:, kept])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_rows", [1, 5, 20])
def test_in_programs(compiled, dtype, num_rows):
    """Linear, gated and adding operators give what the products alone give; scales of both of a gated operator's weights count."""
    kernels, width, inner = compiled.decoder, 48, 80
    gate, up = random(inner, width, dtype=dtype), random(inner, width, dtype=dtype, seed=1) * 5
    down = kernels.pack(random(width, inner, dtype=dtype, seed=2), random(width, dtype=dtype, seed=3), stored="int8")
    gates, ups = (kernels.pack(weight, None, stored="int8") for weight in (gate, up))
    stream = random(num_rows, width, dtype=dtype, seed=4) * 0.2
    bench = Bench(compiled, {Rows.STREAM: width, Rows.GATED: inner}, dtype=dtype)
    operators = [Gated(Rows.STREAM, Rows.GATED, gates, ups, "silu"), Linear(Rows.GATED, Rows.STREAM, down, adds=True)]
    found = bench.run(operators, stream)
    gated = functional.silu(kernels.linear(stream, gates)) * kernels.linear(stream, ups)
    expected = stream + kernels.linear(gated, down)
    tolerance = 1e-5 if dtype == torch.float32 else 2.0**-6
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance * float(expected.abs().max()))
    assert torch.equal(found[:1], bench.run(operators, stream[:1]))


def test_what_is_packed(compiled):
    """Depth in whole units of four; gate and up stored alike."""
    kernels = compiled.decoder
    assert kernels.packs(torch.bfloat16, 8, "int8")
    assert not kernels.packs(torch.bfloat16, 6, "int8")
    assert not kernels.packs(torch.float32, 7, "int8")
    assert not kernels.packs(torch.float16, 8, "int8")
    plain, packed = kernels.pack(random(16, 16), None), kernels.pack(random(16, 16), None, stored="int8")
    bench = Bench(compiled, {Rows.STREAM: 16, Rows.GATED: 16})
    with pytest.raises(ValueError, match="must have the same form"):
        bench.run([Gated(Rows.STREAM, Rows.GATED, plain, packed, "silu")], random(2, 16))
