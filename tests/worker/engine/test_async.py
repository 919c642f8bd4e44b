"""The next step is launched while the device computes: the same messages as one step after the other, in the device's own order.

The device is a stand-in that moves bytes as late as it may (`async_device.py`); model, rows and sampler are the real ones.
"""

import ast
import itertools
import time
from collections import Counter
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch

from paged_kernels.gpu import token_draws
from paged_kernels.registry import drawing_kernels
from protos.common.v1 import common_pb2
from protos.worker.v1 import worker_pb2
from svc_common.errors import InvalidArgument
from tests.support.worker.async_device import FakeStreams, RecordedTooEarly, WithoutGuard, WithoutWait
from tests.support.worker.async_life import NUM_BLOCKS, NUM_HOST_BLOCKS, Scheduler
from tests.support.worker.builders import Change, Row, rare, step, tokens_by_row
from tests.support.worker.driver import make_engine
from tests.support.worker.sampled_rows import GRAMMAR, ToyMasks, toy_allows
from worker_svc.device.kept_inputs import LastTokens
from worker_svc.device.queue import DeviceQueue, HostQueue, StreamQueue
from worker_svc.engine import DeviceLost
from worker_svc.executor.model_engine import ModelEngine
from worker_svc.executor.step_flights import StepInFlight
from worker_svc.executor.step_runner import StepRunner
from worker_svc.model.row_model import RowModel
from worker_svc.sampling.draft_proposer import NgramProposer
from worker_svc.sampling.row_sampler import RowSampler

ROOT = Path(__file__).parents[3]
TINY, WORKER = ROOT / "models" / "tiny", ROOT / "worker_svc"
PROMPT = [7, 30, 2, 7, 30, 2, 7, 30]
EVENTS = {
    "beam", "children", "chunk", "copy", "draft accepted", "failed", "guess", "late token dropped", "late token kept",
    "launched ahead", "multi-step", "recompute", "spoilt", "swap",
}  # fmt: skip


@pytest.fixture(scope="module")
def engine():
    engine = make_engine(TINY, num_blocks=NUM_BLOCKS, num_cpu_blocks=NUM_HOST_BLOCKS, max_model_len=512, device="cpu")
    engine.profile(192, 8)
    engine.allocate(NUM_BLOCKS, NUM_HOST_BLOCKS)
    return engine


def equip(engine: ModelEngine, queue: DeviceQueue) -> None:
    engine.reset()
    engine.cache.device_pool.zero_()
    engine._runner = StepRunner(
        engine._loaded.model, engine.cache, engine._rows, engine.row_rule, masks=ToyMasks(), queue=queue
    )


def lived(engine: ModelEngine, queue: DeviceQueue, seed: int, **how: object) -> Scheduler:
    """Two or three plans in flight."""
    equip(engine, queue)

    def spoil(block: int) -> None:
        engine.cache.device_pool[:, :, block] = float("nan")

    scheduler = Scheduler(engine.launch, spoil, seed, depth=2 + (seed % 3 == 2), **how)
    scheduler.run()
    return scheduler


def small_queue(streams: FakeStreams) -> StreamQueue:
    """Of buffers that must grow."""
    return StreamQueue(streams, first_buffer_bytes=256)


def differs(engine: ModelEngine, streams: FakeStreams, expected: Scheduler) -> bool:
    """Whether a life over `streams` goes wrong: another message, or an error."""
    to_come = iter(expected.results)

    def compare(result: worker_pb2.WorkerOutputs) -> None:
        assert result == next(to_come)

    try:
        lived(engine, small_queue(streams), QUICK_SEED, on_result=compare)
    except Exception:
        return True
    return False


QUICK_SEED = 2
LONG_SEEDS = range(100, 130)


@pytest.fixture(scope="module")
def synchronous(engine):
    """The life of a seed, of which no step is launched ahead; each is lived once."""
    return cache(lambda seed: lived(engine, HostQueue(), seed))


@pytest.mark.parametrize("seeds", [[QUICK_SEED], pytest.param(LONG_SEEDS, marks=pytest.mark.long)], ids=["one", "many"])
def test_launching_ahead_changes_no_result(engine, synchronous, seeds, record_property):
    """R157, R148, R158: every message is the one of the synchronous worker, whatever is on its way meanwhile."""
    events: Counter[str] = Counter()
    for seed in seeds:
        expected = synchronous(seed)
        assert not expected.events["launched ahead"]
        found = lived(engine, small_queue(FakeStreams()), seed, waits_elsewhere=seed % 2 == 1)
        assert found.results == expected.results, seed
        assert found.tokens == expected.tokens
        assert found.events["launched ahead"] > 20
        events += found.events
    assert events.keys() >= EVENTS
    record_property("size", f"{len(seeds)} lives, {events['launched ahead']} steps launched ahead")


