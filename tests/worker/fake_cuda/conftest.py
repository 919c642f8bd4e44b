"""The fake device is for a process of its own (see `tensors.install`), which `tests/worker/test_fake_cuda.py` starts."""

import gc
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.checkpoints import make_checkpoint
from tests.support.cuda import TEST_DEVICE
from tests.support.worker.adapter_folders import make_adapter

collect_ignore_glob = [] if TEST_DEVICE == "fake-cuda" else ["test_*.py"]


@pytest.fixture(autouse=True)
def no_recordings() -> Iterator[None]:
    """Recordings of other tests are gone."""
    from tests.worker.fake_cuda.recorder import RECORDER

    gc.collect()
    RECORDER.forget()
    yield


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small Llama of several layers."""
    return make_checkpoint("llama", tmp_path_factory.mktemp("checkpoint") / "llama")


@pytest.fixture(scope="session")
def adapter(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An adapter of it, of the LM head too."""
    return _adapter_of(checkpoint, tmp_path_factory)


@pytest.fixture(scope="session")
def shallow(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same with one layer: for kernels in the interpreter, and for many steps."""
    return make_checkpoint("llama", tmp_path_factory.mktemp("shallow") / "llama", num_hidden_layers=1)


@pytest.fixture(scope="session")
def shallow_adapter(shallow: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An adapter of that."""
    return _adapter_of(shallow, tmp_path_factory)


def _adapter_of(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("adapter") / "a"
    return make_adapter(checkpoint, folder, 1, r=4, target_modules=["q_proj", "down_proj", "lm_head"])
