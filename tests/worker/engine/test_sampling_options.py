"""Every sampling option against its plain meaning, one row at a time (sampled_rows.py), on random logits."""

import math
import random
from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers import RepetitionPenaltyLogitsProcessor

from tests.support.worker.sampled_rows import CLOSED, VOCAB, Options, ToyMasks, distribution, draw, likelihood, shaped

OUTPUT = [5, 6, 5, 7, 5, 9, 6]
CASES = {
    "nothing": Options(),
    "temperature": Options(temperature=0.6),
    "temperature above 1": Options(temperature=1.8),
    "top-k": Options(top_k=6),
    "top-p": Options(top_p=0.7),
    "top-k, top-p": Options(top_k=9, top_p=0.8, temperature=1.2),
    "min-p": Options(min_p=0.1),
    "min-p after temperature": Options(min_p=0.01, temperature=0.6),
    "min-p, top-k, top-p": Options(min_p=0.03, top_k=8, top_p=0.8, temperature=1.3),
    "repetition": Options(prompt=[1, 2, 3, 4], output=OUTPUT, repetition=1.7),
    "repetition below 1": Options(prompt=[1, 2, 3, 4], output=OUTPUT, repetition=0.6),
    "presence": Options(output=OUTPUT, presence=1.5),
    "negative presence": Options(output=OUTPUT, presence=-1.5),
    "frequency": Options(output=OUTPUT, frequency=0.7),
    "all penalties": Options(output=OUTPUT, repetition=1.3, presence=0.4, frequency=-0.3, temperature=0.8),
    "bias": Options(bias={5: 2.0, 9: -3.0, 11: -100.0}),
    "allowed": Options(allowed=[3, 9, 12, 39, 0]),
    "bad words": Options(output=[4, 5, 6], bad_words=[[8], [5, 6, 2], [6, 30], [4, 6, 31], [3, 4, 5, 6, 32]]),
    "min_tokens": Options(output=[4, 5], min_tokens=3, ends=[0, 12]),
    "min_tokens reached": Options(output=[4, 5, 6], min_tokens=3, ends=[0, 12]),
    "grammar": Options(output=[4, 5], grammar=True),
    "bias on a closed token": Options(allowed=[3, 9], bias={3: -1.0, 10: 100.0}),
    "everything": Options(
        output=OUTPUT,
        temperature=0.9,
        top_k=20,
        top_p=0.95,
        min_p=0.01,
        repetition=1.2,
        presence=0.3,
        frequency=0.1,
        bias={6: 1.0, 14: 2.0},
        allowed=list(range(2, 38)),
        bad_words=[[6, 12], [15]],
        min_tokens=10,
        ends=[21],
        grammar=True,
    ),
}
NO_CHANGE = ("nothing", "min_tokens reached")
SUBTLE = ("all penalties", "bad words")
"""Seen in many draws only."""
QUICK, WHOLE = 1_000, 4_000


def logits_of(seed: int, n: int = 1) -> torch.Tensor:
    return torch.randn(n, VOCAB, generator=torch.Generator().manual_seed(seed)) * 2


@pytest.mark.parametrize("draws", [QUICK, pytest.param(WHOLE, marks=pytest.mark.long)])
@pytest.mark.parametrize("case", CASES)
def test_frequencies_are_those_of_the_plain_meaning(case: str, draws: int) -> None:
    """Chi-square at the 99.9 % level, nothing that is closed ever drawn; and without the option they are not."""
    options, draws = CASES[case], WHOLE if case in SUBTLE else draws
    logits = logits_of(3)[0]
    rows = [replace(options, seed=11, index=i) for i in range(draws)]
    counts = np.bincount(draw(rows, logits.expand(draws, -1)).token_ids, minlength=VOCAB)
    assert likelihood(counts, np.array(distribution(logits.tolist(), options))) > 0.001
    if case not in NO_CHANGE:
        assert likelihood(counts, np.array(distribution(logits.tolist(), Options()))) < 1e-6


@pytest.mark.parametrize("case", CASES)
def test_greedy_and_candidates_honour_what_shapes_the_logits(case: str) -> None:
    """The best token and the beam's best tokens of log_softmax of the shaped logits, without temperature and filters."""
    logits = logits_of(5)
    expected = torch.tensor(shaped(logits[0].tolist(), CASES[case]), dtype=torch.float64)
    greedy = draw([replace(CASES[case], temperature=0.0)], logits)
    assert greedy.token_ids.tolist() == [int(expected.argmax())]
    beam = draw([replace(CASES[case], num_candidates=4)], logits)
    best = torch.log_softmax(expected, -1).topk(min(4, int((expected > CLOSED).sum())))
    found = beam.candidates
    assert (len(beam.token_ids), beam.beams.tolist(), found.counts.tolist()) == (0, [0], [len(best.indices)])
    ids, logprobs = found.flat()
    assert ids.tolist() == best.indices.tolist()
    np.testing.assert_allclose(logprobs, best.values.numpy(), atol=1e-5)


