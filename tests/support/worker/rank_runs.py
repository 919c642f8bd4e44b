"""What groups of ranks are to compute as one process does: prompts, and steps over them."""

import random
from pathlib import Path

from tests.support.worker import generated
from tests.support.worker.driver import BLOCK_SIZE, Driver

LENGTHS = (1, 15, 16, 33, 61)
NEW_TOKENS = 24


def prompts() -> list[list[int]]:
    """One of each length."""
    draw = random.Random(1)
    return [[draw.randrange(256) for _ in range(length)] for length in LENGTHS]


def check(driver: Driver, path: Path, names: dict[str, list[int]], count: int = NEW_TOKENS) -> None:
    """Tokens and logprobs are those of `generate`."""
    reference = generated.reference_model(path)
    for name, prompt in names.items():
        generated.greedy(reference, prompt, count).check(driver.tokens[name], driver.logprobs[name])


def check_chunks(driver: Driver, path: Path) -> None:
    """Chunks of all prompts, which arrive one by one beside rows that decode."""
    draw = random.Random(3)
    waiting = list(enumerate(prompts()))
    while waiting or driver.rows:
        for name, row in list(driver.rows.items()):
            left = len(row.token_ids) - row.computed
            driver.compute(name, left if left == 1 else draw.randint(1, left))
        if waiting and draw.random() < 0.4:
            i, prompt = waiting.pop()
            driver.add(f"p{i}", prompt, draw.randint(1, len(prompt)))
        driver.run()
        for name in [name for name in driver.rows if len(driver.tokens[name]) == NEW_TOKENS]:
            driver.remove(name)
    check(driver, path, {f"p{i}": prompt for i, prompt in enumerate(prompts())})


def check_swaps_and_prefixes(driver: Driver, path: Path) -> None:
    """Empty steps repeat a row; its blocks are swapped out and in; another row has the first of them as its prefix."""
    prompt = prompts()[4]
    row = driver.add("a", prompt, room=2 * NEW_TOKENS)
    for _ in range(NEW_TOKENS // 2):
        driver.run()
    driver.pause("a")
    driver.step.swap_out = [(block, 1 + i) for i, block in enumerate(row.blocks)]
    driver.run()
    fresh = [driver._take() for _ in row.blocks]
    old = driver.remove("a")
    driver.step.swap_in = [(1 + i, block) for i, block in enumerate(fresh)]
    driver.add("a", old.token_ids, num_prompt=len(prompt), blocks=fresh, computed=len(old.token_ids) - 1)
    driver.run()
    while len(driver.tokens["a"]) < NEW_TOKENS:
        driver.compute("a")
        driver.run()
    shared = len(prompt) // BLOCK_SIZE
    driver.add("b", prompt, blocks=fresh[:shared], computed=shared * BLOCK_SIZE)
    driver.run()
    while len(driver.tokens["b"]) < NEW_TOKENS:
        driver.compute("b")
        driver.run()
    check(driver, path, {"a": prompt, "b": prompt})
