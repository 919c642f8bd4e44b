"""Triton's sampler against the worker's: the same uniform numbers, the same tokens."""

import dataclasses

import pytest
import torch
import triton
import triton.language as tl

from paged_kernels.gpu import token_draws
from tests.kernels.triton.cases import DEVICE
from tests.kernels.triton.test_attention import Idle
from worker_svc.sampling import sampler

QUICK, WHOLE = 2, 50
ROWS = 8


@triton.jit
def uniform_kernel(seeds, sequences, positions, out, N: tl.constexpr):
    """Element by element."""
    i = tl.arange(0, N)
    found = token_draws.uniform(tl.load(seeds + i), tl.load(sequences + i), tl.load(positions + i))
    tl.store(out + i, found)


def test_uniform_numbers_have_the_same_bits(record_property):
    """The generator is one function of seed, sequence and position, on any backend."""
    rng, count = torch.Generator().manual_seed(1), 4096
    seeds = torch.randint(-(2**63), 2**63 - 1, (count,), generator=rng)
    sequences = torch.randint(0, 50, (count,), generator=rng)
    positions = torch.randint(0, 2**31, (count,), generator=rng)
    out = torch.empty(count, dtype=torch.float64, device=DEVICE)
    uniform_kernel[(1,)](seeds.to(DEVICE), sequences.to(DEVICE), positions.to(DEVICE), out, N=count)
    assert torch.equal(out.cpu(), sampler.uniform(seeds, sequences, positions))
    record_property("size", f"triton uniform numbers: {count} keys")


