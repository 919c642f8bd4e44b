"""Triton's attention against the reference over random shapes: decode, prefill and everything mixed."""

from dataclasses import replace

import pytest
import torch

from paged_kernels.backend import AttentionRule, CacheShape
from paged_kernels.gpu import backend as triton_backend
from paged_kernels.gpu.backend import TritonBackend
from paged_kernels.gpu.tile_plan import Sharing, heads_together, make_plans, span_of
from paged_kernels.reference import ReferenceBackend
from tests.kernels.triton.cases import ALLOWED, DEVICE, Problem, attend, distance, make_inputs, narrowed, random_problem

KINDS = ("decode", "prefill", "mixed")
QUICK, WHOLE = 2, 50


def backend() -> TritonBackend:
    return triton_backend.make()


def difference(problem: Problem, given: TritonBackend) -> float:
    expected = attend(ReferenceBackend(), problem)
    assert distance(torch.zeros_like(expected), expected, problem.dtype) > 5, "zeros would not pass"
    return distance(attend(given, problem), expected, problem.dtype)


def compare(kind: str, seeds: range, record) -> None:
    for seed in seeds:
        problem = random_problem(kind, seed)
        assert difference(problem, backend()) <= 1, problem
    record("size", f"triton {kind} attention: {len(seeds)} random shapes of {WHOLE}")


@pytest.mark.parametrize("kind", KINDS)
def test_equals_reference(kind, record_property):
    """R18: block tables, grouped heads, windows, chunks, soft caps; NaN in every block that must not be read. A sample."""
    compare(kind, range(QUICK), record_property)


@pytest.mark.long
@pytest.mark.parametrize("kind", KINDS)
def test_equals_reference_for_every_shape(kind, record_property):
    """R18: the same over all random shapes."""
    compare(kind, range(WHOLE), record_property)


@pytest.mark.parametrize(
    ("kind", "kv_heads", "head_dim", "group"),
    [("mixed", 1, 576, 24), ("decode", 2, 320, 33), pytest.param("prefill", 1, 576, 128, marks=pytest.mark.long)],
    ids=str,
)
def test_many_heads_of_one_kv_head(kind, kv_heads, head_dim, group):
    """Latents (MLA): wide heads, of which a program takes a part; sinks and parts of long contexts are those of its heads."""
    problem = random_problem(kind, 3)
    sinks = torch.linspace(-4, 6, kv_heads * group).to(DEVICE)
    rule = replace(problem.rule, scale=head_dim**-0.5, sinks=sinks)
    shape = CacheShape(16, kv_heads, head_dim)
    assert heads_together(head_dim, group) < group
    assert difference(replace(problem, shape=shape, group=group, rule=rule), backend()) <= 1


ONE_INTEGER = 0.03
"""How far a value is off whose integer is the next one: its head's largest magnitude, about 4, / 127."""


def compare_scaled(cache_dtype: torch.dtype, kinds: tuple[str, ...], seeds: range, record) -> None:
    for kind in kinds:
        for seed in seeds:
            problem = narrowed(random_problem(kind, seed), cache_dtype=cache_dtype)
            # An integer on the border between two becomes either: not all of these products are rounded once.
            allowed = ONE_INTEGER / ALLOWED[problem.dtype][0] if cache_dtype == torch.int8 else 2
            assert difference(problem, backend()) <= allowed, problem
    record("size", f"triton attention over {cache_dtype}: {len(kinds) * len(seeds)} random shapes")


@pytest.mark.parametrize(
    "cache_dtype", [pytest.param(torch.int8, marks=pytest.mark.long), torch.float8_e4m3fn], ids=str
)
def test_numbers_with_scales(cache_dtype, record_property):
    """R18: caches of numbers with scales hold what the reference's do; a sample."""
    compare_scaled(cache_dtype, KINDS, range(1, 3), record_property)


@pytest.mark.long
@pytest.mark.parametrize("cache_dtype", [torch.int8, torch.float8_e4m3fn], ids=str)
def test_numbers_with_scales_of_every_shape(cache_dtype, record_property):
    """R18: the same over all random shapes."""
    compare_scaled(cache_dtype, KINDS, range(WHOLE), record_property)


@pytest.mark.parametrize("ways", [(1, 64), pytest.param((5, 1000), marks=pytest.mark.long)], ids=str)
def test_every_way_to_share_gives_the_same(ways, record_property):
    """One program for all keys, or many: the parts of a tile add up."""
    problem = random_problem("mixed", 3)
    expected = attend(ReferenceBackend(), problem)
    for num_programs in ways:
        found = attend(TritonBackend(Sharing(num_programs, 0)), problem)
        assert distance(found, expected, problem.dtype) <= 1
    record_property("size", f"triton attention: {len(ways)} ways to share keys among programs")


def test_long_contexts_are_cut_and_short_ones_are_not():
    """The plan follows the lengths: parts for sequences with many keys, none where there are programs enough."""
    problem = narrowed(
        random_problem("decode", 0),
        group=2,
        dtype=torch.float32,
        sequences=((700, 1), (3, 1), (0, 8)),
        rule=AttentionRule(0.1),
    )
    inputs, span = make_inputs(problem), span_of(problem.rule)
    (plan,) = make_plans(
        inputs.batch, problem.shape, 1, problem.dtype, span, Sharing(16 * problem.shape.num_kv_heads, 0)
    )
    parts = plan.tile_parts[1].tolist()
    assert parts[0] > 4
    assert parts[1:] == [0, 0]
    items = plan.items[:, : int(plan.num_items)].T.tolist()
    assert len(items) == parts[0] + 2
    assert sum(high - low for tile, low, high, _ in items if tile == 0) == 701
    assert sum(parts) <= plan.max_parts
    (alone,) = make_plans(inputs.batch, problem.shape, 2, problem.dtype, span, Sharing(1, 0))
    assert int(alone.num_items) == 3
    (coarse,) = make_plans(inputs.batch, problem.shape, 2, problem.dtype, span, Sharing(4096, 1 << 30))
    assert not coarse.tile_parts[1].any(), "a program has at least so many bytes to read"


@pytest.mark.parametrize("name", ["attention_kernel", "combine_kernel"])
def test_a_kernel_that_does_nothing_is_noticed(name, monkeypatch):
    """The comparison sees it when a kernel leaves zeros."""
    problem = narrowed(random_problem("decode", 1), sequences=((300, 1), (2, 1)))
    # Freshly allocated memory may hold the right result of an earlier run.
    monkeypatch.setattr(triton_backend.torch, "empty", torch.zeros)
    monkeypatch.setattr(triton_backend, name, Idle())
    with pytest.raises(AssertionError):
        assert difference(problem, TritonBackend(Sharing(1000, 0))) <= 1


class Idle:
    """A kernel that starts and writes nothing."""

    def __getitem__(self, _grid):
        return lambda *_args, **_options: None
