"""Quantized weights: what their numbers stand for; products that are exact in rounded rows, whatever is computed together."""

from dataclasses import replace

import pytest
import torch
from torch.nn import functional

from paged_kernels import quantized as quantized_module
from paged_kernels.program import Gated, Linear, Rows
from paged_kernels.quantized import QuantizedWeight, joined, quantized
from tests.kernels.programs import Bench, packed, random

DTYPES = [torch.float32, torch.bfloat16]
# Of one tile, of several, of more than a block of rows.
COUNTS = (1, 2, 3, 6, 7, 8, 9, 33, 130)
FORMS = [(8, 32), (8, 128), (8, 16), (4, 32), (4, 64), (4, 128)]
"""Bits and group."""


def of_numbers(columns, depth, bits, group, dtype, *, has_offsets=False, seed=0):
    """Weights of random numbers, the extreme ones included, with scales and offsets of any size."""
    generator = torch.Generator().manual_seed(seed)
    low, high = (-128, 128) if bits == 8 else (0, 16) if has_offsets else (-8, 8)
    numbers = torch.randint(low, high, (columns, depth), generator=generator).to(torch.int8)
    numbers[0], numbers[-1] = low, high - 1
    num_groups = -(-depth // group)
    scales = torch.rand(columns, num_groups, generator=generator) * 0.01
    offsets = torch.randn(columns, num_groups, generator=generator) * 0.1 if has_offsets else None
    return QuantizedWeight(numbers, scales, offsets, bits, group, dtype)


def whole_rows(count, depth, group, dtype):
    """Rows that rounding keeps as they are: whole numbers, of which a group has 127, times a power of two for each group."""
    generator = torch.Generator().manual_seed(count)
    num_groups = -(-depth // group)
    numbers = torch.randint(-127, 128, (count, num_groups, group), generator=generator).float()
    numbers[:, :, 0] = 127
    powers = 2.0 ** torch.randint(-9, 3, (count, num_groups, 1), generator=generator)
    return (numbers * powers).flatten(1)[:, :depth].to(dtype).contiguous()


def group_sums(values, group):
    """Sums over each group of columns of a matrix."""
    return functional.pad(values, (0, -values.shape[1] % group)).unflatten(1, (-1, group)).sum(2)


# --- the form --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("bits", "group"), FORMS)
def test_each_weight_is_within_half_a_scale(bits, group):
    """Of 4 bits one scale at the end that has no number; groups that are cut short by the depth too."""
    weight = random(11, 3 * group + 5) * torch.logspace(-2, 2, 11)[:, None]
    form = quantized(weight, bits, group)
    scales = form.scales.repeat_interleave(group, 1)[:, : form.depth]
    off = (form.dequantized() - weight).abs() / scales.abs()
    assert off.max() <= (0.501 if bits == 8 else 1.001)
    assert off.mean() < 0.27
    assert form.scales.shape == (11, 4)
    assert torch.equal(form.scales.half().float(), form.scales)


def test_what_numbers_stand_for():
    """Scale times number plus offset, in float32."""
    numbers = torch.tensor([[0, 15, 3], [1, 2, 7]], dtype=torch.int8)
    form = QuantizedWeight(
        numbers, torch.tensor([[0.5, 2.0], [1.0, 3.0]]), torch.tensor([[-1.0, 0.25], [0.0, 10.0]]), 4, 2, torch.float32
    )
    assert form.dequantized().tolist() == [[-1.0, 6.5, 6.25], [1.0, 2.0, 31.0]]
    assert form.rows(torch.tensor([1, 0])).dequantized().tolist() == [[1.0, 2.0, 31.0], [-1.0, 6.5, 6.25]]
    assert replace(form, dtype=torch.bfloat16).dequantized().dtype == torch.bfloat16


def test_joining_changes_no_weight():
    """Forms of other bits and groups, with offsets and without; unquantized weights."""
    parts = [of_numbers(3, 80, 4, 32, torch.float32), of_numbers(5, 80, 8, 16, torch.float32, has_offsets=True)]
    whole = joined([*parts, of_numbers(2, 80, 8, 32, torch.float32)])
    assert (whole.bits, whole.group, whole.columns) == (8, 16, 10)
    assert torch.equal(whole.dequantized()[:8], torch.cat([part.dequantized() for part in parts]))
    alike = joined([parts[0], parts[0]])
    assert (alike.bits, alike.group, alike.offsets) == (4, 32, None)
    mixed = joined([parts[0], torch.ones(1, 80)])
    assert torch.equal(mixed, torch.cat([parts[0].dequantized(), torch.ones(1, 80)]))


# --- products --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("has_offsets", [False, True])
@pytest.mark.parametrize(("bits", "group"), FORMS)
@pytest.mark.parametrize(("columns", "depth"), [(48, 256), (150, 100), (9, 1000)])
def test_products_with_rows_that_rounding_keeps(compiled, columns, depth, bits, group, has_offsets, dtype):
    """Those of the dequantized weights: integer sums are exact, the rest is float32. Few rows and many alike."""
    kernels = compiled.decoder
    form = of_numbers(columns, depth, bits, group, dtype, has_offsets=has_offsets)
    bias = random(columns, dtype=dtype, seed=2)
    weights = kernels.pack(form, bias)
    rows = whole_rows(max(COUNTS), depth, group, dtype)
    full = replace(form, dtype=torch.float64).dequantized()
    expected, size = rows.double() @ full.T + bias.double(), rows.double().abs() @ full.abs().T
    found = kernels.linear(rows, weights)
    last_rounding = 0 if dtype == torch.float32 else 2.0**-8
    assert ((found.double() - expected).abs() <= last_rounding * expected.abs() + 2e-6 * size + 1e-5).all()
    for count in COUNTS:
        assert torch.equal(kernels.linear(rows[:count], weights), found[:count])


@pytest.mark.parametrize(("bits", "group"), FORMS)
def test_the_stated_error(compiled, bits, group):
    """A result is off by at most half a number of each group of the row, times the weights of that group."""
    kernels, rows = compiled.decoder, random(19, 300, seed=1)
    form = of_numbers(40, 300, bits, group, torch.float32, has_offsets=True)
    found, full = kernels.linear(rows, kernels.pack(form, None)).double(), form.dequantized().double()
    scales = functional.pad(rows.abs(), (0, -300 % group)).unflatten(1, (-1, group)).amax(2).double() / 127
    off = (found - rows.double() @ full.T).abs()
    assert (off <= 0.501 * (scales @ group_sums(full.abs(), group).T) + 1e-4).all()
    assert off.max() > 0


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("bits", "group"), FORMS)
def test_bits_do_not_depend_on_company(compiled, threads, dtype, bits, group):
    """A row alone, among few and among many, and by any number of threads."""
    kernels, rows = compiled.decoder, random(140, 84, dtype=dtype, seed=1)
    weights = kernels.pack(quantized(random(170, 84, dtype=dtype), bits, group), random(170, dtype=dtype, seed=2))
    expected = kernels.linear(rows, weights)
    for count in COUNTS:
        begin = 7 * count % 10
        assert torch.equal(kernels.linear(rows[begin : begin + count], weights), expected[begin : begin + count])
    with threads(1):
        assert torch.equal(kernels.linear(rows, weights, wide=True), kernels.linear(rows, weights).float())
        assert torch.equal(kernels.linear(rows, weights), expected)


@pytest.mark.parametrize("bits", [8, 4])
def test_factors_are_kept_in_16_bits_where_none_changes(compiled, bits):
    """Bytes of a panel of 16 columns: numbers, and 2 or 4 bytes for a factor; the same results."""
    kernels, rows = compiled.decoder, random(3, 64)
    form = of_numbers(32, 64, bits, 32, torch.float32, has_offsets=True)
    halves = replace(form, scales=form.scales.half().float(), offsets=form.offsets.half().float())
    small, large = kernels.pack(halves, None), kernels.pack(form, None)
    assert small.num_bytes == 32 * (64 * bits // 8 + 2 * 2 * 2)
    assert large.num_bytes == 32 * (64 * bits // 8 + 2 * 2 * 4)
    torch.testing.assert_close(kernels.linear(rows, small), kernels.linear(rows, large), rtol=2e-3, atol=2e-2)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bits", [8, 4])
def test_nothing_and_no_numbers(compiled, dtype, bits):
    """A column of zeros gives its bias; one with NaN or infinity gives NaN, and so does such a row; neighbours stay as they are."""
    kernels, weight, rows = compiled.decoder, random(20, 64, dtype=dtype), random(10, 64, dtype=dtype, seed=1)
    bias = random(20, dtype=dtype, seed=2)
    expected = kernels.linear(rows, packed(kernels, weight, bias, bits))
    weight[3], weight[5, 7], weight[16, 0] = 0, float("nan"), float("-inf")
    rows[4], rows[6, 3], rows[7, 40] = 0, float("nan"), float("inf")
    found = kernels.linear(rows, packed(kernels, weight, bias, bits))
    finite = [i for i in range(10) if i not in {6, 7}]
    assert torch.equal(found[finite, 3], bias[3].expand(8))
    assert found[:, [5, 16]].isnan().all()
    assert found[[6, 7]].isnan().all()
    kept = [i for i in range(20) if i not in {3, 5, 16}]
    assert torch.equal(found[4, kept], bias[kept])
    same = [i for i in finite if i != 4]
    assert torch.equal(found[same][:, kept], expected[same][:, kept])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("num_rows", [1, 5, 20])
def test_in_programs(compiled, dtype, bits, num_rows):
    """Linear, gated and adding operators give what the products alone give, also beside plain weights."""
    kernels, width, inner = compiled.decoder, 48, 80
    gate, up = random(inner, width, dtype=dtype), random(inner, width, dtype=dtype, seed=1) * 5
    down = packed(kernels, random(width, inner, dtype=dtype, seed=2), random(width, dtype=dtype, seed=3), bits)
    gates, ups = (packed(kernels, weight, None, bits) for weight in (gate, up))
    plain = kernels.pack(random(width, width, dtype=dtype, seed=5), None)
    stream = random(num_rows, width, dtype=dtype, seed=4) * 0.2
    bench = Bench(compiled, {Rows.STREAM: width, Rows.GATED: inner, Rows.NORMED: width}, dtype=dtype)
    operators = [
        Linear(Rows.STREAM, Rows.NORMED, plain),
        Gated(Rows.NORMED, Rows.GATED, gates, ups, "silu"),
        Linear(Rows.GATED, Rows.STREAM, down, adds=True),
    ]
    found = bench.run(operators, stream)
    first = kernels.linear(stream, plain)
    gated = functional.silu(kernels.linear(first, gates)) * kernels.linear(first, ups)
    expected = stream + kernels.linear(gated, down)
    tolerance = 2e-2
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance * float(expected.abs().max()))
    assert torch.equal(found[:1], bench.run(operators, stream[:1]))


def test_what_is_packed(compiled):
    """Rows of float32 and bfloat16; groups of whole vectors; gate and up in one form."""
    kernels = compiled.decoder
    for numbers in (torch.int8, torch.float8_e4m3fn):
        assert kernels.packs_quantized(torch.bfloat16, numbers)
        assert not kernels.packs_quantized(torch.float16, numbers)
    for bits, group in ((4, 8), (8, 40), (5, 32)):
        with pytest.raises(ValueError, match=f"{bits} bits in groups of {group}"):
            kernels.pack(replace(of_numbers(16, 80, 4, group, torch.float32), bits=bits), None)
    plain, small = kernels.pack(random(16, 32), None), packed(kernels, random(16, 32), None, 8)
    bench = Bench(compiled, {Rows.STREAM: 32, Rows.GATED: 16})
    with pytest.raises(ValueError, match="must have the same form"):
        bench.run([Gated(Rows.STREAM, Rows.GATED, plain, small, "silu")], random(2, 32))


@pytest.mark.parametrize("bits", [4, 8])
def test_pieces_do_not_matter(monkeypatch, bits):
    """Columns are rounded piece by piece; one whose scale float16 cannot hold changes the scales of all."""
    weight = torch.randn(50, 96, generator=torch.Generator().manual_seed(3))
    weight[40] *= 1e-7
    whole = quantized_module.quantized(weight, bits, 32)
    monkeypatch.setattr(quantized_module, "_PIECE", 700)
    pieces = quantized_module.quantized(weight, bits, 32)
    assert torch.equal(whole.numbers, pieces.numbers)
    assert torch.equal(whole.scales, pieces.scales)
    assert not torch.equal(whole.scales, whole.scales.half().float())


# --- E4M3 ------------------------------------------------------------------------------------------------------------


def of_all_numbers(columns, depth, group, dtype):
    """E4M3 weights with every number but NaN, and scales of any size."""
    generator = torch.Generator().manual_seed(depth)
    bits = torch.tensor([bits for bits in range(256) if bits & 127 != 127], dtype=torch.uint8)
    numbers = bits[torch.randint(len(bits), (columns, depth), generator=generator)].view(torch.float8_e4m3fn)
    scales = 2.0 ** torch.empty(columns, -(-depth // group)).uniform_(-30, 7, generator=generator)
    return QuantizedWeight(numbers, scales, None, 8, group, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("group", [16, 48, 128])
@pytest.mark.parametrize(("columns", "depth"), [(48, 256), (150, 100), (9, 1000), (33, 77)])
def test_products_with_fp8(compiled, columns, depth, group, dtype):
    """Bit by bit those of the dequantized weights in float32: rows are not rounded. Few rows and many alike."""
    kernels, form, bias = compiled.decoder, of_all_numbers(columns, depth, group, dtype), random(columns, dtype=dtype)
    weights = kernels.pack(form, bias)
    full = kernels.pack(replace(form, dtype=torch.float32).dequantized(), bias.float())
    rows = random(max(COUNTS), depth, dtype=dtype, seed=3)
    found = kernels.linear(rows, weights)
    assert weights.form.stored == "fp8"
    assert weights.num_bytes < 1.3 * columns * depth + 16 * (depth + group) + 4096
    assert torch.equal(found, kernels.linear(rows.float(), full).to(dtype))
    for count in COUNTS:
        assert torch.equal(kernels.linear(rows[:count], weights), found[:count])


def test_fp8_that_cannot_be_multiplied(compiled):
    """A number that is not one makes results of its column NaN, no other's; scales that overflow are refused."""
    form = of_all_numbers(20, 64, 32, torch.float32)
    form.numbers[7, 40] = float("nan")
    found = compiled.decoder.linear(torch.ones(3, 64), compiled.decoder.pack(form, None))
    assert found.isnan().nonzero()[:, 1].unique().tolist() == [7]
    with pytest.raises(ValueError, match="a scale of E4M3 weights is 256; less than 256 needed"):
        compiled.decoder.pack(replace(form, scales=torch.full_like(form.scales, 256)), None)


def test_joining_fp8():
    """The smallest groups of E4M3 numbers; beside integers all are dequantized."""
    parts = [of_all_numbers(3, 80, group, torch.float32) for group in (32, 16)]
    whole = joined(parts)
    assert whole.is_float and (whole.group, whole.columns) == (16, 6)
    assert torch.equal(whole.dequantized(), torch.cat([part.dequantized() for part in parts]))
    mixed = joined([parts[0], of_numbers(2, 80, 8, 32, torch.float32)])
    assert torch.equal(mixed[:3], parts[0].dequantized())
