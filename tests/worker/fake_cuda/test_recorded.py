"""Decode steps recorded and repeated by one launch: tokens are those of the modules; what a recording may not do is found."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from protos.worker.v1 import worker_pb2
from tests.support.checkpoints import make_checkpoint
from tests.support.worker.builders import Row, step, tokens_by_row
from tests.worker.fake_cuda.device import FakeCuda, FakeDevices
from tests.worker.fake_cuda.recorder import RECORDER, RefusedInRecording
from tests.worker.fake_cuda.tensors import DEVICE
from worker_svc.executor.model_engine import ModelEngine
from worker_svc.model.fused.recorded_steps import row_counts
from worker_svc.settings import WorkerSettings

PROMPTS = ([5, 9, 200], [17] * 7, [300, 2])
NUM_SEQUENCES, NUM_BLOCKS, ROOM = 6, 40, 4
FUSED = ["llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3_text", "phi3"]


def started(path: Path, **settings: Any) -> ModelEngine:
    given = WorkerSettings.of(
        model=path, device="cuda", backend="cuda", max_model_len=64, swap_space_gib=0.001, **settings
    )
    engine = ModelEngine(given, FakeDevices())
    engine.load(lambda _stage, _fraction: None)
    engine.profile(24, NUM_SEQUENCES)
    engine.allocate(NUM_BLOCKS, 1)
    return engine


def rows(numbers: Sequence[int]) -> list[Row]:
    """Greedy and sampled in turn."""
    sampled = {"temperature": 0.8, "top_k": 30, "top_p": 0.95, "logprobs": True}
    return [
        Row(i, PROMPTS[i % 3], range(ROOM * i, ROOM * i + ROOM), len(PROMPTS[i % 3]), **(sampled if i % 2 else {}))
        for i in numbers
    ]


def lived(engine: ModelEngine) -> list[worker_pb2.WorkerOutputs]:
    """Rows come and go, so that steps have one to six of them."""
    messages = [
        step(1, add=rows([0])), step(2), step(3, add=rows([1, 2, 3])), step(4), step(5), step(6, add=rows([4, 5])),
        step(7), step(8, remove=[1]), step(9, remove=[0, 2]), step(10),
    ]  # fmt: skip
    return [engine.launch(message).finish() for message in messages]


def check(path: Path) -> tuple[int, int]:
    """Returns how many recordings there are, and the most launches of a step that only decodes."""
    by_modules = [tokens_by_row(result) for result in lived(started(path, fuse=False, dtype="float32"))]
    RECORDER.forget()
    engine = started(path, dtype="float32")
    assert engine._loaded.model.is_fused
    recorded = len(RECORDER.num_recorded)
    assert [tokens_by_row(result) for result in lived(engine)] == by_modules
    RECORDER.num_launched = 0
    engine.launch(step(11)).finish()
    return recorded, RECORDER.num_launched


def test_tokens_are_those_of_the_modules(shallow, record_property):
    """R18: chunks and decode steps of one to six rows; a step that decodes is few launches. A sample of families."""
    recorded, launched = check(shallow)
    assert recorded == len([*row_counts(NUM_SEQUENCES)]) == 4
    assert launched < 30
    record_property("size", f"fake CUDA: recorded steps of 1 of {len(FUSED)} families, {launched} launches a step")


@pytest.mark.soak
@pytest.mark.parametrize("family", FUSED)
def test_tokens_of_all_families(family, tmp_path, record_property):
    """R18: the same for each family that is fused."""
    recorded, launched = check(make_checkpoint(family, tmp_path / family))
    assert recorded == 4
    record_property("size", f"fake CUDA: recorded steps of {family}, {launched} launches a step")


@pytest.mark.long
def test_a_wrong_recording_is_not_used(tmp_path, monkeypatch, caplog):
    """One whose logits are not those of the program: steps run as if there were none."""
    path = make_checkpoint("llama", tmp_path / "llama")
    expected = [tokens_by_row(result) for result in lived(started(path, fuse=False, dtype="float32"))]

    def stale(self: FakeCuda, work: Any) -> Any:
        work()
        return lambda: None

    monkeypatch.setattr(FakeCuda, "recorded", stale)
    engine = started(path, dtype="float32")
    assert engine._runner._recorded is None
    assert [tokens_by_row(result) for result in lived(engine)] == expected


# --- the device finds what a recording may not do --------------------------------------------------------------------


def on_device(*values: float) -> torch.Tensor:
    return torch.tensor(values).to(DEVICE)


def test_work_is_repeated_without_its_code():
    """New inputs at the same addresses give new results; values of the host stay those of the recording."""
    given, out, factor, runs = on_device(1.0, 2.0), on_device(0.0, 0.0), [3.0], []

    def work() -> None:
        runs.append(1)
        out.copy_(given * factor[0] + 1)

    repeat = FakeCuda().recorded(work)
    given.copy_(on_device(5.0, 6.0))
    factor[0] = 100.0
    repeat()
    assert out.tolist() == [16.0, 19.0]
    assert len(runs) == 2


@pytest.mark.parametrize(
    "forbidden",
    [
        lambda x: float(x[0]),
        lambda x: x.cpu(),
        lambda x: x.nonzero(),
        lambda x: x.copy_(torch.ones(2)),
        lambda x: torch.ones(2).to(DEVICE, non_blocking=True),
    ],
    ids=["reads a value", "copies to the host", "waits for a size", "copies from the host", "uploads"],
)
def test_what_a_capture_refuses(forbidden):
    """Waiting for the device and copies of host memory are refused while work is recorded, and nowhere else."""
    given = on_device(1.0, 2.0)
    forbidden(given)
    with pytest.raises(RefusedInRecording, match="not permitted when stream is capturing"):
        RECORDER.recorded(lambda: forbidden(given))
    forbidden(given)


def test_memory_of_a_recording_is_not_kept():
    """A result that was not copied out is garbage once another recording is repeated."""
    given, kept = on_device(1.0, 2.0), []
    first = FakeCuda().recorded(lambda: kept.append(given + 1))
    second = FakeCuda().recorded(lambda: kept.append(given * 2))
    first()
    assert kept[1].tolist() == [2.0, 3.0]
    second()
    assert kept[1].isnan().all()
