"""Triton's products with E4M3 weights against those of the dequantized weights in float64, over random shapes."""

import random
from dataclasses import replace

import pytest
import torch

from paged_kernels.gpu import products
from paged_kernels.gpu.backend import is_interpreted, make
from paged_kernels.quantized import QuantizedWeight
from tests.kernels.programs import fp8
from tests.kernels.triton.cases import DEVICE
from tests.kernels.triton.test_attention import Idle
from worker_svc.model.fused.packed_linear import part

QUICK, WHOLE = 6, 60
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
LAST_ROUNDING = {torch.float32: 2.0**-22, torch.bfloat16: 2.0**-7, torch.float16: 2.0**-10}
"""Relative; the interpreter cuts bfloat16 off."""


def on_device(weight: QuantizedWeight) -> QuantizedWeight:
    return replace(weight, numbers=weight.numbers.to(DEVICE), scales=weight.scales.to(DEVICE))


def off(seed: int) -> float:
    """The largest difference of a result, as a multiple of what is allowed."""
    rng, dtype = random.Random(seed), DTYPES[seed % 3]
    torch.manual_seed(seed)
    count, group = rng.choice([1, 3, 16, 17, 64, 70, 150]), rng.choice([16, 32, 64, 128])
    columns, depth = rng.choice([16, 48, 200]), rng.choice([48, 128, 200, 320])
    weight = fp8((torch.randn(columns, depth) * 10 ** torch.empty(columns, 1).uniform_(-3, 1)).to(dtype), group)
    bias = torch.randn(columns).to(dtype) if rng.random() < 0.5 else None
    rows, target = torch.randn(count, depth).to(dtype), torch.randn(count, columns).to(dtype)
    packed = make().decoder.pack(on_device(weight), None if bias is None else bias.to(DEVICE))
    full = replace(weight, dtype=torch.float64).dequantized()
    expected = rows.double() @ full.T + (0 if bias is None else bias.double())
    size = rows.double().abs() @ full.abs().T + expected.abs()
    found = make().decoder.linear(rows.to(DEVICE), packed).cpu().double()
    added = target.clone().to(DEVICE)
    products.Products(upcast=is_interpreted()).add_linear(rows.to(DEVICE), packed, added)
    worst = 0.0
    for made, wanted in ((found, expected), (added.cpu().double(), expected + target.double())):
        allowed = LAST_ROUNDING[dtype] * wanted.abs() + 1e-6 * size + 1e-6
        worst = max(worst, float(((made - wanted).abs() / allowed).max()))
    return worst


def check(seeds: range, record) -> None:
    for seed in seeds:
        assert off(seed) <= 1, seed
    record("size", f"triton products with E4M3 weights: {len(seeds)} random shapes of {WHOLE}")


def test_products(record_property):
    """R18: rows are not rounded, each group has its scale; with biases and sums, any number of rows; a sample."""
    check(range(QUICK), record_property)


@pytest.mark.long
def test_products_of_every_shape(record_property):
    """R18: the same over all random shapes."""
    check(range(WHOLE), record_property)


def test_a_part_of_the_columns():
    """Is a view of the packed weights."""
    weight = fp8(torch.randn(64, 80), 32)
    whole, rows = make().decoder.pack(on_device(weight), None), torch.randn(3, 80).to(DEVICE)
    expected = make().decoder.linear(rows, whole)
    torch.testing.assert_close(make().decoder.linear(rows, part(whole, 16, 32)), expected[:, 16:48])


def test_numbers_that_are_none():
    """Make results of their column NaN, no other's."""
    weight = fp8(torch.randn(20, 64), 32)
    weight.numbers[7, 40] = float("nan")
    found = make().decoder.linear(torch.ones(3, 64).to(DEVICE), make().decoder.pack(on_device(weight), None))
    assert found.cpu().isnan().nonzero()[:, 1].unique().tolist() == [7]


def test_a_kernel_that_does_nothing_is_noticed(monkeypatch):
    """The comparison sees it."""
    monkeypatch.setattr(products, "float8_kernel", Idle())
    assert not off(1) <= 1
