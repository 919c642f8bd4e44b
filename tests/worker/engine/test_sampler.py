"""Sampling is a pure function of (seed, sequence index, position, logits) per row."""

import math

import numpy as np
import pytest
import torch

from tests.support.worker.sampled_rows import likelihood
from worker_svc.sampling import sampler
from worker_svc.sampling.sampler import SampledTokens, SamplingRows, sample, uniform

VOCAB = 12
FIRST_UNIFORM = 0.5153183665199179


def rows_of(n: int, **columns) -> SamplingRows:
    kinds = {
        "temperatures": (1.0, torch.float32),
        "top_ks": (0, torch.int64),
        "top_ps": (1.0, torch.float32),
        "seeds": (7, torch.int64),
        "sequence_indexes": (0, torch.int64),
        "positions": (range(n), torch.int64),
        "logprobs": (False, torch.bool),
    }
    made = {}
    for name, (default, dtype) in kinds.items():
        value = columns.get(name, default)
        made[name] = torch.tensor([value] * n if isinstance(value, (int, float)) else list(value), dtype=dtype)
    return SamplingRows(**made)


def reference_distribution(logits, temperature, top_k, top_p) -> list[float]:
    """Plain Python, in float64: temperature, then top-k, then top-p of what is left."""
    scaled = [x / temperature for x in logits]
    top = max(scaled)
    weights = [math.exp(x - top) for x in scaled]
    order = sorted(range(len(logits)), key=lambda i: (-weights[i], i))
    kept = order[:top_k] if top_k else order
    total, mass, chosen = sum(weights[i] for i in kept), 0.0, []
    for i in kept:
        if chosen and mass / total >= top_p:
            break
        chosen.append(i)
        mass += weights[i]
    return [weights[i] / mass if i in chosen else 0.0 for i in range(len(logits))]


def logits_of(seed: int, n: int = 1) -> torch.Tensor:
    return torch.randn(n, VOCAB, generator=torch.Generator().manual_seed(seed)) * 2


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p"),
    [(1.0, 0, 1.0), (0.7, 0, 0.8), (1.5, 5, 1.0), (1.0, 6, 0.9), (1.2, 3, 0.9), (2.0, 0, 0.3)],
)
def test_frequencies_are_those_of_the_reference(temperature, top_k, top_p):
    """Chi-square over 40,000 draws against plain Python; nothing outside the kept set is ever drawn."""
    draws = 40_000
    logits = logits_of(3)[0]
    expected = np.array(reference_distribution(logits.tolist(), temperature, top_k, top_p))
    rows = rows_of(draws, temperatures=temperature, top_ks=top_k, top_ps=top_p)
    counts = np.bincount(sample(logits.expand(draws, -1), rows).token_ids.numpy(), minlength=VOCAB)
    assert likelihood(counts, expected) > 0.001


def test_uniforms_are_uniform_and_unrelated():
    """Over positions, sequences and seeds alike: right mean and variance, no repeats, no correlation of neighbours."""
    n = 50_000
    count, zeros = torch.arange(n), torch.zeros(n, dtype=torch.int64)
    streams = [uniform(zeros, zeros, count), uniform(zeros, count, zeros), uniform(count, zeros, zeros)]
    for x in streams:
        assert abs(float(x.mean()) - 0.5) < 0.006
        assert abs(float(x.var()) - 1 / 12) < 0.002
        assert len(x.unique()) == n
        assert abs(float(torch.corrcoef(torch.stack([x[1:], x[:-1]]))[0, 1])) < 0.02
        assert float(x.min()) >= 0
        assert float(x.max()) < 1
    correlations = torch.corrcoef(torch.stack(streams)) - torch.eye(3)
    assert float(correlations.abs().max()) < 0.02


def test_seeds_use_all_64_bits():
    """Seeds that differ in one bit, the highest too, give other numbers."""
    seeds = torch.from_numpy(np.array([0, *(1 << i for i in range(64))], np.uint64).view(np.int64))
    zeros = torch.zeros(65, dtype=torch.int64)
    assert len(uniform(seeds, zeros, zeros).unique()) == 65


def splitmix_uniform(seed: int, sequence_index: int, position: int) -> float:
    """The generator written with Python's integers."""
    mask, golden = 2**64 - 1, 0x9E3779B97F4A7C15

    def mix(x: int) -> int:
        x &= mask
        x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & mask
        x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & mask
        return x ^ (x >> 31)

    state = mix(mix(seed + golden) ^ mix(sequence_index + 0xBF58476D1CE4E5B9))
    return (mix(state + (position + 1) * golden) >> 12) * 2.0**-52


