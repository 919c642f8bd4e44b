"""Launches of a decode step, counted on a device that is none (`tests/worker/fake_cuda`), in Triton's interpreter.

Their number depends on layers and on what there is in one, and not on widths: so the model is narrow.
"""

import gc
import tempfile
from pathlib import Path
from typing import Any

from tests.support.checkpoints import make_checkpoint
from tests.support.worker.builders import Row, step
from tests.worker.fake_cuda.device import FakeDevices
from tests.worker.fake_cuda.recorder import RECORDER
from tests.worker.fake_cuda.tensors import install
from worker_svc.executor.model_engine import ModelEngine
from worker_svc.settings import WorkerSettings

SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "8B": ("llama", {"num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 16}),
    "0.6B": ("qwen3", {"num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 16}),
}
"""Family, layers and heads of Llama 3.1 8B and of Qwen3 0.6B."""


def count(shape: str) -> dict[str, Any]:
    """Launches of one greedy row's step: all, in the recording, outside of it; and with the model's modules instead."""
    install()
    family, fields = SHAPES[shape]
    with tempfile.TemporaryDirectory() as folder:
        path = make_checkpoint(family, Path(folder) / "model", **fields)
        alone = _launched(path, fuse=False)
        outside = _launched(path, fuse=True)
    recorded = RECORDER.num_recorded
    inside = recorded[-1] if recorded else 0
    return {
        "shape": shape,
        "layers": fields["num_hidden_layers"],
        "launches": outside - (1 if recorded else 0) + inside,
        "recorded": inside,
        "outside": outside,
        "by_modules": alone,
    }


def _launched(path: Path, *, fuse: bool) -> int:
    gc.collect()  # the memory of the last engine
    settings = WorkerSettings.of(
        model=path,
        device="cuda",
        backend="cuda",
        max_model_len=64,
        num_gpu_blocks_override=8,
        swap_space_gib=0,
        fuse=fuse,
    )
    engine = ModelEngine(settings, FakeDevices())
    engine.load(lambda _stage, _fraction: None)
    engine.profile(8, 1)
    RECORDER.forget()
    engine.allocate(8, 0)
    engine.launch(step(1, add=[Row(0, [5, 6, 7], range(2), 3)])).finish()
    engine.launch(step(2)).finish()
    RECORDER.num_launched = 0
    engine.launch(step(3)).finish()
    return RECORDER.num_launched
