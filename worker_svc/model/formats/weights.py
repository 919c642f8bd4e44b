"""Weights of safetensors files for transformers' class, where some are quantized."""

import logging
from collections import defaultdict
from collections.abc import Callable, Mapping
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from transformers import PreTrainedModel

from worker_svc.model.formats.form_checks import matrices_of, plain_names
from worker_svc.model.formats.forms import Entries, Matrix, WeightFormat
from worker_svc.model.formats.values import value_of, why_dequantized
from worker_svc.model.weight_reader import Value

log = logging.getLogger(__name__)

_SUFFIXES = (
    *("", "_packed", "_scale", "_scale_inv", "_zero_point", "_shape", "_g_idx", "_global_scale"),
    *("qweight", "qzeros", "scales", "g_idx"),
)


class FormattedWeights:
    """`WeightReader` of the files of a checkpoint. A matrix's tensors may be in several of them."""

    def __init__(self, files: tuple[Path, ...], given: WeightFormat, entries: Entries) -> None:
        """Raises UnsupportedWeights for tensors that do not fit `given`."""
        self._files, self._name = files, given.name
        self._matrices = matrices_of(given, entries)
        self._plain = plain_names(self._matrices, entries)
        self._dequantized: dict[str, list[str]] = defaultdict(list)  # names by reason
        elements = sum(prod(matrix.shape) for matrix in self._matrices.values())
        self.num_elements = elements + sum(prod(entries[name]["shape"]) for name in self._plain)
        self.forms = {target.removesuffix(".weight"): matrix.form for target, matrix in self._matrices.items()}
        """How modules are stored, by their names in the checkpoint."""
        self.is_quantized = bool(self._matrices)
        self.has_integers = not all(matrix.form.layout.is_float for matrix in self._matrices.values())

    def tensors(self, dtype: torch.dtype) -> Mapping[str, Callable[[], Value]]:
        """See WeightReader."""
        opened = [safe_open(file, "pt") for file in self._files]
        places = {name: file for file in opened for name in file.keys()}  # noqa: SIM118
        plain = {name: partial(places[name].get_tensor, name) for name in self._plain}
        quantized = {name: partial(self._read, matrix, places, dtype) for name, matrix in self._matrices.items()}
        return plain | quantized

    def float_shapes(self) -> Mapping[str, tuple[int, int]]:
        """See WeightReader. A matrix with scales that are too large is dequantized nevertheless, when it is read."""
        floats = (matrix for matrix in self._matrices.values() if matrix.form.layout.is_float)
        kept = (matrix for matrix in floats if matrix.form.kept_group and len(matrix.shape) == 2)
        return {matrix.target: (matrix.shape[0], matrix.shape[1]) for matrix in kept}

    def finish(self, model: PreTrainedModel) -> None:
        """See WeightReader. Logs what was dequantized."""
        for why, names in self._dequantized.items():
            log.info(
                "%d of %d quantized weights (%s) are dequantized to %s: %s, %s first",
                *(
                    len(names),
                    len(self._matrices),
                    self._name,
                    str(model.dtype).removeprefix("torch."),
                    why,
                    min(names),
                ),
            )

    def _read(self, matrix: Matrix, places: dict[str, Any], dtype: torch.dtype) -> Value:
        tensors = _tensors(matrix, places)
        if why := why_dequantized(matrix, tensors):
            self._dequantized[why].append(matrix.target)
        return value_of(matrix, tensors, dtype)


def _tensors(matrix: Matrix, places: dict[str, Any]) -> dict[str, torch.Tensor]:
    names = {suffix: matrix.stem + suffix for suffix in _SUFFIXES}
    return {suffix: places[name].get_tensor(name) for suffix, name in names.items() if name in places}
