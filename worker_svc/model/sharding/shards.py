"""The part of every weight of a model that one rank of a tensor-parallel group loads and computes."""

import re
from dataclasses import dataclass, replace

import torch
from torch import nn

from paged_kernels.quantized import QuantizedWeight
from worker_svc.model.sharding.experts import ExpertPart
from worker_svc.model.sharding.refusals import refused
from worker_svc.model.weight_reader import Value


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
            raise refused(f"{name} has {size} elements along axis {self.axis}, which {self.count} ranks do not divide")
        return self.number * size // self.count, (self.number + 1) * size // self.count


@dataclass(frozen=True, slots=True)
class Shard:
    """One rank's part of every weight. `parts`: by a pattern of parameters' names, with ".weight" or ".bias".

    `experts`: the rank's, of a mixture of experts.
    """

    rank: int
    size: int
    parts: tuple[tuple[re.Pattern[str], ShardPart], ...]
    experts: ExpertPart | None = None

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

    def reads(self, name: str) -> bool:
        """True if the rank reads anything of a checkpoint's tensor of this name."""
        return self.experts is None or not self.experts.is_elsewhere(name)

    def is_summed(self, module: str) -> bool:
        """True if a module of this name computes a part of a sum over all ranks."""
        part = self.of(f"{module}.weight")
        if part is not None and part.axis == 1:
            return True
        return self.experts is not None and self.experts.modules.search(module) is not None


WHOLE = Shard(0, 1, ())


def _cut_integers(name: str, value: QuantizedWeight, part: ShardPart) -> QuantizedWeight:
    begin, end = part.bounds(name, value.numbers.shape[part.axis])
    if part.axis == 0:
        return value.rows(torch.arange(begin, end))
    if value.group >= value.depth:  # one scale for all inputs of a column
        return replace(value, numbers=value.numbers[:, begin:end].contiguous())
    if begin % value.group or (end % value.group and end < value.depth):
        raise refused(
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


def summed_modules(model: nn.Module, shard: Shard) -> list[nn.Module]:
    """Modules that compute a part of a sum over all ranks."""
    return [module for name, module in model.named_modules() if shard.is_summed(name)]
