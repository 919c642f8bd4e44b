"""The whole worker engine with Triton's kernels: greedy tokens of models/tiny through a chunk, a swap and a copy."""

import random

import pytest
import torch

from paged_kernels.gpu import backend as triton_backend
from paged_kernels.gpu import block_moves
from tests.kernels.triton.cases import DEVICE
from tests.kernels.triton.test_attention import Idle
from tests.support.tree import ROOT
from tests.support.worker.driver import BLOCK_SIZE, Driver, generate, make_engine
from worker_svc.executor.model_engine import ModelEngine

# `make test` has steps of every kind with these kernels in `tests/worker/fake_cuda`.
pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(DEVICE.type != "cpu", reason="the worker's own tests run on the device"),
    # What the interpreter says, through numpy, of rows that are NaN; the engine flags them.
    pytest.mark.filterwarnings("ignore:All-NaN slice"),
]
QUICK, WHOLE = (40, 4), (300, 24)
CHUNK = 37


def engine(backend: str, **settings: object) -> ModelEngine:
    return make_engine(ROOT / "models" / "tiny", backend=backend, dtype="float32", **settings)


def prompt_of(length: int) -> list[int]:
    rng = random.Random(length)
    return [rng.randrange(4096) for _ in range(length)]


def disturbed(made: ModelEngine, prompt: list[int], num_tokens: int) -> list[int]:
    """Tokens of a run whose prompt comes in two chunks, beside a neighbour; after two tokens its blocks go to the host and come
    back elsewhere, after the next they are copied. Whatever they left is filled with NaN."""
    driver, pool = Driver(made), made.cache.device_pool
    pool.fill_(float("nan"))
    driver.add("p", prompt, CHUNK)
    driver.add("neighbour", prompt[:20], room=100)
    driver.run()
    for _ in range(2):
        driver.compute("p")
        driver.run()
    driver.remove("neighbour")
    row = driver.remove("p")
    places = list(range(len(row.blocks)))
    driver.step.swap_out = list(zip(row.blocks, places[::-1], strict=True))
    driver.run()
    pool[:, :, row.blocks] = float("nan")
    blocks = [100 + 2 * i for i in places]
    driver.step.swap_in = list(zip(places[::-1], blocks, strict=True))
    join(driver, row.token_ids, len(prompt), blocks)
    driver.remove("p")
    copies = [99 + 2 * i for i in places]
    driver.step.copies = list(zip(blocks, copies, strict=True))
    join(driver, driver_tokens(driver, prompt), len(prompt), copies)
    pool[:, :, blocks] = float("nan")
    while len(driver.tokens["p"]) < num_tokens and not driver.flags["p"]:
        driver.compute("p")
        driver.run()
    return driver.tokens["p"]


def driver_tokens(driver: Driver, prompt: list[int]) -> list[int]:
    return prompt + driver.tokens["p"]


def join(driver: Driver, token_ids: list[int], num_prompt: int, blocks: list[int]) -> None:
    """The row is there again with its computed tokens in `blocks`."""
    driver.add("p", token_ids, blocks=blocks, computed=len(token_ids) - 1, num_prompt=num_prompt, room=BLOCK_SIZE)
    driver.run()


def check(size: tuple[int, int], record) -> None:
    length, num_tokens = size
    prompt = prompt_of(length)
    expected = generate(Driver(engine("cpu")), "p", prompt, num_tokens)
    assert len(set(expected)) > num_tokens // 3
    made = engine("cuda")
    assert made.backend == "cuda"
    assert not made.invariant
    assert disturbed(made, prompt, num_tokens) == expected
    record("size", f"triton worker: prompt of {length}, {num_tokens} tokens (whole: {WHOLE[0]}, {WHOLE[1]})")


@pytest.mark.parametrize("size", [QUICK, WHOLE])
def test_greedy_tokens_are_those_of_the_cpu_backend(size, record_property):
    """R3, R18, R123: with a chunk, a swap, a copy and poisoned blocks in the run."""
    check(size, record_property)


@pytest.mark.parametrize(
    ("name", "length"),
    # Parts are combined where one tile's keys are divided: more than the 64 of one iteration.
    [("attention_kernel", QUICK[0]), ("combine_kernel", 150), ("write_kernel", QUICK[0]), ("move_kernel", QUICK[0])],
)
def test_a_kernel_replaced_by_zeros_changes_the_tokens(name, length, monkeypatch):
    """Each kernel matters to what comes out."""
    prompt = prompt_of(length)
    expected = generate(Driver(engine("cpu")), "p", prompt, QUICK[1])
    made = engine("cuda", fuse=name != "write_kernel")  # a program writes to the cache with its rotations
    # What a kernel that does nothing leaves: zeros, not what lay in that memory before.
    monkeypatch.setattr(triton_backend.torch, "empty_like", torch.zeros_like)
    monkeypatch.setattr(triton_backend.torch, "empty", torch.zeros)
    monkeypatch.setattr(torch.Tensor, "new_empty", torch.Tensor.new_zeros)
    monkeypatch.setattr(block_moves if name in {"write_kernel", "move_kernel"} else triton_backend, name, Idle())
    assert disturbed(made, prompt, QUICK[1]) != expected