@pytest.fixture(scope="module")
def expected(synchronous):
    return synchronous(QUICK_SEED)


@pytest.mark.parametrize("streams", [WithoutWait, WithoutGuard, RecordedTooEarly])
def test_a_device_used_wrongly_is_noticed(engine, expected, streams):
    """R156: without the copy stream's wait, the guard of the input buffers, or the event behind the copies, results are others."""
    assert differs(engine, streams(), expected)


@pytest.mark.parametrize(
    ("owner", "name", "instead"),
    [
        pytest.param(LastTokens, "fill", lambda *_: None, id="R157"),
        pytest.param(RowSampler, "reads_tokens", lambda *_: False, id="R148"),
        pytest.param(StepRunner, "_needs_all_known", lambda *_: False, id="R158"),
    ],
)
def test_each_rule_of_launching_ahead_is_needed(engine, expected, owner, name, instead, monkeypatch):
    """R148, R157, R158: without tokens from the device, or waiting for those that rules or guesses read, results are others."""
    monkeypatch.setattr(owner, name, instead)
    assert differs(engine, FakeStreams(), expected)


def test_order_on_the_device(engine):
    """R156: inputs go up, with an event behind them; results wait for the model and are copied, with an event behind them."""
    streams = FakeStreams()
    equip(engine, StreamQueue(streams))
    first = engine.launch(step(1, add=[join(0)]))
    assert in_short(streams.log) == ["upload", "wait", "copy", "record", "upload", "record inputs"]
    streams.log.clear()
    second = engine.launch(step(2))
    # Two buffers: the second step's inputs have their own, the third's must wait until the first's were read.
    assert in_short(streams.log) == ["upload", "wait", "copy", "record", "upload", "record inputs"]
    streams.log.clear()
    third = engine.launch(step(3))
    assert in_short(streams.log)[0] == "synchronise inputs"
    streams.log.clear()
    assert [pending.is_ready for pending in (first, second, third)] == [False] * 3
    first.wait()
    assert streams.log == ["synchronise"]
    tokens = [tokens_by_row(pending.finish())[0] for pending in (first, second, third)]
    equip(engine, HostQueue())
    assert tokens == [tokens_by_row(engine.execute(step(1, add=[join(0)])))[0]] + [
        tokens_by_row(engine.execute(step(i)))[0] for i in (2, 3)
    ]


def in_short(log: list[str]) -> list[str]:
    return [what for what, _ in itertools.groupby(log)]


def join(index: int, **fields: object) -> Row:
    return Row(index, PROMPT, range(4 * index, 4 * index + 4), len(PROMPT), **fields)


def test_sampling_waits_for_the_token_that_a_grammar_needs(engine, monkeypatch):
    """R148, R145: model 2 is launched first; then result 1 is waited for, the grammar told of it, its mask made, a token drawn."""
    streams = FakeStreams()
    equip(engine, StreamQueue(streams))
    note = streams.log.append
    for owner, name in ((RowModel, "logits"), (ToyMasks, "accept"), (ToyMasks, "fill")):
        call = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda *args, call=call, name=name: (note(name), call(*args))[1])
    sampling = common_pb2.ResolvedSampling(grammar=GRAMMAR)
    first = engine.launch(step(1, add=[join(0, options=rare(sampling))]))
    streams.log.clear()
    second = engine.launch(step(2))
    done = [what for what in in_short(streams.log) if "inputs" not in what and what != "upload"]
    assert done == ["logits", "synchronise", "accept", "fill", "wait", "copy", "record"]
    assert (first.is_ready, second.is_ready) == (True, False)
    tokens = [tokens_by_row(pending.finish())[0][0] for pending in (first, second)]
    assert toy_allows(tokens[:1], tokens[1])


