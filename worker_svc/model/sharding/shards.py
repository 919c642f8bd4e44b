"""The part of a checkpoint that one rank of a tensor-parallel group loads, by transformers' plan of the model.

A rank's model is transformers' class with the rank's number of heads and intermediate size, so everything
behind it (probe, cache shape, memory, fused program) sees a smaller model. Both classes are built without weights
first: what the plan says must be what differs between them, else the model is refused.
"""

import copy
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from safetensors import safe_open
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from paged_kernels.quantized import QuantizedWeight
from svc_common.errors import ConfigError
from worker_svc.model.checkpoint import Checkpoint
from worker_svc.model.weight_reader import Value, WeightReader

_COLUMNS, _ROWS = "colwise", "rowwise"
_SAME = "replicated"
_AXES = {_COLUMNS: 0, _ROWS: 1}


@dataclass(frozen=True, slots=True)
class ShardPart:
    """Part `number` of `count` equal parts along `axis`: 0 = outputs of a linear map, 1 = inputs.

    `is_first`: True on rank 0, the only one that adds a bias to its part of a sum.
    """

    axis: int
    number: int
    count: int
    is_first: bool

    def bounds(self, name: str, size: int) -> tuple[int, int]:
        """[begin, end) of the part. Raises ConfigError if `size` does not divide."""
        if size % self.count:
            raise _refused(f"{name} has {size} elements along axis {self.axis}, which {self.count} ranks do not divide")
        return self.number * size // self.count, (self.number + 1) * size // self.count


