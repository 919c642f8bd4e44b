"""Mixtures of experts of a program against plain torch, and that a row's bits do not depend on rows beside it."""

from dataclasses import dataclass, replace

import pytest
import torch

from paged_kernels.program import Experts, ExpertWeights, Gated, Linear, Mix, Route, Routing, Rows
from tests.kernels.in_torch import ACTIVATIONS
from tests.kernels.programs import Bench, packed, random

DTYPES = [torch.float32, torch.bfloat16]
WIDTH, INNER, EXPERTS = 64, 48, 12
STREAM, NORMED, GATED, PARTS, SHARED, SHARED_GATE = (
    Rows.STREAM, Rows.NORMED, Rows.GATED, Rows.PARTS, Rows.SHARED, Rows.SHARED_GATE
)  # fmt: skip
USUAL = Routing(EXPERTS, 3, "softmax", normalised=True, exact=False, rounds=True)
BIAS = random(EXPERTS, seed=9) / 4
ROUTINGS = {
    "softmax": replace(USUAL, normalised=False),
    "normalised": USUAL,
    "exact": replace(USUAL, exact=True, rounds=False),
    "one": replace(USUAL, top_k=1, normalised=False),
    "all": replace(USUAL, top_k=EXPERTS),
    "sigmoid": replace(USUAL, scoring="sigmoid", scale=2.5, exact=True, rounds=False),
    "bias": replace(USUAL, scoring="sigmoid", bias=BIAS),
    "groups": replace(USUAL, scoring="sigmoid", bias=BIAS, groups=4, kept_groups=2, best_of_group=2, scale=1.5),
    "best of groups": replace(USUAL, normalised=False, groups=3, kept_groups=1, exact=True),
}


def routed(logits, routing):
    """Weights [T, experts], 0 for those not chosen, and the experts [T, top_k]."""
    scores = logits.float().softmax(-1) if routing.scoring == "softmax" else logits.float().sigmoid()
    keys = scores if routing.bias is None else scores + routing.bias
    if routing.groups > 1:
        of_groups = keys.unflatten(1, (routing.groups, -1))
        sums = of_groups.topk(routing.best_of_group).values.sum(-1)
        kept = torch.zeros_like(sums).scatter(1, sums.topk(routing.kept_groups).indices, 1.0)
        keys = of_groups.masked_fill(kept[:, :, None] == 0, -torch.inf).flatten(1)
    experts = keys.topk(routing.top_k).indices
    weights = scores.gather(1, experts)
    if routing.normalised:
        weights = weights / weights.sum(1, keepdim=True)
    return weights * routing.scale, experts


@dataclass
class Parts:
    """A mixture for a program, and its weights. `bits`: of the experts'."""

    kernels: object
    dtype: torch.dtype
    bits: int = 0
    activation: str = "silu"
    biased: bool = False

    def __post_init__(self):
        self.router = random(EXPERTS, WIDTH, dtype=self.dtype, seed=1) / 8
        gate_up = random(EXPERTS * 2 * INNER, WIDTH, dtype=self.dtype, seed=2) / 8
        down = random(EXPERTS * WIDTH, INNER, dtype=self.dtype, seed=3) / 8
        biases = [random(n, dtype=self.dtype, seed=n) if self.biased else None for n in (len(gate_up), len(down))]
        self.experts = ExpertWeights(
            packed(self.kernels, gate_up, biases[0], self.bits), packed(self.kernels, down, biases[1], self.bits), EXPERTS,
            self.activation,
        )  # fmt: skip
        self._single = [
            [
                packed(self.kernels, whole[e], None if bias is None else bias.view(EXPERTS, -1)[e], self.bits)
                for whole, bias in zip(
                    (gate_up.view(EXPERTS, -1, WIDTH), down.view(EXPERTS, -1, INNER)), biases, strict=True
                )
            ]
            for e in range(EXPERTS)
        ]

    def operators(self, routing, source=STREAM, target=STREAM, **mixed):
        return [
            Route(source, self.kernels.pack(self.router, None), routing),
            Experts(source, self.experts, routing.top_k),
            Mix(target, routing, **mixed),
        ]

    def expected(self, rows, routing):
        """By each expert's own products, one row after the other."""
        router = self.router.float() if routing.exact else self.router
        weights, experts = routed((rows.to(router.dtype) @ router.T), routing)
        if routing.rounds:
            weights = weights.to(self.dtype)
        made = torch.zeros(len(rows), WIDTH)
        for row, (chosen, of_row) in enumerate(zip(experts, weights, strict=True)):
            for expert, weight in zip(chosen.tolist(), of_row, strict=True):
                gate_up, down = self._single[expert]
                gate, up = self.kernels.linear(rows[row : row + 1], gate_up).chunk(2, -1)
                result = self.kernels.linear(ACTIVATIONS[self.activation](gate) * up, down)[0]
                made[row] += (result * weight).float()
        return made.to(self.dtype)


def bench(compiled, dtype, top_k):
    return Bench(
        compiled,
        {STREAM: WIDTH, NORMED: WIDTH, GATED: top_k * INNER, PARTS: top_k * WIDTH, SHARED: WIDTH, SHARED_GATE: 1},
        dtype=dtype,
    )


def close(found, expected):
    tolerance = 1e-5 if found.dtype == torch.float32 else 2.0**-6
    torch.testing.assert_close(found.float(), expected.float(), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ROUTINGS)