def test_guesses_wait_for_the_tokens_they_are_made_of(engine, monkeypatch):
    """R158: a step with guesses starts when all tokens before it are known; one without is launched at once."""
    equip(engine, StreamQueue(FakeStreams()))
    first = engine.launch(step(1, add=[join(0), join(1)]))
    second = engine.launch(step(2, change=[Change(0, 0)]))
    assert not first.is_ready
    asked: list[list[int]] = []
    propose = NgramProposer.propose
    monkeypatch.setattr(
        NgramProposer,
        "propose",
        lambda self, asks: asked.extend(x.token_ids.tolist() for x in asks) or propose(self, asks),
    )
    third = engine.launch(step(3, change=[Change(0, 4, num_drafts=3), Change(1, 0)]))
    assert first.is_ready and second.is_ready
    assert asked == [[*PROMPT, *tokens_by_row(first.finish())[0]]]
    second.finish()
    assert len(tokens_by_row(third.finish())[0]) >= 1


def test_a_row_that_failed_is_dropped_from_the_steps_behind_it(engine, monkeypatch):
    """NaN in a row's cache while three steps are launched: its flag comes once, and nothing of it is counted afterwards."""

    def messages(queue: DeviceQueue, num_decode_steps: int) -> list[worker_pb2.WorkerOutputs]:
        equip(engine, queue)
        first = engine.launch(step(1, add=[join(0, logprobs=True), join(1)]))
        engine.cache.device_pool[:, :, 0] = float("nan")
        later = [engine.launch(step(i, num_decode_steps=num_decode_steps)) for i in (2, 3, 4)]
        later.append(engine.launch(step(5, remove=[0], add=[join(0, incarnation=2)])))
        results = [pending.finish() for pending in (first, *later, engine.launch(step(6)))]
        for result in results:
            result.ClearField("timings")
        return results

    for num_decode_steps in (1, 3):
        expected = messages(HostQueue(), num_decode_steps)
        assert [result.flags for result in expected[:3]] == [b"\0\0", b"\1\0", b"\0"]
        assert messages(StreamQueue(FakeStreams()), num_decode_steps) == expected
        with monkeypatch.context() as patch:
            patch.setattr(StepInFlight, "drop", lambda *_: None)
            assert messages(StreamQueue(FakeStreams()), num_decode_steps) != expected


def test_a_new_owner_hears_nothing_of_old_steps(engine):
    """reset() drops what is on its way: it is empty when finished, and a row of the same index and life is not touched by it."""
    equip(engine, HostQueue())
    expected = [tokens_by_row(engine.execute(message))[0] for message in (step(1, add=[join(0, seed=5)]), step(2))]
    equip(engine, StreamQueue(FakeStreams()))
    old = [engine.launch(step(1, add=[join(0, temperature=2.0)])), engine.launch(step(2))]
    engine.reset()
    new = [engine.launch(step(1, add=[join(0, seed=5)])), engine.launch(step(2))]
    assert [pending.finish().token_ids for pending in old] == [b"", b""]
    assert [tokens_by_row(pending.finish())[0] for pending in new] == expected


def test_a_refused_step_changes_nothing_of_those_on_their_way(engine):
    """InvalidArgument while a step is being computed: that one and the next are as if it had not been sent."""
    equip(engine, HostQueue())
    expected = [tokens_by_row(engine.execute(message)) for message in (step(1, add=[join(0)]), step(2))]
    equip(engine, StreamQueue(FakeStreams()))
    first = engine.launch(step(1, add=[join(0)]))
    with pytest.raises(InvalidArgument, match="row 9"):
        engine.launch(step(2, change=[Change(9, 1)]))
    second = engine.launch(step(2))
    assert [tokens_by_row(pending.finish()) for pending in (first, second)] == expected