def test_stream_is_fixed():
    """The stream is part of the contract: a resumed request must get the same tokens from any release and device."""
    columns = ([0, 1, -1, 2**63 - 1], [0, 2, 3, 0], [0, 5, 2**31, 100])
    found = uniform(*(torch.tensor(column) for column in columns)).tolist()
    assert found == [splitmix_uniform(*row) for row in zip(*columns, strict=True)]
    assert found[0] == FIRST_UNIFORM


def test_company_changes_nothing():
    """A row's token and logprob are bitwise the same alone and among others of every kind."""
    n = 40
    logits = logits_of(1, n)
    columns = {
        "temperatures": [0.0, 0.5, 1.0, 2.0] * 10,
        "top_ks": [0, 3, 0, 1, 20] * 8,
        "top_ps": [1.0, 0.9, 0.4, 1.0] * 10,
        "seeds": range(n),
        "sequence_indexes": [0, 1] * 20,
        "logprobs": [True, False, True, True, False] * 8,
    }
    together = sample(logits, rows_of(n, **columns))
    for i in range(n):
        one = {name: [list(column)[i]] for name, column in columns.items()}
        alone = sample(logits[i : i + 1], rows_of(1, positions=[i], **one))
        assert same(alone, together, i)


def same(alone: SampledTokens, together: SampledTokens, i: int) -> bool:
    return all(
        torch.equal(getattr(alone, name), getattr(together, name)[i : i + 1])
        for name in ("token_ids", "finite", "logprobs")
    )


def test_greedy_and_ties():
    """Temperature 0, and anything that would overflow, is greedy; ties go to the lower id; top_k 1 is greedy too."""
    logits = torch.tensor([[1.0, 3.0, 3.0, 0.0]]).repeat(3, 1)
    drawn = sample(logits, rows_of(3, temperatures=[0.0, 1e-6, 1.0], top_ks=[0, 0, 1]))
    assert drawn.token_ids.tolist() == [1, 1, 1]


def test_logprobs_are_of_the_unmodified_distribution():
    """Natural logarithm of softmax(logits), whatever temperature, top-k and top-p did; 0 where not asked."""
    logits = logits_of(9, 4)
    drawn = sample(logits, rows_of(4, temperatures=[0.0, 0.2, 3.0, 1.0], top_ks=2, top_ps=0.5, logprobs=[1, 1, 1, 0]))
    expected = torch.log_softmax(logits.double(), -1).gather(1, drawn.token_ids[:, None])[:, 0]
    assert torch.allclose(drawn.logprobs[:3].double(), expected[:3], atol=1e-6)
    assert drawn.logprobs[3] == 0


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_rows_that_are_not_finite_fail_alone(bad):
    """The row is flagged; its neighbours draw what they draw without it."""
    logits = logits_of(2, 6)
    rows = rows_of(6, temperatures=[0.0, 1.0, 1.0, 1.0, 0.0, 1.0], top_ps=[1.0, 1.0, 0.5, 1.0, 1.0, 0.7], logprobs=True)
    clean = sample(logits, rows)
    logits[2, 5] = bad
    spoiled = sample(logits, rows)
    assert spoiled.finite.tolist() == [True, True, False, True, True, True]
    kept = [0, 1, 3, 4, 5]
    assert torch.equal(spoiled.token_ids[kept], clean.token_ids[kept])
    assert torch.equal(spoiled.logprobs[kept], clean.logprobs[kept])


@pytest.mark.parametrize("at_once", [1, 2, 5])
def test_rows_drawn_for_in_pieces_get_what_they_get_together(monkeypatch, at_once):
    """However few logits are looked at together: greedy rows, plain draws and filtered ones, mixed."""
    n = 9
    columns = {
        "temperatures": [0.0, 0.7, 1.0] * 3,
        "top_ks": [0, 0, 0, 4, 4, 4, 0, 0, 0],
        "top_ps": [1.0] * 6 + [0.6] * 3,
        "logprobs": True,
    }
    logits = logits_of(11, n)
    together = sample(logits, rows_of(n, **columns))
    monkeypatch.setattr(sampler, "_MOST_DRAWN_AT_ONCE", at_once * VOCAB)
    assert sampler.rows_at_once(VOCAB) == at_once
    apart = sample(logits, rows_of(n, **columns))
    assert torch.equal(apart.token_ids, together.token_ids)
    assert torch.equal(apart.logprobs, together.logprobs)
