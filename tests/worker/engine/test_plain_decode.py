"""Repeated steps by one native call: message by message, row by row and bit by bit what the general way gives."""

import random
from dataclasses import dataclass, field

import pytest
import torch

from protos.common.v1 import common_pb2
from protos.worker.v1 import worker_pb2
from svc_common import wire_arrays
from svc_common.errors import InvalidArgument
from tests.kernels.programs import full_of_nan
from tests.support.checkpoints import make_checkpoint
from tests.support.cuda import TEST_DEVICE
from tests.support.worker.driver import BLOCK_SIZE, Driver, generate, make_engine
from worker_svc.rows.batch import RowState

pytestmark = pytest.mark.skipif(TEST_DEVICE != "cpu", reason="decode programs are the CPU backend's")

ROOM, MOST_ROWS, MOST_REQUESTS = 24, 6, 12
OTHERS = (
    {"logprobs": 1},
    {"temperature": 0.9, "seed": 3, "top_p": 0.9, "logprobs": 0},
    {"temperature": 1.0, "seed": 4, "sequence_index": 2, "logprobs": 1},
    {"temperature": 1.2, "seed": 5, "top_k": 20, "rare": {"sampling": common_pb2.ResolvedSampling(min_p=0.05)}},
    {"rare": {"sampling": common_pb2.ResolvedSampling(repetition_penalty=1.4)}},
    {"rare": {"sampling": common_pb2.ResolvedSampling(num_top_logprobs=2)}, "logprobs": 1},
)
FORMS = {
    "float32": {"dtype": "float32"},
    "bfloat16": {"dtype": "bfloat16"},
    "float32 over bfloat16": {"dtype": "float32", "kv_cache_dtype": "bfloat16"},
    "float32 over int8": {"dtype": "float32", "kv_cache_dtype": "int8"},
    "bfloat16 over fp8": {"dtype": "bfloat16", "kv_cache_dtype": "fp8"},
    "int8": {"dtype": "bfloat16", "quantization": "int8"},
    "int4": {"dtype": "float32", "quantization": "int4"},
}


@dataclass
class Life:
    """Requests that arrive, pause, fail and end at random. `results`: of each step; `states`: of all rows after it."""

    driver: Driver
    rng: random.Random
    share_of_others: float
    num_requests: int
    results: list[worker_pb2.WorkerOutputs] = field(default_factory=list)
    states: list[list[RowState]] = field(default_factory=list)
    num_made: int = 0
    paused: set[str] = field(default_factory=set)
    spoilt: set[str] = field(default_factory=set)

    def run(self) -> None:
        """Until all requests are over."""
        while self.num_made < self.num_requests or self.driver.rows:
            assert len(self.results) < 1000, "it does not come to an end"
            self._end()
            for name in list(self.driver.rows):
                self._go_on(name)
            while self.num_made < self.num_requests and len(self.driver.rows) < MOST_ROWS and self.rng.random() < 0.15:
                self._arrive()
            self._step()

    def _step(self) -> None:
        result = self.driver.run()
        result.ClearField("timings")
        self.results.append(result)
        self.states.append([self.driver.engine._rows.row(row.index) for row in self.driver.rows.values()])

    def _end(self) -> None:
        for name in list(self.driver.rows):
            if len(self.driver.tokens[name]) >= 30 or self.driver.flags.get(name):
                self.driver.remove(name)

    def _go_on(self, name: str) -> None:
        driver, rng, row = self.driver, self.rng, self.driver.rows[name]
        is_full = row.computed == len(row.blocks) * BLOCK_SIZE
        if not driver.tokens[name] or is_full or name in self.paused or rng.random() < 0.03:
            driver.compute(name, room=ROOM)
            self.paused.discard(name)
        elif rng.random() < 0.02:
            driver.pause(name)
            self.paused.add(name)
        elif rng.random() < 0.01 and not self.spoilt:
            self.spoilt.add(name)
            pool = driver.engine.cache.device_pool
            pool[:, :, row.blocks[0]] = full_of_nan((1,), pool.dtype)

    def _arrive(self) -> None:
        prompt = [self.rng.randrange(256) for _ in range(self.rng.randint(1, 40))]
        options = dict(self.rng.choice(OTHERS)) if self.rng.random() < self.share_of_others else {"logprobs": 0}
        self.driver.add(f"p{self.num_made}", prompt, self.rng.randint(1, len(prompt)), room=ROOM, **options)
        self.num_made += 1


def lived(engine, seed, num_requests, share_of_others=0.4) -> Life:
    engine.cache.device_pool.zero_()
    life = Life(Driver(engine), random.Random(seed), share_of_others, num_requests)
    life.run()
    return life


