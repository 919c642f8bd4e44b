"""Images of blocks with a draft model: what one worker reads, another one places in all its pools."""

from pathlib import Path

import torch

from protos.worker.v1 import worker_pb2
from svc_common import wire_arrays
from tests.support.checkpoints import make_checkpoint
from tests.support.worker.driver import Driver, make_engine
from worker_svc.executor.model_engine import ModelEngine


def pools(engine: ModelEngine) -> list[torch.Tensor]:
    return [part.device_pool for part in engine.cache._parts]


def test_images_have_the_draft_models_blocks(tmp_path: Path) -> None:
    """Of another shape than the model's; the layout says so, and one block's bytes are those of both."""
    path = make_checkpoint("llama", tmp_path / "llama")
    draft = make_checkpoint("qwen3", tmp_path / "qwen3")
    settings = {"num_blocks": 12, "num_cpu_blocks": 4, "draft_model": draft, "dtype": "float32", "max_model_len": 128}
    source, target = (make_engine(path, **settings) for _ in range(2))
    driver = Driver(source)
    driver.add("row", list(range(40)))
    driver.run()
    contents = bytes(source.read_blocks([1, 2, 3]))
    assert len(contents) == 3 * source.block_bytes
    assert source.cache_layout == target.cache_layout != make_engine(path, dtype="float32").cache_layout
    target.images.put("image", 0, contents)
    placed = worker_pb2.PlacedImage(image="image", blocks=wire_arrays.pack_pairs([(0, 7), (1, 5), (2, 9)]))
    target.cache.place([placed])
    for ours, theirs in zip(pools(source), pools(target), strict=True):
        assert ours[:, :, 1:4].any()
        assert torch.equal(ours[:, :, 1:4], theirs[:, :, [7, 5, 9]])