def random_options(rng: random.Random) -> Options:
    """Each option on or off."""

    def sometimes(value: object, off: object) -> object:
        return value if rng.random() < 0.4 else off

    tokens = range(VOCAB)
    return Options(
        prompt=rng.choices(tokens, k=rng.randint(1, 9)),
        output=rng.choices(tokens, k=rng.randint(0, 12)),
        temperature=rng.choice([0.0, 0.4, 1.0, 1.6]),
        top_k=sometimes(rng.randint(1, 20), 0),
        top_p=sometimes(rng.uniform(0.3, 1), 1.0),
        min_p=sometimes(rng.uniform(0, 0.3), 0.0),
        repetition=sometimes(rng.uniform(0.5, 2), 1.0),
        presence=sometimes(rng.uniform(-2, 2), 0.0),
        frequency=sometimes(rng.uniform(-2, 2), 0.0),
        bias=sometimes({token: rng.uniform(-5, 5) for token in rng.sample(tokens, 4)}, {}),
        allowed=sometimes(rng.sample(tokens, 25), []),
        bad_words=sometimes([rng.choices(tokens, k=rng.randint(1, 2)) for _ in range(30)], []),
        min_tokens=rng.randint(0, 10),
        ends=sometimes(rng.sample(tokens, 2), []),
        grammar=rng.random() < 0.3,
        num_tops=sometimes(rng.randint(1, 6), 0),
        seed=rng.getrandbits(64),
        index=rng.randint(0, 3),
    )


@pytest.mark.parametrize("batches", [1, pytest.param(4, marks=pytest.mark.long)])
def test_a_row_is_the_same_alone_and_among_63_others_and_means_what_it_says(batches: int) -> None:
    """Bitwise: token, log probability, likeliest tokens; and a greedy row's token is the plain meaning's."""
    rng = random.Random(7)
    for seed in range(batches):
        rows, logits = [random_options(rng) for _ in range(64)], logits_of(seed, 64)
        together = draw(rows, logits)
        for i, options in enumerate(rows):
            alone = draw([options], logits[i : i + 1])
            assert alone.token_ids[0] == together.token_ids[i]
            assert alone.logprobs[0] == together.logprobs[i]
            tops = together.tops.taken(np.array([i]))
            assert [a.tolist() for a in alone.tops.flat()] == [t.tolist() for t in tops.flat()]
            chances = distribution(logits[i].tolist(), replace(options, temperature=options.temperature or 1.0))
            assert options.temperature == 0.0 or chances[together.token_ids[i]] > 0
            if options.temperature == 0.0:
                assert together.token_ids[i] == int(np.argmax(shaped(logits[i].tolist(), options)))


def test_repetition_penalty_equals_transformers() -> None:
    known, logits = [1, 2, 3, *OUTPUT], logits_of(8)
    expected = RepetitionPenaltyLogitsProcessor(1.7)(torch.tensor([known]), logits.clone())
    beam = draw([Options(output=OUTPUT, repetition=1.7, num_candidates=VOCAB)], logits)
    ids, logprobs = beam.candidates.flat()
    np.testing.assert_allclose(logprobs, torch.log_softmax(expected, -1)[0, ids.astype(np.int64)].numpy(), atol=1e-5)


def test_log_probabilities_are_of_the_unmodified_distribution() -> None:
    """Chosen and likeliest, whatever the rules did; ties go to the lower id."""
    logits = logits_of(9)
    logits[0, 30] = logits[0, 20] = logits[0].max() + 1
    drawn = draw([replace(CASES["everything"], num_tops=5)], logits)
    plain = torch.log_softmax(logits[0].double(), -1).numpy()
    assert drawn.logprobs[0] == pytest.approx(plain[drawn.token_ids[0]], abs=1e-5)
    ids, logprobs = drawn.tops.flat()
    assert ids.tolist() == sorted(range(VOCAB), key=lambda i: (-float(logits[0, i]), i))[:5]
    np.testing.assert_allclose(logprobs, plain[ids], atol=1e-5)


def test_children_share_the_logits_and_draw_by_their_own_index() -> None:
    logits = logits_of(4, 2)
    drawn = draw([Options(seed=3, index=2, num_children=4, num_tops=2), Options(seed=3)], logits)
    alone = [draw([Options(seed=3, index=index)], logits[:1]).token_ids[0] for index in (2, 3, 4, 5)]
    assert drawn.token_ids[:4].tolist() == alone
    assert len(set(alone)) > 1
    assert drawn.tops.counts.tolist() == [2, 2, 2, 2, 0]


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_row_that_is_not_finite_changes_nothing_for_others(bad: float) -> None:
    rows, logits = [random_options(random.Random(seed)) for seed in range(12)], logits_of(2, 12)
    rows[5] = replace(rows[5], repetition=1.4, allowed=[1, 2, 3], num_tops=3)
    clean = draw(rows, logits)
    logits[5, 7] = bad
    spoiled = draw(rows, logits)
    assert spoiled.finite.tolist() == [i != 5 for i in range(12)]
    kept = np.delete(np.arange(12), 5)
    assert spoiled.token_ids[kept].tolist() == clean.token_ids[kept].tolist()
    assert spoiled.logprobs[kept].tolist() == clean.logprobs[kept].tolist()
    assert [a.tolist() for a in spoiled.tops.taken(kept).flat()] == [a.tolist() for a in clean.tops.taken(kept).flat()]


@pytest.mark.parametrize(
    "options",
    [
        Options(grammar=True, temperature=0.0),
        Options(allowed=[4, 5], bad_words=[[4], [5]]),
        Options(allowed=[4], min_tokens=1, ends=[4], num_candidates=3),
    ],
    ids=["grammar", "allowed and bad words", "min_tokens"],
)
def test_a_row_with_no_token_left_is_closed_alone(options: Options) -> None:
    logits = logits_of(6, 3)
    drawn = draw([Options(seed=1), options, Options(seed=2)], logits, ToyMasks(refused=[1]))
    assert drawn.opens.tolist() == [True, False, True]
    assert not len(drawn.beams)
    own = [draw([Options(seed=seed)], logits[i : i + 1]).token_ids[0] for seed, i in ((1, 0), (2, 2))]
    found = [drawn.token_ids[0], drawn.token_ids[-1]]
    assert found == own
