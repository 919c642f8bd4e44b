"""Interface of readers for checkpoints that transformers does not read itself."""

import logging
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Protocol

import torch
from torch import nn
from transformers import PreTrainedModel

from paged_kernels.quantized import QuantizedWeight

log = logging.getLogger(__name__)


Value = torch.Tensor | QuantizedWeight


class WeightReader(Protocol):
    """Reads a checkpoint's tensors under the names of transformers' class, or older ones that it knows."""

    num_elements: int
    """Weight elements, however they are stored."""
    is_quantized: bool
    """True if weights are stored as integers or E4M3 numbers."""
    has_integers: bool
    """True if weights are stored as integers."""

    def tensors(self, dtype: torch.dtype) -> Mapping[str, Callable[[], Value]]:
        """By name what reads a tensor for the compute dtype; several threads may read at once."""
        ...

    def float_shapes(self) -> Mapping[str, tuple[int, int]]:
        """Shapes [columns, depth] of the matrices that are kept as E4M3 numbers, by name."""
        ...

    def finish(self, model: PreTrainedModel) -> None:
        """Set what is no parameter, once these are loaded."""
        ...


def is_left_out(parameter: torch.Tensor) -> bool:
    """True if no weights were read for it, see `OnDemand`. Weights that begin with NaN are of no use either."""
    return parameter.numel() > 0 and bool(parameter[(0,) * parameter.dim()].isnan())


class OnDemand:
    """Tensors for transformers' loading, which are read when it takes them, like slices of a safetensors file.

    So a device gets each as it is read, and the host holds few. `keeps`: keep the quantized forms, and the
    memory of their dequantized weights, to find the parameters that they have become. `left_out`: shapes of
    quantized weights that are not read, because the modules that have them are replaced: they are NaN of `dtype` on
    `device`, without memory.
    """

    def __init__(
        self,
        tensors: Mapping[str, Callable[[], Value]],
        *,
        keeps: bool,
        dtype: torch.dtype,
        left_out: Mapping[str, tuple[int, int]],
        device: torch.device | None = None,
    ) -> None:
        nothing = torch.tensor(torch.nan, dtype=dtype, device=device)
        absent = {name: partial(nothing.expand, shape) for name, shape in left_out.items() if name in tensors}
        self.state = {name: _Taken(self, name, read) for name, read in {**tensors, **absent}.items()}
        self.forms: dict[str, tuple[torch.Tensor, QuantizedWeight]] = {}
        self.quantized = set(absent)
        self.problem: Exception | None = None
        """The error of a tensor, which transformers may report in its own words."""
        self._keeps = keeps

    def take(self, name: str, read: Callable[[], Value]) -> torch.Tensor:
        """Read a tensor, dequantized."""
        try:
            value = read()
        except Exception as error:
            self.problem = error
            raise
        if not isinstance(value, QuantizedWeight):
            return value
        self.quantized.add(name)
        weights = value.dequantized()
        if self._keeps:
            self.forms[name] = weights, value
        return weights


class _Taken:
    """One of the tensors."""

    def __init__(self, owner: OnDemand, name: str, read: Callable[[], Value]) -> None:
        self._owner, self._name, self._read = owner, name, read

    def __getitem__(self, _all: object) -> torch.Tensor:
        return self._owner.take(self._name, self._read)


class LateForms:
    """The `WeightOf` for weights that were left out: reads each when its module is packed, to the device of the module."""

    def __init__(
        self, model: PreTrainedModel, tensors: Mapping[str, Callable[[], Value]], names: Iterable[str]
    ) -> None:
        """`names`: of parameters, and of what `tensors` reads for them."""
        self._names = {id(model.get_parameter(name)): name for name in names}
        self._tensors = tensors

    def __call__(self, linear: nn.Linear) -> Value:
        """The weight of a linear module."""
        name = self._names.get(id(linear.weight))
        if name is None:
            return linear.weight
        value = self._tensors[name]()
        if not isinstance(value, QuantizedWeight):
            log.info("%s is dequantized: the kernels do not take its scales", name)
        return value.to(linear.weight.device)


class StoredForms:
    """The `WeightOf` for a loaded model: quantized weights as they were stored. Hands each out once, and drops it."""

    def __init__(self, model: PreTrainedModel, taken: OnDemand) -> None:
        """A parameter is found by the memory of the dequantized weights: it may have another name. Merged ones are not found."""
        places = {tensor.data_ptr(): name for name, (tensor, _) in taken.forms.items()}
        found = {id(own): name for own in model.parameters() if (name := places.get(own.data_ptr())) is not None}
        self._of_parameter = {number: taken.forms[name][1] for number, name in found.items()}
        merged = sorted(taken.forms.keys() - found.values())
        if merged:
            log.info(
                "%d of %d quantized weights are dequantized, because transformers merges them: %s first",
                *(len(merged), len(taken.forms), merged[0]),
            )

    def __call__(self, linear: nn.Linear) -> Value:
        """The weight of a linear module; a head that is tied to the embedding has the embedding's."""
        return self._of_parameter.pop(id(linear.weight), linear.weight)
