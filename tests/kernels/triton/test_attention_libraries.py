"""Attention of libraries over the Triton kernels' pool: against the reference on a GPU, by stand-ins elsewhere."""

import itertools
import sys
from dataclasses import replace

import pytest
import torch

from paged_kernels.backend import AttentionRule, CacheShape
from paged_kernels.gpu.backend import TritonBackend
from paged_kernels.gpu.library_backend import LibraryBackend
from paged_kernels.reference import ReferenceBackend
from paged_kernels.registry import ATTENTION_BACKENDS, make_attention_backend
from svc_common.errors import ConfigError
from tests.kernels.triton.cases import DEVICE, Problem, attend, distance, make_inputs, random_problem
from tests.support.cuda import TEST_DEVICE

NAMES = sorted(ATTENTION_BACKENDS)
KINDS = ("decode", "prefill", "mixed")
ON_GPU = TEST_DEVICE == "cuda"


@pytest.fixture(params=NAMES)
def backend(request) -> LibraryBackend:
    """Each one that is installed, on a GPU; elsewhere its stand-in."""
    if not ON_GPU:
        request.getfixturevalue("attention_packages")
        return make_attention_backend(request.param, {"TRITON_INTERPRET": "1"}, print)
    try:
        return make_attention_backend(request.param, {}, print)
    except ConfigError as error:
        pytest.skip(error.message)


def taken(problem: Problem, backend: LibraryBackend) -> Problem:
    """The problem with a head size, dtype, block size and rule that the backend takes, as near as possible."""
    limits, shape = backend.limits, problem.shape
    heads = min((dim for dim in range(8, 257) if dim in limits.head_dims), key=lambda dim: abs(dim - shape.head_dim))
    size = shape.block_size if shape.block_size in limits.block_sizes else 32
    dtype = problem.dtype if problem.dtype in limits.dtypes else torch.bfloat16
    rule = replace(problem.rule, softcap=problem.rule.softcap if limits.softcap else None, sinks=None, chunk=None)
    given = replace(problem, shape=CacheShape(size, shape.num_kv_heads, heads), dtype=dtype, rule=rule)
    assert not limits.problem(given.shape, dtype, dtype, [rule])
    return given


def compare(backend: LibraryBackend, problem: Problem) -> None:
    given = taken(problem, backend)
    expected = attend(ReferenceBackend(), given)
    assert distance(torch.zeros_like(expected), expected, given.dtype) > 5, "zeros would not pass"
    assert distance(attend(backend, given), expected, given.dtype) <= 1, given


@pytest.mark.parametrize("kind", KINDS)
def test_equals_reference(kind, backend, record_property):
    """R18: with windows, soft caps where taken, and NaN in blocks that were given away. A sample of the shapes."""
    compare(backend, random_problem(kind, 1))
    record_property("size", f"triton attention of {backend.name}, {kind}, {'on a GPU' if ON_GPU else 'a stand-in'}")


@pytest.mark.long
@pytest.mark.parametrize("kind", KINDS)
def test_equals_reference_for_every_shape(kind, backend):
    """R18: the same over many random shapes."""
    for seed in range(50 if ON_GPU else 12):
        compare(backend, random_problem(kind, seed))


def test_what_a_library_computes(backend, monkeypatch):
    """Steps of lengths that the host knows; one for fresh prompts only those in which nothing is cached. Triton has the others."""
    seen: list[str] = []
    by_triton, by_library = TritonBackend.attend, backend._library.attend
    monkeypatch.setattr(TritonBackend, "attend", lambda *args: seen.append("triton") or by_triton(*args))
    monkeypatch.setattr(backend._library, "attend", lambda *args: seen.append("library") or by_library(*args))
    fresh_only = backend._library.fresh_only
    for sequences, expected in (
        ([(0, 5), (0, 1), (0, 0)], "library"),
        ([(9, 1), (20, 1)], "triton" if fresh_only else "library"),
        ([(0, 5), (20, 3)], "triton" if fresh_only else "library"),
    ):
        rule = AttentionRule(64**-0.5)
        problem = Problem(CacheShape(16, 1, 64), 2, torch.bfloat16, tuple(sequences), rule, 3)
        seen.clear()
        attend(backend, problem)
        assert seen == [expected], sequences
        given = make_inputs(problem)
        assert backend.takes(given.batch) == (expected == "library")
        assert not backend.takes(replace(given.batch, lengths=None, plans={})), "a recorded step"


@pytest.mark.skipif(ON_GPU, reason="counts the calls of a stand-in")
def test_flashinfer_plans_once_a_step_and_rule(attention_packages):
    """Layers with equal attention share a plan; a step between two passes of another takes its wrapper and is planned again."""
    backend = make_attention_backend("flashinfer", {"TRITON_INTERPRET": "1"}, print)
    plans = sys.modules["flashinfer"].BatchPrefillWithPagedKVCacheWrapper.PLANS
    shape, rules = CacheShape(16, 1, 64), (AttentionRule(0.1), AttentionRule(0.1, 7))
    steps = [make_inputs(Problem(shape, 2, torch.float16, ((0, 5), (0, n)), rules[0], n)) for n in (1, 30)]
    cache = torch.zeros(2, 20, shape.block_elements(torch.float16), dtype=torch.float16, device=DEVICE)
    assert backend.workspace_bytes == 0
    plans.clear()
    for given, rule, num_plans in (
        *((steps[0], rule, num) for rule, num in zip(rules * 2, (1, 2, 2, 2), strict=True)),
        (steps[1], rules[0], 3),
        (steps[0], rules[0], 4),
        (steps[0], rules[0], 4),
    ):
        backend.paged_attention(given.query, cache, given.batch, shape, rule)
        assert len(plans) == num_plans
    assert backend.workspace_bytes == 384 * 2**20 + 2 * (8 * 2**20 + 4 * 32768)


@pytest.mark.skipif(ON_GPU, reason="the registry is the same everywhere")
def test_every_pair_of_begins_and_windows(attention_packages):
    """The pages before a window are left out, neither fewer nor more: NaN in any of them, or a lost key, would show."""
    windows = [(31, 16), (32, 16), (33, 17), (40, 1), (5, 90)]
    for name, (old, window) in itertools.product(("flashinfer", "flash-attn-3"), windows):
        backend = make_attention_backend(name, {"TRITON_INTERPRET": "1"}, print)
        problem = Problem(
            CacheShape(16, 1, 64), 1, torch.bfloat16, ((old, 3), (old, 1)), AttentionRule(0.1, window), old
        )
        expected = attend(ReferenceBackend(), problem)
        assert distance(attend(backend, problem), expected, torch.bfloat16) <= 1, (name, old, window)