def test_routings(compiled, dtype, name):
    """Each way to choose and to weigh experts; results replace what was there, or are added to it."""
    routing, parts = ROUTINGS[name], Parts(compiled.decoder, dtype)
    rows = random(40, WIDTH, dtype=dtype)
    expected = parts.expected(rows, routing)
    assert expected.float().norm(dim=1).min() > 0.01
    found = bench(compiled, dtype, routing.top_k).run(parts.operators(routing), rows)
    close(found, expected)
    added = bench(compiled, dtype, routing.top_k).run(parts.operators(routing, adds=True), rows)
    close(added, rows + expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("bits", "activation", "biased"),
    [(0, "gelu_tanh", True), (8, "silu", False), (4, "silu", False), ("fp8", "silu", True)],
)
def test_forms(compiled, dtype, bits, activation, biased):
    """Quantized experts give what each one's own product with quantized weights gives; biases; another activation."""
    parts = Parts(compiled.decoder, dtype, bits, activation, biased)
    rows = random(9, WIDTH, dtype=dtype)
    close(bench(compiled, dtype, 3).run(parts.operators(USUAL), rows), parts.expected(rows, USUAL))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("is_gated", [False, True])
def test_shared_expert(compiled, dtype, is_gated):
    """An expert of all rows is added, weighted by a gate or not."""
    kernels, parts = compiled.decoder, Parts(compiled.decoder, dtype)
    gate, up, down, weight = (
        kernels.pack(random(*shape, dtype=dtype, seed=seed) / 8, None)
        for seed, shape in enumerate([(INNER, WIDTH), (INNER, WIDTH), (WIDTH, INNER), (1, WIDTH)])
    )
    rows = random(7, WIDTH, dtype=dtype, seed=5)
    route, experts, mix = parts.operators(USUAL, has_shared=True, is_gated=is_gated)
    operators = [
        route, Gated(STREAM, GATED, gate, up, "silu"), Linear(GATED, SHARED, down), Linear(STREAM, SHARED_GATE, weight),
        experts, mix,
    ]  # fmt: skip
    found = bench(compiled, dtype, 3).run(operators, rows)
    shared = kernels.linear(torch.nn.functional.silu(kernels.linear(rows, gate)) * kernels.linear(rows, up), down)
    factor = kernels.linear(rows, weight).sigmoid()
    close(found, parts.expected(rows, USUAL) + (shared * factor if is_gated else shared))
    same = kernels.mixture(rows, route, parts.experts, shared, kernels.linear(rows, weight) if is_gated else None)
    close(same, found)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bits", [0, 8, 4])
@pytest.mark.parametrize("threads", [1, 3])
def test_bits_do_not_depend_on_company(compiled, dtype, bits, threads):
    """A row alone, in batches of several sizes, in another order: the same bits, with any number of threads."""
    parts = Parts(compiled.decoder, dtype, bits)
    routing = replace(ROUTINGS["groups"], exact=True)
    operators, rows = parts.operators(routing, adds=True), random(700, WIDTH, dtype=dtype)
    runner, before = bench(compiled, dtype, 3), torch.get_num_threads()
    whole = runner.run(operators, rows)
    torch.set_num_threads(threads)
    try:
        for size in (1, 2, 5, 8, 31, 129):
            for begin in (0, 11, 500):
                assert torch.equal(runner.run(operators, rows[begin : begin + size]), whole[begin : begin + size])
        order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(0))
        assert torch.equal(runner.run(operators, rows[order]), whole[order])
        one_expert = rows[:1].repeat(300, 1)
        assert torch.equal(runner.run(operators, one_expert), whole[:1].expand(300, -1))
    finally:
        torch.set_num_threads(before)


@pytest.mark.timeout(120)
def test_threads_that_come_late(compiled):
    """More threads than cores: a thread may reach an operator when others route the rows of a later mixture already."""
    parts, before = Parts(compiled.decoder, torch.float32), torch.get_num_threads()
    operators = [op for name in ("one", "all", "usual") for op in parts.operators(ROUTINGS.get(name, USUAL), adds=True)]
    runner, rows = bench(compiled, torch.float32, EXPERTS), random(5, WIDTH)
    expected = runner.run(operators * 3, rows)
    torch.set_num_threads(8)
    try:
        for _ in range(300):
            assert torch.equal(runner.run(operators * 3, rows), expected)
    finally:
        torch.set_num_threads(before)


def test_rows_that_are_not_numbers(compiled):
    """A row of NaN or infinities stays alone: experts are chosen for it, others keep their bits."""
    parts, rows = Parts(compiled.decoder, torch.float32), random(6, WIDTH)
    for name, value in (("groups", float("nan")), ("normalised", float("inf"))):
        operators = parts.operators(ROUTINGS[name])
        expected = bench(compiled, torch.float32, 3).run(operators, rows)
        bad = rows.clone()
        bad[2] = value
        found = bench(compiled, torch.float32, 3).run(operators, bad)
        there = [0, 1, 3, 4, 5]
        assert torch.equal(found[there], expected[there])
        assert not found[2].isfinite().any()


def test_a_router_of_another_size(compiled):
    """Columns of the router and experts must be as many."""
    parts = Parts(compiled.decoder, torch.float32)
    operators = parts.operators(replace(USUAL, num_experts=EXPERTS + 1))
    with pytest.raises(ValueError, match=r"3 of 13 experts, and a router of 12 columns"):
        bench(compiled, torch.float32, 3).run(operators, random(2, WIDTH))
