"""Interface of readers for checkpoints that transformers does not read itself."""

from collections.abc import Iterator
from typing import Protocol

import torch
from torch import nn
from transformers import PreTrainedModel

from paged_kernels.quantized import QuantizedWeight


class WeightReader(Protocol):
    """Reads a checkpoint's tensors under the names of transformers' class."""

    num_tensors: int
    num_elements: int
    """Weight elements, however they are stored."""
    is_quantized: bool

    def read(self, dtype: torch.dtype) -> Iterator[tuple[str, torch.Tensor | QuantizedWeight]]:
        """Name and value of each tensor, for the compute dtype."""
        ...

    def finish(self, model: PreTrainedModel) -> None:
        """Set what is no parameter, once these are loaded."""
        ...


class StoredForms:
    """The `WeightOf` for a loaded model: quantized weights as they were stored. Hands each out once, and drops it."""

    def __init__(self, model: PreTrainedModel, quantized: dict[str, QuantizedWeight]) -> None:
        self._of_parameter = {id(model.get_parameter(name)): weight for name, weight in quantized.items()}

    def __call__(self, linear: nn.Linear) -> torch.Tensor | QuantizedWeight:
        """The weight of a linear module; a head that is tied to the embedding has the embedding's."""
        return self._of_parameter.pop(id(linear.weight), linear.weight)
