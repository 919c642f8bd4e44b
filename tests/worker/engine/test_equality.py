"""The engine on real checkpoints gives what `transformers.generate` gives (issue 2, Must show)."""

import random

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.checkpoints import FAMILIES, make_checkpoint
from tests.worker.engine.driver import BLOCK_SIZE, Driver, generate, make_engine

PROMPT_LENGTHS = (1, 15, 16, 17, 61)
NEW_TOKENS = 48
LOGPROB_TOLERANCE = 1e-4


def prompts_of(seed: int) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(256) for _ in range(n)] for n in PROMPT_LENGTHS]


@pytest.fixture(scope="module", params=FAMILIES)
def world(request, tmp_path_factory):
    """An engine, prompts, and what transformers makes of them: (tokens, logprobs) each."""
    path = make_checkpoint(request.param, tmp_path_factory.mktemp("checkpoint") / request.param)
    engine = make_engine(path)
    reference = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    reference.generation_config.eos_token_id = None  # the engine never stops by itself
    expected = []
    for prompt in prompts_of(1):
        made = reference.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            max_new_tokens=NEW_TOKENS,
            do_sample=False,
            output_logits=True,
            return_dict_in_generate=True,
            pad_token_id=0,
        )
        tokens = made.sequences[0, len(prompt) :]
        logprobs = torch.stack(made.logits)[:, 0].log_softmax(-1).gather(1, tokens[:, None])[:, 0]
        expected.append((tokens.tolist(), logprobs.tolist()))
    return engine, expected


def check(driver: Driver, expected) -> None:
    for i, (tokens, logprobs) in enumerate(expected):
        assert driver.tokens[f"p{i}"] == tokens
        assert max(abs(a - b) for a, b in zip(driver.logprobs[f"p{i}"], logprobs, strict=True)) < LOGPROB_TOLERANCE


def test_one_by_one(world):
    """Greedy tokens equal generate's, logprobs within 1e-4, and the outputs are diverse enough to mean something."""
    engine, expected = world
    driver = Driver(engine)
    for i, prompt in enumerate(prompts_of(1)):
        generate(driver, f"p{i}", prompt, NEW_TOKENS)
    check(driver, expected)
    assert all(len(set(tokens)) >= 15 for tokens, _ in expected)


def test_mixed_batch_with_chunks_and_late_arrivals(world):
    """Prefill, chunked prefill and decode share steps; the tokens stay those of generate."""
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
    """Attention really reads the cache: one spoiled block and the tokens are others (issue 2)."""
    engine, expected = world
    prompt = prompts_of(1)[4]
    driver = Driver(engine)
    row = driver.add("p", prompt)
    driver.run()
    engine.cache.device_pool[:, :, row.blocks[1]] += 1.0
    for _ in range(NEW_TOKENS - 1):
        driver.compute("p")
        driver.run()
    assert driver.tokens["p"] != expected[4][0]


def test_prefix_hit_computes_only_the_rest(world):
    """A prompt whose first blocks are cached computes the others alone, with the same tokens; the worker counts truly."""
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
    assert driver.tokens["p"] == expected[4][0]


def test_multi_step(world):
    """Several decode steps in one message give the same tokens."""
    engine, expected = world
    driver = Driver(engine)
    prompt = prompts_of(1)[1]
    driver.add("p", prompt, blocks=[3, 1, 4, 15])
    driver.run(num_decode_steps=8)
    for _ in range(5):
        driver.run(num_decode_steps=8)
    assert driver.tokens["p"] == expected[1][0]