def check_equal(found: Life, expected: Life) -> None:
    for number, (one, other) in enumerate(zip(found.results, expected.results, strict=True)):
        assert one == other, number
    assert found.states == expected.states
    assert found.driver.tokens == expected.driver.tokens
    for name, by_position in expected.driver.logits.items():
        assert found.driver.logits[name].keys() == by_position.keys()
        for position, logits in by_position.items():
            torch.testing.assert_close(found.driver.logits[name][position], logits, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(
    ("seeds", "num_requests"),
    [(range(1), 6), pytest.param(range(30), MOST_REQUESTS, marks=pytest.mark.long)],
    ids=["one", "many"],
)
@pytest.mark.parametrize("form", FORMS)
def test_both_ways_are_equal(form, seeds, num_requests, families, monkeypatch):
    """In random lives of greedy and other rows, messages, row states and logits are bitwise those of the general way."""
    engine = make_engine(families["llama"].path, **FORMS[form])
    plain, num_failed = 0, 0
    for seed in seeds:
        found = lived(engine, seed, num_requests)
        with monkeypatch.context() as patch:
            patch.setattr(engine._runner, "_plain", None)
            expected = lived(engine, seed, num_requests)
        check_equal(found, expected)
        assert not expected.driver.num_plain_steps
        plain += found.driver.num_plain_steps
        num_failed += sum(map(bool, found.driver.flags.values()))
    assert plain > 20 * len(seeds)
    assert num_failed > 0


@pytest.mark.parametrize(
    ("family", "is_plain"), [("qwen3", True), ("gemma3_text", True), ("gemma2", False), ("gpt2", False)]
)
def test_models(family, is_plain, families, monkeypatch):
    """Models whose head is no plain product, or that are no program, go the general way; scaled embeddings do not matter."""
    engine = families[family].engine
    found = lived(engine, 7, 5, share_of_others=0)
    assert bool(found.driver.num_plain_steps) == is_plain
    monkeypatch.setattr(engine._runner, "_plain", None)
    check_equal(found, lived(engine, 7, 5, share_of_others=0))


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    return make_engine(make_checkpoint("llama", tmp_path_factory.mktemp("checkpoint") / "llama"))


def test_rows_that_are_not_finite_fail_alone(engine):
    """A repeated step in which one row has NaN: its neighbour gets the token of an undisturbed run, and goes on."""
    prompt = list(range(40, 70))
    expected = generate(Driver(engine), "p", prompt, 12)
    driver = Driver(engine)
    bad = driver.add("bad", prompt[:20], room=30, logprobs=0)
    driver.add("p", prompt, room=30, logprobs=0)
    for _ in range(4):
        driver.run()
    assert driver.num_plain_steps == 3
    engine.cache.device_pool[:, :, bad.blocks[0]] = float("nan")
    outputs = driver.run()
    assert driver.num_plain_steps == 4
    assert wire_arrays.unpack(outputs.flags, "flags", wire_arrays.U8).tolist() == [worker_pb2.ROW_FLAG_NOT_FINITE, 0]
    assert (len(driver.tokens["bad"]), outputs.num_computed_tokens) == (4, 2)
    for _ in range(7):
        assert driver.run().num_computed_tokens == 1
    assert driver.tokens["p"] == expected
    assert driver.num_plain_steps == 11
    engine.cache.device_pool.zero_()


def test_without_room_nothing_changes(engine):
    """A repeated step beyond a row's blocks is refused as in the general way; with more blocks the row goes on."""
    prompt = list(range(30))
    expected = generate(Driver(engine), "p", prompt, 12)
    driver = Driver(engine)
    driver.add("p", prompt, logprobs=0)
    for _ in range(3):
        driver.run()
    assert driver.num_plain_steps == 2
    with pytest.raises(InvalidArgument, match="too few for its first 33 tokens"):
        driver.run()
    driver.compute("p", room=16)
    for _ in range(9):
        driver.run()
    assert driver.tokens["p"] == expected


def test_counts_and_timings(engine):
    """A repeated step reports computed tokens and fills its times."""
    driver = Driver(engine)
    for name in ("a", "b"):
        driver.add(name, list(range(9)), room=10, logprobs=0)
    driver.run()
    found = driver.run()
    assert driver.num_plain_steps == 1
    assert (found.num_computed_tokens, found.logprobs) == (2, b"")
    assert min(found.timings.prepare_ns, found.timings.model_ns, found.timings.sample_ns) > 0


def test_a_reset_forgets_the_rows(engine):
    """After a reset, a repeated step computes nothing, and new rows at the same places get their own tokens."""
    prompt = list(range(50, 70))
    expected = generate(Driver(engine), "p", prompt, 6)
    driver = Driver(engine)
    driver.add("other", prompt[::-1], room=20, logprobs=0)
    for _ in range(4):
        driver.run()
    driver = Driver(engine)
    assert driver.run().num_computed_tokens == 0
    driver.add("p", prompt, room=20, logprobs=0)
    for _ in range(6):
        driver.run()
    assert driver.tokens["p"] == expected