def random_rows(seed: int) -> tuple[torch.Tensor, sampler.SamplingRows]:
    """Logits with ties and words that may not be drawn; every filter on and off."""
    rng = torch.Generator().manual_seed(seed)
    vocab = (300, 5000, 64, 5, 1000, 9001, 4096)[seed % 7]
    logits = torch.randn(ROWS, vocab, generator=rng) * 3
    if seed % 2:
        logits = (logits * 2).round() / 2
    if seed % 3 == 0:
        logits[:, 1 : vocab // 3] = float("-inf")

    def some(low: float, high: float, off: float) -> torch.Tensor:
        values = torch.rand(ROWS, generator=rng) * (high - low) + low
        return torch.where(torch.rand(ROWS, generator=rng) < 0.5, values, off).to(DEVICE)

    def integers(low: int, high: int) -> torch.Tensor:
        return torch.randint(low, high, (ROWS,), generator=rng).to(DEVICE)

    temperatures = torch.where(integers(0, 5) > 0, some(0.3, 1.5, 1.0), 0.0)
    rows = sampler.SamplingRows(
        temperatures=temperatures,
        top_ks=integers(1, vocab + 2) * integers(0, 2),
        top_ps=some(0.05, 0.98, 1.0),
        seeds=integers(-(2**62), 2**62),
        sequence_indexes=integers(0, 4),
        positions=integers(0, 5000),
        logprobs=torch.ones(ROWS, dtype=torch.bool, device=DEVICE),
        min_ps=some(0.01, 0.4, 0.0),
    )
    return logits.to(DEVICE), rows


def check_draws(seeds: range, record) -> None:
    for seed in seeds:
        logits, rows = random_rows(seed)
        fit = torch.ones(ROWS, dtype=torch.bool, device=DEVICE)
        expected = sampler.draw(logits, rows, fit)
        assert torch.equal(token_draws.draw(logits, rows, fit), expected), seed
        found = token_draws.chosen_logprobs(logits, expected, rows.logprobs)
        assert (found - sampler.chosen_logprobs(logits, expected, rows.logprobs)).abs().max() < 1e-5
    record("size", f"triton sampling: {len(seeds)} random batches of {WHOLE}, {ROWS} rows each")


def test_draws_what_the_worker_draws(record_property):
    """Greedy, temperature, min-p, top-k, top-p and ties: token for token, and their log probabilities; a sample."""
    check_draws(range(QUICK), record_property)


@pytest.mark.long
def test_draws_what_the_worker_draws_in_every_batch(record_property):
    """The same over all random batches."""
    check_draws(range(WHOLE), record_property)


@pytest.mark.parametrize("spread", [0.01, 3.0, 300.0], ids=["flat", "usual", "steep"])
def test_filters_that_leave_many_tokens_or_few(spread):
    """Of 9,001 tokens more than are gathered, as many as are, or one; some far below the others."""
    rng = torch.Generator().manual_seed(3)
    logits = torch.randn(ROWS, 9001, generator=rng) * spread
    logits[:, ::5] = -1e30
    count = range(ROWS)
    rows = sampler.SamplingRows(
        temperatures=torch.ones(ROWS, device=DEVICE),
        top_ks=torch.tensor([0, 1, 3, 1024, 1025, 3000, 9001, 0], device=DEVICE),
        top_ps=torch.tensor([0.9, 1.0, 0.5, 1.0, 1.0, 0.7, 0.999, 0.1], device=DEVICE),
        seeds=torch.tensor([*count], device=DEVICE),
        sequence_indexes=torch.tensor([*count], device=DEVICE),
        positions=torch.tensor([*count], device=DEVICE),
        logprobs=torch.ones(ROWS, dtype=torch.bool, device=DEVICE),
        min_ps=torch.tensor([0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.5], device=DEVICE),
    )
    logits, fit = logits.to(DEVICE), torch.ones(ROWS, dtype=torch.bool, device=DEVICE)
    assert torch.equal(token_draws.draw(logits, rows, fit), sampler.draw(logits, rows, fit))


def test_the_highest_logit_and_whether_all_are_finite():
    """The first one if tied, over several pieces; NaN and infinities of either sign in any place are told."""
    for vocab in (5, 4096, 9001):
        logits = (torch.randn(6, vocab, generator=torch.Generator().manual_seed(vocab)) * 4).round().to(DEVICE)
        logits[1, vocab - 1] = float("nan")
        logits[2, 0] = float("-inf")
        logits[3, vocab // 2] = float("inf")
        tokens, finite = token_draws.choose(logits)
        assert finite.tolist() == [True, False, False, False, True, True]
        assert tokens[finite].tolist() == logits[finite].argmax(-1).tolist()


def test_a_row_does_not_depend_on_its_batch():
    """A row drawn alone, from a slice of a wider tensor, is drawn as in its batch; without min_ps too."""
    logits, rows = random_rows(2)
    rows = dataclasses.replace(rows, min_ps=None)
    fit = torch.ones(ROWS, dtype=torch.bool, device=DEVICE)
    expected = sampler.draw(logits, rows, fit)
    wide = torch.cat([logits, logits], 1)[:, : logits.shape[1]]
    for i in range(0, ROWS, 2):
        columns = {f.name: getattr(rows, f.name) for f in dataclasses.fields(rows)}
        one = sampler.SamplingRows(**{name: None if x is None else x[i : i + 1] for name, x in columns.items()})
        assert token_draws.draw(wide[i : i + 1], one, fit[i : i + 1]).item() == expected[i].item()


def test_invalid_rows_disturb_no_other_row():
    """NaN in a row: its token is some id of the vocabulary, its neighbours' are theirs, its log probability is not computed."""
    logits, rows = random_rows(4)
    fit = torch.ones(ROWS, dtype=torch.bool, device=DEVICE)
    expected = sampler.draw(logits, rows, fit)
    logits[3] = float("nan")
    fit[3] = False
    found = token_draws.draw(logits, rows, fit)
    assert 0 <= found[3] < logits.shape[1]
    found[3] = expected[3]
    assert torch.equal(found, expected)
    assert token_draws.chosen_logprobs(logits, expected, fit)[3] == 0


def test_a_kernel_that_does_nothing_is_noticed(monkeypatch):
    """The comparison sees tokens of zero."""
    monkeypatch.setattr(token_draws, "draw_kernel", Idle())
    monkeypatch.setattr(token_draws.torch, "empty", torch.zeros)
    logits, rows = random_rows(1)
    fit = torch.ones(ROWS, dtype=torch.bool, device=DEVICE)
    assert not torch.equal(token_draws.draw(logits, rows, fit), sampler.draw(logits, rows, fit))
