"""Steps of the real engine: order of block moves, failures of single rows, sampling, what is counted."""

import pytest
import torch

from svc_common import wire_arrays
from svc_common.errors import InvalidArgument
from tests.support.checkpoints import make_checkpoint
from tests.support.worker.driver import Driver, Step, generate, make_engine
from worker_svc.device.devices import HOST
from worker_svc.model.cache.cache_engine import CacheEngine

PROMPT = list(b"def main(argv: list[str]) -> int:\n    return 0\n")


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    return make_engine(make_checkpoint("llama", tmp_path_factory.mktemp("checkpoint") / "llama"))


def test_moves_are_in_order(engine):
    """R3: swap in, then swap out, then copy, each reading what the one before left."""
    cache = CacheEngine(
        engine.cache.shape,
        num_layers=2,
        num_gpu_blocks=4,
        num_cpu_blocks=3,
        dtype=torch.float32,
        device=HOST,
    )
    assert not cache.device_pool.any()
    assert not cache.host_pool.any()
    cache.host_pool[:, :, 0] = 1.0
    cache.move(swap_in=[(0, 2)], swap_out=[(2, 1)], copies=[(2, 3)])
    assert (cache.host_pool[:, :, 1] == 1.0).all()
    assert (cache.device_pool[:, :, 2:] == 1.0).all()
    assert not cache.device_pool[:, :, :2].any()


def test_moves_come_before_the_model(engine):
    """A copied block is read by the same step's attention, before anything is written to its source (R3, R123)."""
    expected = generate(Driver(engine), "p", PROMPT, 12)
    driver = Driver(engine)
    row = driver.add("first", PROMPT)
    driver.run()
    source = row.blocks[:3]
    driver.remove("first")
    driver.step.copies = list(zip(source, [40, 41, 42], strict=True))
    # Another row overwrites the sources in this very step.
    driver.add("other", PROMPT[::-1], blocks=source, room=16)
    driver.add("p", PROMPT, blocks=[40, 41, 42], computed=len(PROMPT) - 1, room=16)
    driver.run()
    for _ in range(11):
        driver.run()
    assert driver.tokens["p"] == expected


def test_rows_that_are_not_finite_fail_alone(engine):
    """NaN in one row's cache: that row gets the flag and no token, its neighbour the tokens of an undisturbed run."""
    expected = generate(Driver(engine), "p", PROMPT, 10)
    driver = Driver(engine)
    bad = driver.add("bad", PROMPT[:20])
    driver.add("p", PROMPT, room=16)
    driver.run()
    engine.cache.device_pool[:, :, bad.blocks[0]] = float("nan")
    outputs = driver.run()
    assert sorted(wire_arrays.unpack(outputs.flags, "flags", wire_arrays.U8).tolist()) == [0, 1]
    assert (driver.flags["bad"], len(driver.tokens["bad"])) == (1, 1)
    driver.remove("bad")
    for _ in range(8):
        driver.run()
    assert driver.tokens["p"] == expected
    engine.cache.device_pool.zero_()


def test_stale_nan_in_a_block_does_not_leak(engine):
    """A block that comes back into use full of NaN changes nothing: what is beyond a row's tokens is never read."""
    expected = generate(Driver(engine), "p", PROMPT, 10)
    engine.cache.device_pool.fill_(float("nan"))
    assert generate(Driver(engine), "p", PROMPT, 10) == expected
    engine.cache.device_pool.zero_()


def test_sampling_depends_on_seed_and_sequence_alone(engine):
    """Equal seeds and indexes give equal tokens in any company; others give others."""
    options = {"temperature": 1.0, "top_p": 0.95, "top_k": 200}
    alone = generate(Driver(engine), "p", PROMPT, 16, seed=5, sequence_index=1, **options)
    driver = Driver(engine)
    driver.add("greedy", PROMPT, room=16)
    driver.add("p", PROMPT, seed=5, sequence_index=1, room=16, **options)
    driver.add("seed", PROMPT, seed=6, sequence_index=1, room=16, **options)
    driver.add("index", PROMPT, seed=5, sequence_index=2, room=16, **options)
    for _ in range(16):
        driver.run()
    assert driver.tokens["p"] == alone
    assert len({tuple(tokens) for tokens in driver.tokens.values()}) == 4


def test_unasked_logprobs_are_not_sent(engine):
    """Empty column when no row asked; 0 for rows that did not (worker.proto)."""
    driver = Driver(engine)
    driver.add("a", PROMPT, logprobs=0)
    assert driver.run().logprobs == b""
    driver.add("b", PROMPT, logprobs=1)
    found = wire_arrays.unpack(driver.run().logprobs, "logprobs", wire_arrays.F32)
    assert found[0] == 0
    assert found[1] < 0


def test_counts_and_timings(engine):
    """Computed tokens are counted by the worker; a chunk that does not reach the end yields nothing; times are filled."""
    driver = Driver(engine)
    driver.add("p", PROMPT, 10)
    first = driver.run()
    assert (first.num_computed_tokens, first.rows) == (10, b"")
    driver.compute("p")
    second = driver.run()
    assert second.num_computed_tokens == len(PROMPT) - 10
    assert min(second.timings.prepare_ns, second.timings.model_ns, second.timings.sample_ns) > 0
    driver.pause("p")
    idle = driver.run()
    assert (idle.num_computed_tokens, idle.rows) == (0, b"")


def test_bad_steps_change_nothing(engine):
    """A step that is refused leaves rows and cache as they were."""
    expected = generate(Driver(engine), "p", PROMPT, 4)
    driver = Driver(engine)
    driver.add("p", PROMPT, room=16)
    driver.run()
    good = Step()
    for bad in (Step(copies=[(0, 10_000)]), Step(removed=[77]), Step(swap_in=[(5_000, 1)])):
        driver.step = bad
        with pytest.raises(InvalidArgument):
            driver.run()
    driver.step = good
    for _ in range(3):
        driver.run()
    assert driver.tokens["p"] == expected


def test_a_step_that_breaks_spares_the_engine(engine, monkeypatch):
    """An error inside the model voids the step; after removal of its rows the engine goes on."""
    expected = generate(Driver(engine), "p", PROMPT, 4)
    driver = Driver(engine)
    driver.add("p", PROMPT)
    with monkeypatch.context() as patch:
        patch.setattr("worker_svc.executor.step_runner.plan_draws", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            driver.run()
    driver.step = Step()
    driver.remove("p")
    driver.run()
    assert generate(driver, "p", PROMPT, 4) == expected


def test_reference_backend_agrees(engine, tmp_path):
    """The whole engine on the oracle kernels gives the same greedy tokens."""
    reference = make_engine(make_checkpoint("llama", tmp_path / "llama"), backend="reference")
    assert not reference.invariant
    assert generate(Driver(reference), "p", PROMPT, 24) == generate(Driver(engine), "p", PROMPT, 24)
