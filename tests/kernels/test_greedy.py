"""The argmax of each row and whether its logits are finite: the compiled kernel gives what plain torch gives."""

import os

import pytest
import torch

from paged_kernels.registry import greedy_kernel, make_backend
from worker_svc.sampling import sampler

CHOICES = {
    "any": torch.randn,
    "ties": lambda shape: torch.randint(-2, 3, shape).float(),
    "both zeros": lambda shape: torch.zeros(shape) * torch.where(torch.rand(shape) < 0.5, -1.0, 1.0),
    "all below zero": lambda shape: -torch.randn(shape).abs() - 1,
    "lowest": lambda shape: torch.full(shape, torch.finfo(torch.float32).min),
}
VOCABULARIES = (1, 15, 16, 63, 64, 65, 1000, 4096)


@pytest.fixture(scope="module")
def greedy():
    kernel = greedy_kernel(make_backend("cpu", os.environ, print))
    if kernel is None:
        pytest.skip("no compiled kernels here")
    return kernel


@pytest.mark.parametrize("kind", CHOICES)
@pytest.mark.parametrize("rows", [1, 9])
def test_the_first_of_the_highest(greedy, kind, rows):
    """Ties go to the lower id, at either side of a piece's border and in the rest that is no whole piece."""
    torch.manual_seed(rows)
    for vocab in VOCABULARIES:
        logits = CHOICES[kind]((rows, vocab))
        tokens, finite = greedy(logits)
        assert torch.equal(tokens, logits.argmax(-1))
        assert finite.all()


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_a_row_that_is_not_finite(greedy, bad):
    """One bad logit anywhere flags its row alone; the row's token is some id of the vocabulary."""
    for vocab in VOCABULARIES:
        for place in {0, vocab // 2, vocab - 1}:
            logits = torch.randn(3, vocab)
            expected = logits.argmax(-1)
            logits[1, place] = bad
            tokens, finite = greedy(logits)
            assert finite.tolist() == [True, False, True]
            assert torch.equal(finite, sampler.finite_rows(logits))
            assert tokens[[0, 2]].tolist() == expected[[0, 2]].tolist()
            assert 0 <= int(tokens[1]) < vocab