@dataclass(frozen=True, slots=True)
class Shard:
    """One rank's part of every weight. `parts`: by a pattern of parameters' names, with ".weight" or ".bias"."""

    rank: int
    size: int
    parts: tuple[tuple[re.Pattern[str], ShardPart], ...]

    def of(self, name: str) -> ShardPart | None:
        """The part of a parameter of this name, in the model, a checkpoint or an adapter; None = all of it."""
        return next((part for pattern, part in self.parts if pattern.search(name)), None)

    def cut(self, name: str, value: Value) -> Value:
        """The rank's part of a value that was read whole. Raises ConfigError if groups of integers do not divide."""
        part = self.of(name)
        if part is None:
            return value
        if isinstance(value, QuantizedWeight):
            return _cut_integers(name, value, part)
        if value.ndim == 1 and part.axis == 1:
            return value if part.is_first else torch.zeros_like(value)
        begin, end = part.bounds(name, value.shape[part.axis])
        return value.narrow(part.axis, begin, end - begin).contiguous()

    def pair(self, module: str, down: tuple[int, ...], up: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Shapes of the rank's parts of an adapter's matrices [rank, in] and [out, rank]. Unchanged if they do not divide."""
        part = self.of(f"{module}.weight")
        if part is None or len(down) != 2 or len(up) != 2 or (up[0], down[1])[part.axis] % part.count:
            return down, up
        if part.axis == 0:
            return down, (up[0] // part.count, up[1])
        return (down[0], down[1] // part.count), up

    def cut_pair(self, module: str, down: torch.Tensor, up: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The rank's parts of an adapter's matrices, of the shapes of `pair`."""
        name = f"{module}.weight"
        part = self.of(name)
        if part is None:
            return down, up
        values = (down, self.cut(name, up)) if part.axis == 0 else (self.cut(name, down), up)
        assert all(isinstance(value, torch.Tensor) for value in values)
        return values  # type: ignore[return-value]

    def with_columns(self, module: str) -> "Shard":
        """The same with the rank's part of the outputs of one more module."""
        pattern = re.compile(rf"^{re.escape(module)}\.(?:weight|bias)$")
        return replace(self, parts=(*self.parts, (pattern, ShardPart(0, self.rank, self.size, self.rank == 0))))

    def is_summed(self, module: str) -> bool:
        """True if a module of this name computes a part of a sum over all ranks."""
        part = self.of(f"{module}.weight")
        return part is not None and part.axis == 1


WHOLE = Shard(0, 1, ())


def _cut_integers(name: str, value: QuantizedWeight, part: ShardPart) -> QuantizedWeight:
    begin, end = part.bounds(name, value.numbers.shape[part.axis])
    if part.axis == 0:
        return value.rows(torch.arange(begin, end))
    if value.group >= value.depth:  # one scale for all inputs of a column
        return replace(value, numbers=value.numbers[:, begin:end].contiguous())
    if begin % value.group or (end % value.group and end < value.depth):
        raise _refused(
            f"{name} is quantized in groups of {value.group}, and a rank's part of its {value.depth} inputs are {end - begin}"
        )
    groups = slice(begin // value.group, -(-end // value.group))
    offsets = None if value.offsets is None else value.offsets[:, groups].contiguous()
    return replace(
        value,
        numbers=value.numbers[:, begin:end].contiguous(),
        scales=value.scales[:, groups].contiguous(),
        offsets=offsets,
    )


def _refused(what: str, **metadata: str) -> ConfigError:
    return ConfigError(f"--tensor-parallel: {what}", reason="TENSOR_PARALLEL", metadata=metadata)


# --- the plan ----------------------------------------------------------------------------------------------------------


def sharded(found: Checkpoint, cls: type[PreTrainedModel], rank: int, size: int) -> tuple[Checkpoint, Shard]:
    """The checkpoint as one rank reads it, and the rank's parts. The checkpoint itself for a group of one.

    Raises ConfigError for a model without a plan that Quire can follow, and for sizes that `size` does not divide.
    """
    if size == 1:
        return found, WHOLE
    config = _smaller(found, size)
    whole, own = _shapes(cls, found.config), _shapes(cls, config)
    plan = getattr(found.text_config, "base_model_tp_plan", None) or {}
    kv_heads = getattr(found.text_config, "num_key_value_heads", None) or found.text_config.num_attention_heads
    shard = Shard(rank, size, tuple(_parts(cls, plan, whole, own, rank, size, min(size, kv_heads))))
    _check_rest(cls, shard, whole, own)
    num_elements = sum(shape.numel() for shape in own.values())
    reader = _ShardReader(found, shard, num_elements)
    return replace(found, config=config, reader=reader), shard


def _smaller(found: Checkpoint, size: int) -> PreTrainedConfig:
    """The configuration with a rank's share of heads and of the intermediate size."""
    config = copy.deepcopy(found.config)
    text = config.get_text_config(decoder=True)
    heads = _size(text, "num_attention_heads", size)
    kv_heads = int(getattr(text, "num_key_value_heads", None) or heads)
    if kv_heads % size and size % kv_heads:
        raise _refused(
            f"{size} ranks neither divide the model's {kv_heads} key-value heads nor are a multiple of them; "
            f"use {_advice(kv_heads)}",
            num_key_value_heads=str(kv_heads),
        )
    intermediate = _size(text, "intermediate_size", size)
    if getattr(text, "head_dim", None) is None:
        text.head_dim = text.hidden_size // heads
    text.num_attention_heads = heads // size
    text.num_key_value_heads = max(1, kv_heads // size)
    text.intermediate_size = intermediate // size
    return config


def _size(config: PreTrainedConfig, field: str, size: int) -> int:
    value = getattr(config, field, None)
    if not isinstance(value, int):
        raise _refused(f"the model's configuration has no number {field} to divide", field=field)
    if value % size:
        raise _refused(f"{size} ranks do not divide the model's {field} of {value}; use {_advice(value)}", field=field)
    return value


def _advice(value: int) -> str:
    return ", ".join(str(count) for count in range(1, 9) if value % count == 0)


def _shapes(cls: type[PreTrainedModel], config: PreTrainedConfig) -> dict[str, torch.Size]:
    with torch.device("meta"):
        model = cls(copy.deepcopy(config))
    return {name: parameter.shape for name, parameter in model.named_parameters()}


def _parts(
    cls: type[PreTrainedModel],
    plan: Mapping[str, str],
    whole: Mapping[str, torch.Size],
    own: Mapping[str, torch.Size],
    rank: int,
    size: int,
    kv_parts: int,
) -> Iterator[tuple[re.Pattern[str], ShardPart]]:
    """The plan's entries for modules that are divided. `kv_parts`: distinct parts of the key-value heads."""
    for entry, style in plan.items():
        pattern = re.compile(r"(?:^|\.)" + re.escape(entry).replace(r"\*", r"\d+") + r"(?:\.weight|\.bias)?$")
        names = [name for name in whole if pattern.search(name)]
        if not names or style.startswith(_SAME):
            continue
        if style not in _AXES:
            raise _refused(
                f"{cls.__name__} has {entry}, which transformers divides as {style!r}; only {_COLUMNS} and {_ROWS} are supported",
                module=entry,
            )
        axis = _AXES[style]
        counts = {_count(name, whole[name], own[name], axis) for name in names if whole[name][axis:]}
        # Key-value heads may be on several ranks; nothing else may, as it would be summed several times.
        if len(counts) != 1 or not counts <= {size, *((kv_parts,) if axis == 0 else ())}:
            raise _refused(f"{cls.__name__} does not divide {entry} by its numbers of heads", module=entry)
        count = counts.pop() or 1
        yield pattern, ShardPart(axis, rank * count // size, count, rank == 0)


def _count(name: str, whole: torch.Size, own: torch.Size, axis: int) -> int | None:
    """How many ranks' shapes make up the whole along `axis`; None if they differ elsewhere."""
    same = whole[:axis] == own[:axis] and whole[axis + 1 :] == own[axis + 1 :]
    return whole[axis] // own[axis] if same and own[axis] and whole[axis] % own[axis] == 0 else None


def _check_rest(
    cls: type[PreTrainedModel], shard: Shard, whole: Mapping[str, torch.Size], own: Mapping[str, torch.Size]
) -> None:
    """Raise ConfigError if a parameter that is not divided has another shape, or if nothing is summed."""
    if whole.keys() != own.keys():
        raise _refused(f"{cls.__name__} has other modules with fewer heads")
    for name, shape in whole.items():
        if shard.of(name) is None and own[name] != shape:
            raise _refused(
                f"{cls.__name__} cannot be divided: transformers' plan does not say how to divide {name}, which has shape "
                f"{tuple(shape)} and {tuple(own[name])} with a rank's numbers of heads",
                module=name,
            )
    if not any(part.axis == 1 for _, part in shard.parts):
        raise _refused(f"transformers has no tensor-parallel plan for {cls.__name__}; serve it with one rank")


# --- reading -----------------------------------------------------------------------------------------------------------


class _ShardReader:
    """`WeightReader` of a rank's parts. Plain safetensors are sliced as they are read, other forms afterwards."""

    def __init__(self, found: Checkpoint, shard: Shard, num_elements: int) -> None:
        self.num_elements = num_elements
        self.is_quantized = found.reader is not None and found.reader.is_quantized
        self.has_integers = found.reader is not None and found.reader.has_integers
        self._inner: WeightReader | None = found.reader
        self._files, self._shard = found.weight_files, shard

    def tensors(self, dtype: torch.dtype) -> Mapping[str, Callable[[], Value]]:
        """See WeightReader."""
        if self._inner is None:
            opened = [safe_open(file, "pt") for file in self._files]
            return {name: partial(self._slice, file, name) for file in opened for name in file.keys()}  # noqa: SIM118
        return {name: partial(self._cut, name, read) for name, read in self._inner.tensors(dtype).items()}

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


def summed_modules(model: nn.Module, shard: Shard) -> list[nn.Module]:
    """Modules that compute a part of a sum over all ranks."""
    return [module for name, module in model.named_modules() if shard.is_summed(name)]
