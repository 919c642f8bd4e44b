"""Sliding windows on the worker: positions before a window are never read, so their blocks may be reused (R105)."""

import random

import pytest

from tests.support.checkpoints import SLIDING_WINDOW
from tests.support.worker.driver import BLOCK_SIZE, Driver, make_engine
from tests.worker.engine.families import Family

_NULL = 0
_FEW = SLIDING_WINDOW // BLOCK_SIZE + 2
_BACKENDS = ("cpu", "torch", "reference")


@pytest.fixture
def family(families):
    return families["mistral"]


@pytest.fixture(params=_BACKENDS)
def engine(request, family, monkeypatch):
    """Every layer has a window; compiled kernels, those in plain torch, and the oracle."""
    if request.param == "torch":
        monkeypatch.setenv("QUIRE_CPU_KERNELS", "torch")
    return make_engine(family.path, backend="reference" if request.param == "reference" else "cpu")


def prompt_of(length: int) -> list[int]:
    rng = random.Random(length)
    return [rng.randrange(256) for _ in range(length)]


def in_a_ring(engine, prompt, num_tokens: int) -> Driver:
    """A row that never holds more than `_FEW` blocks: those before its window come back as its next ones."""
    taken = iter(range(10_000))
    driver = Driver(engine, take_block=lambda: 1 + next(taken) % _FEW)
    engine.cache.device_pool.fill_(float("nan"))
    driver.add("p", prompt)
    driver.run()
    for _ in range(num_tokens - 1):
        driver.compute("p")
        driver.run()
    assert max(driver.rows["p"].blocks) <= _FEW
    return driver


def check_ring(engine, family: Family, num_tokens: int) -> None:
    prompt = prompt_of(BLOCK_SIZE)
    expected = family.greedy(prompt, num_tokens)
    driver = in_a_ring(engine, prompt, num_tokens)
    assert len(driver.tokens["p"]) == num_tokens
    expected.check(driver.tokens["p"], driver.logprobs["p"])


def test_few_blocks_are_enough(engine, family, record_property):
    """R105: window / block + 2 blocks, used over and over, give the tokens of generate."""
    check_ring(engine, family, 64)
    kernels = type(engine._loaded.model._backend).__name__
    record_property("size", f"sliding window: {_FEW} blocks of {BLOCK_SIZE} tokens for 64 tokens, {kernels}")


@pytest.mark.long
def test_few_blocks_are_enough_for_long(family, record_property):
    """R105: the same over 1,000 tokens."""
    check_ring(make_engine(family.path), family, 1000)
    record_property("size", f"sliding window: {_FEW} blocks of {BLOCK_SIZE} tokens for 1,000 tokens")


def test_a_null_block_stands_for_what_is_out_of_sight(engine, family):
    """R105: a row comes back (as after a swap) with a null block, full of NaN, for every block before its window, in chunks too."""
    prompt = prompt_of(150)
    expected = family.greedy(prompt, 20)
    driver = Driver(engine)
    engine.cache.device_pool.zero_()
    first = driver.add("first", prompt, 100)
    driver.run()
    driver.remove("first")
    engine.cache.device_pool[:, :, _NULL] = float("nan")
    hidden = (100 - SLIDING_WINDOW + 1) // BLOCK_SIZE
    table = [_NULL] * hidden + first.blocks[hidden : 100 // BLOCK_SIZE + 1]
    for block in first.blocks[:hidden]:
        engine.cache.device_pool[:, :, block] = float("nan")
    driver.add("p", prompt, 7, blocks=table, computed=100)
    driver.run()
    for _ in range(20):
        driver.compute("p")
        driver.run()
    assert hidden >= 3
    expected.check(driver.tokens["p"], driver.logprobs["p"])
    assert len(driver.tokens["p"]) == 20


def test_layers_without_a_window_need_their_blocks(families):
    """The tests above can fail: where some layers see everything, a null block spoils the row, and it alone."""
    engine = make_engine(families["gemma2"].path)
    driver = Driver(engine)
    first = driver.add("first", prompt_of(100), 99)
    driver.run()
    driver.remove("first")
    engine.cache.device_pool[:, :, _NULL] = float("nan")
    driver.add("p", prompt_of(100), blocks=[_NULL, *first.blocks[1:]], computed=99)
    driver.add("other", prompt_of(20))
    driver.run()
    assert (driver.flags["p"], driver.tokens["p"]) == (1, [])
    assert driver.flags["other"] == 0
