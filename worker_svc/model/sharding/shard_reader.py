"""Reads one rank's part of a checkpoint's weights."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from safetensors import safe_open
from transformers import PreTrainedModel

from worker_svc.model.checkpoint import Checkpoint
from worker_svc.model.sharding.shards import Shard
from worker_svc.model.weight_reader import Value, WeightReader


class ShardReader:
    """`WeightReader` of a rank's parts. Plain safetensors are sliced as they are read, other forms afterwards."""

    def __init__(self, found: Checkpoint, shard: Shard, num_elements: int) -> None:
        self.num_elements = num_elements
        self.is_quantized = found.reader is not None and found.reader.is_quantized
        self.has_integers = found.reader is not None and found.reader.has_integers
        self._inner: WeightReader | None = found.reader
        self._files, self._shard = found.weight_files, shard

    def tensors(self, dtype: torch.dtype) -> Mapping[str, Callable[[], Value]]:
        """See WeightReader."""
        stored: dict[str, Callable[[], Value]]
        if self._inner is None:
            opened = [safe_open(file, "pt") for file in self._files]
            stored = {name: partial(self._slice, file, name) for file in opened for name in file.keys()}  # noqa: SIM118
        else:
            stored = {name: partial(self._cut, name, read) for name, read in self._inner.tensors(dtype).items()}
        return {name: read for name, read in stored.items() if self._shard.reads(name)}

    def float_shapes(self) -> Mapping[str, tuple[int, int]]:
        """See WeightReader: none, since devices that read weights late have no ranks."""
        return {}

    def finish(self, model: PreTrainedModel) -> None:
        """See WeightReader."""
        if self._inner is not None:
            self._inner.finish(model)

    def _cut(self, name: str, read: Callable[[], Value]) -> Value:
        return self._shard.cut(name, read())

    def _slice(self, file: Any, name: str) -> torch.Tensor:
        part = self._shard.of(name)
        stored = file.get_slice(name)
        shape = stored.get_shape()
        if part is None or len(shape) <= part.axis:
            value = self._shard.cut(name, file.get_tensor(name))
            assert isinstance(value, torch.Tensor)
            return value
        begin, end = part.bounds(name, shape[part.axis])
        sliced: torch.Tensor = stored[begin:end] if part.axis == 0 else stored[:, begin:end]
        return sliced.contiguous()