def test_a_step_whose_results_make_no_sense_fails_alone(engine, monkeypatch):
    """An error after the launch is that step's own; its rows compute nothing more, a row that joins goes on as ever."""
    equip(engine, HostQueue())
    expected = tokens_by_row(engine.execute(step(1, add=[join(1)])))[1] + tokens_by_row(engine.execute(step(2)))[1]
    equip(engine, StreamQueue(FakeStreams()))
    pending = [engine.launch(step(1, add=[join(0)])), engine.launch(step(2, add=[join(1)])), engine.launch(step(3))]
    with monkeypatch.context() as patch:
        patch.setattr("worker_svc.executor.step_landing.settle", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            pending[0].finish()
    found = [tokens_by_row(one.finish()) for one in pending[1:]]
    assert [list(rows) for rows in found] == [[1], [1]]
    assert found[0][1] + found[1][1] == expected
    assert list(tokens_by_row(engine.execute(step(4, remove=[0])))) == [1]


def test_a_step_that_fails_in_its_launch_spares_those_before(engine, monkeypatch):
    """As without a queue: the step is void, its rows wait to be told or to leave; results on their way come."""
    equip(engine, StreamQueue(FakeStreams()))
    first = engine.launch(step(1, add=[join(0)]))
    with monkeypatch.context() as patch:
        patch.setattr("worker_svc.executor.step_runner.plan_draws", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            engine.launch(step(2))
    third = engine.launch(step(3))
    assert len(tokens_by_row(first.finish())[0]) == 1
    assert tokens_by_row(third.finish()) == {}
    again = tokens_by_row(engine.execute(step(4, change=[Change(0, 1)])))[0]
    equip(engine, HostQueue())
    assert [engine.execute(step(1, add=[join(0)])), tokens_by_row(engine.execute(step(2)))[0]][1] == again


def test_a_lost_device_is_noticed_by_the_waiting_thread(engine):
    """An error of the device in an event is DeviceLost, in the waiting thread and in the engine's."""
    streams = FakeStreams()
    equip(engine, StreamQueue(streams))
    pending = engine.launch(step(1, add=[join(0)]))
    streams.loss = torch.AcceleratorError("CUDA error: an illegal memory access was encountered\nCompile with ...")
    for wait in (pending.wait, pending.finish):
        with pytest.raises(DeviceLost, match="illegal memory access") as caught:
            wait()
        assert "Compile" not in str(caught.value)


def test_time_of_a_step_is_the_devices(engine):
    """Unmeasured time between a step's start, or the end of the one before, and its end counts as the model's."""
    streams = FakeStreams()
    equip(engine, StreamQueue(streams))
    pending = [engine.launch(step(1, add=[join(0)])), engine.launch(step(2))]
    time.sleep(0.3)
    pending[0].wait()
    time.sleep(0.02)
    pending[1].wait()
    times = [one.finish().timings for one in pending]
    assert times[0].model_ns > 290e6
    assert 15e6 < sum((times[1].prepare_ns, times[1].model_ns, times[1].sample_ns)) < 290e6


def test_what_computes_knows_no_threads():
    """R155: the caller of the engine waits; neither the executor nor anything below it knows threads, tasks or futures."""
    forbidden = {"asyncio", "concurrent", "threading", "multiprocessing", "queue"}
    seen = set()
    for file in sorted([*WORKER.glob("*.py"), *WORKER.glob("shell/*.py"), *WORKER.glob("executor/*.py")]):
        tree = ast.parse(file.read_text(encoding="utf-8"))
        names = {a.name for node in ast.walk(tree) if isinstance(node, ast.Import) for a in node.names}
        names |= {node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
        if {name.split(".")[0] for name in names} & forbidden:
            seen.add(file.relative_to(WORKER).as_posix())
    assert "shell/engine_thread.py" in seen
    assert {name for name in seen if not name.startswith("shell/")} <= {"app.py"}


def test_buffers_grow_and_are_used_again():
    """R156: a step's inputs may be larger than its buffer; later steps use the larger one, and wait until it was read."""
    streams = FakeStreams()
    queue = StreamQueue(streams, first_buffer_bytes=64)
    arrays = [
        np.arange(n, dtype=dtype) for n, dtype in ((3, np.int32), (200, np.int64), (0, np.int32), (70, np.float32))
    ]
    for _ in range(6):
        with queue.inputs():
            found = [*queue.upload(*arrays[:2]), *queue.upload(*arrays[2:], np.array([[True], [False]]))]
        assert all(np.array_equal(tensor.numpy(), array) for tensor, array in zip(found, arrays, strict=False))
        assert found[-1].tolist() == [[True], [False]]
    assert streams.num_spoilt == 0
    assert streams.log.count("synchronise inputs") == 4
    assert streams.num_buffers <= 2 + 2 * 5
    assert queue.fetch({"x": found[1][::2]}).arrays()["x"].tolist() == list(range(0, 200, 2))


def test_a_gpu_draws_without_being_waited_for():
    """On a CUDA device tokens are drawn by kernels that the host does not wait for; anywhere else by plain torch."""
    assert drawing_kernels("cuda", torch.device("cuda", 0)) is token_draws
    assert drawing_kernels("cuda", torch.device("cpu")) is None
    assert drawing_kernels("reference", torch.device("cuda", 0)) is None
