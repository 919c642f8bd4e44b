"""Drafts of models on a CUDA device that checks where tensors are: what the same code gives on the CPU."""

from pathlib import Path
from typing import Any

import pytest

from tests.support.mtp_checkpoints import make_mtp_checkpoint
from tests.worker.fake_cuda import everything
from tests.worker.fake_cuda.test_everything import ON_CPU, ON_CUDA, WITH_KERNELS, done, started


def check(path: Path, adapter: Path, tolerance: float, on_cuda: dict[str, Any], **drafts: Any) -> None:
    """Steps of every kind."""
    found, expected = (done(path, adapter, **where, **drafts)[1] for where in (on_cuda, ON_CPU))
    everything.check_same(found, expected, tolerance)


def test_a_draft_model(checkpoint: Path, adapter: Path) -> None:
    """R157: steps in flight have tokens that the host does not know; the draft model computes these too."""
    check(checkpoint, adapter, 1e-4, ON_CUDA, draft_model=checkpoint)


@pytest.mark.long
def test_a_draft_model_with_the_kernels(shallow: Path, shallow_adapter: Path) -> None:
    """The same with Triton's kernels and recorded steps, after which the draft model computes its own pass."""
    check(shallow, shallow_adapter, 1e-3, WITH_KERNELS, draft_model=shallow)


def test_an_mtp_head(tmp_path: Path) -> None:
    """Its weights and the hidden states are on the device. Rows with adapters are left out."""
    path = make_mtp_checkpoint("glm4_moe", tmp_path / "model")
    results = []
    for where in (ON_CUDA, ON_CPU):
        engine = started(path, everything.NUM_BLOCKS, everything.NUM_HOST_BLOCKS, **where, drafts="mtp")
        results.append(everything.done(engine, with_adapters=False))
    everything.check_same(*results, 1e-3)
