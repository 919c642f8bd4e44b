"""The engine on real checkpoints gives what `transformers.generate` gives."""

import random

import pytest

from tests.support.checkpoints import FAMILIES
from tests.support.worker.driver import BLOCK_SIZE, Driver, generate, ids_of

PROMPT_LENGTHS = (1, 15, 16, 17, 61)
NEW_TOKENS = 32
# The others are in test_families.py too, which does all of this and more, at less length.
_QUICK = ("llama", "gpt2")


def prompts_of(seed: int) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(256) for _ in range(n)] for n in PROMPT_LENGTHS]


@pytest.fixture(
    scope="module",
    params=[family if family in _QUICK else pytest.param(family, marks=pytest.mark.long) for family in FAMILIES],
)
def world(request, families):
    """An engine, and what transformers makes of each prompt."""
    family = families[request.param]
    return family.engine, [family.greedy(prompt, NEW_TOKENS) for prompt in prompts_of(1)]


def check(driver: Driver, expected) -> None:
    for i, made in enumerate(expected):
        assert len(driver.tokens[f"p{i}"]) == NEW_TOKENS
        made.check(driver.tokens[f"p{i}"], driver.logprobs[f"p{i}"])


def test_one_by_one(world):
    """Greedy tokens equal those of `generate`, logprobs within 1e-4; the outputs are diverse enough for the comparison to count."""
    engine, expected = world
    driver = Driver(engine)
    for i, prompt in enumerate(prompts_of(1)):
        generate(driver, f"p{i}", prompt, NEW_TOKENS)
    check(driver, expected)
    assert min(len(set(made.token_ids)) for made in expected) >= 12


def test_mixed_batch_with_chunks_and_late_arrivals(world):
    """With prefill, chunked prefill and decode in the same steps, tokens and logprobs equal those of `generate`."""
    engine, expected = world
    driver, rng = Driver(engine), random.Random(3)
    waiting = list(enumerate(prompts_of(1)))
    while waiting or driver.rows:
        for name, row in list(driver.rows.items()):
            left = len(row.token_ids) - row.computed
            driver.compute(name, left if left == 1 else rng.randint(1, left))
        if waiting and rng.random() < 0.4:
            i, prompt = waiting.pop()
            driver.add(f"p{i}", prompt, rng.randint(1, len(prompt)))
        driver.run()
        for name in [name for name in driver.rows if len(driver.tokens[name]) == NEW_TOKENS]:
            driver.remove(name)
    check(driver, expected)


def test_corrupt_block_changes_output(world):
    """Attention reads the cache: corrupting one block changes the tokens."""
    engine, expected = world
    prompt = prompts_of(1)[4]
    driver = Driver(engine)
    row = driver.add("p", prompt)
    driver.run()
    engine.cache.device_pool[:, :, ids_of(engine, row.blocks[2:3])] += 1.0  # within every window
    for _ in range(NEW_TOKENS - 1):
        driver.compute("p")
        driver.run()
    assert driver.tokens["p"] != expected[4].token_ids


def test_prefix_hit_computes_only_the_rest(world):
    """A prompt with cached first blocks computes only the rest, with the same tokens; the worker reports the number computed."""
    engine, expected = world
    prompt = prompts_of(1)[4]
    driver = Driver(engine)
    row = driver.add("first", prompt)
    driver.run()
    before, hit = driver.num_computed, 3 * BLOCK_SIZE
    driver.add("p", prompt, blocks=row.blocks[:3], computed=hit)
    driver.remove("first")
    driver.run()
    assert driver.num_computed - before == len(prompt) - hit
    for _ in range(NEW_TOKENS - 1):
        driver.compute("p")
        driver.run()
    assert driver.tokens["p"] == expected[4].token_ids


def test_multi_step(world):
    """Several decode steps in one message give the same tokens as single ones."""
    engine, expected = world
    driver = Driver(engine)
    prompt = prompts_of(1)[1]
    driver.add("p", prompt, blocks=[3, 1, 4, 15])
    driver.run(num_decode_steps=8)
    for _ in range(3):
        driver.run(num_decode_steps=8)
    assert driver.tokens["p"] == expected[1].token_ids
