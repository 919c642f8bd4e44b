"""Which layers a stage has, and transformers' class of the model with those alone.

All layers keep their numbers: names of weights, layer types and windows are found by them.
"""

import copy
import re
from collections.abc import Callable, Iterable, Mapping, Set
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from safetensors import safe_open
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from svc_common.errors import ConfigError
from worker_svc.model import stored_weights
from worker_svc.model.checkpoint import Checkpoint
from worker_svc.model.decoder.part import decoder_of
from worker_svc.model.fused.elsewhere import Elsewhere, NoEmbedding, StageArrival
from worker_svc.model.weight_reader import Value, WeightReader


@dataclass(frozen=True, slots=True)
class StagePart:
    """Stage `number` of `count`, and its range of the decoder's layers."""

    number: int
    count: int
    layers: range

    @property
    def is_first(self) -> bool:
        """True if it embeds tokens."""
        return self.number == 0

    @property
    def is_last(self) -> bool:
        """True if it computes logits."""
        return self.number == self.count - 1


def refused(what: str, **metadata: str) -> ConfigError:
    """The error for a model, or a setting, that stages do not support."""
    return ConfigError(f"--pipeline-parallel: {what}", reason="PIPELINE_PARALLEL", metadata=metadata)


def part_of(num_layers: int, number: int, count: int) -> StagePart:
    """Ranges of nearly equal length; the first ones are longer, since the last stage has the head too.

    Raises ConfigError for more stages than layers.
    """
    if count > num_layers:
        raise refused(
            f"the model has {num_layers} layers, and {count} stages need at least one each; use at most {num_layers}",
            num_hidden_layers=str(num_layers),
        )
    size, rest = divmod(num_layers, count)
    begin = number * size + min(number, rest)
    return StagePart(number, count, range(begin, begin + size + (number < rest)))


def staged(
    found: Checkpoint, cls: type[PreTrainedModel], number: int, count: int
) -> tuple[Checkpoint, type[PreTrainedModel], StagePart]:
    """The checkpoint as a stage reads it, the class of its model, and its part. Unchanged for a single stage.

    Raises ConfigError for more stages than layers, for a decoder without one list of all layers, and for layers that read
    the keys and values of others.
    """
    part = part_of(found.text_config.num_hidden_layers, number, count)
    if count == 1:
        return found, cls, part
    if getattr(found.text_config, "num_kv_shared_layers", None):
        raise refused(
            "layers read keys and values of layers before them, which may be of another stage; serve it with one stage"
        )
    config = copy.deepcopy(found.config)
    keeps_tie = part.is_last and config.get_text_config(decoder=True).tie_word_embeddings
    if not keeps_tie:
        for each in (config, config.get_text_config(decoder=True)):
            each.tie_word_embeddings = False
    own = _class_of(cls, part, keeps_embedding=part.is_first or keeps_tie)
    model = _without_weights(own, config)
    names = {name for name, _ in model.named_parameters()}
    left_out = {name for name, _ in _without_weights(cls, found.config).named_parameters()} - names
    num_elements = sum(parameter.numel() for parameter in model.parameters())
    reader = _StageReader(
        found.reader or PlainReader(found.weight_files), num_elements, part, _list_of(model), left_out
    )
    return replace(found, config=config, reader=reader), own, part


def _without_weights(cls: type[PreTrainedModel], config: PreTrainedConfig) -> PreTrainedModel:
    with torch.device("meta"):
        return cls(copy.deepcopy(config))


def _class_of(cls: type[PreTrainedModel], part: StagePart, *, keeps_embedding: bool) -> type[PreTrainedModel]:
    def __init__(self: PreTrainedModel, config: PreTrainedConfig, *args: object, **options: object) -> None:
        cls.__init__(self, config, *args, **options)
        _cut(self, part, keeps_embedding=keeps_embedding)

    return type(cls.__name__, (cls,), {"__init__": __init__, "__module__": cls.__module__})


def layers_of(model: PreTrainedModel) -> nn.ModuleList:
    """The decoder's list of all layers. Raises ConfigError if there is none, or several."""
    found = decoder_of(model).get_submodule(_list_of(model))
    assert isinstance(found, nn.ModuleList)
    return found


def _list_of(model: PreTrainedModel) -> str:
    count = model.config.get_text_config(decoder=True).num_hidden_layers
    lists = {name: child for name, child in decoder_of(model).named_children() if isinstance(child, nn.ModuleList)}
    names = [name for name, child in lists.items() if len(child) == count]
    if len(names) != 1:
        raise refused(f"{type(model).__name__} has no list of its {count} layers; serve it with one stage")
    return names[0]


def _cut(model: PreTrainedModel, part: StagePart, *, keeps_embedding: bool) -> None:
    """Replace what the stage does not have."""
    layers, decoder = layers_of(model), decoder_of(model)
    for number in range(len(layers)):
        if number not in part.layers:
            cls = Elsewhere if number or part.is_first else StageArrival
            layers[number] = cls(layers[number])
    embedding = decoder.get_input_embeddings()
    if not keeps_embedding:
        decoder.set_input_embeddings(NoEmbedding(embedding.weight.shape[1]))
    if not part.is_last:
        head = model.get_output_embeddings()
        name = next(name for name, module in model.named_modules() if module is head)
        model.set_submodule(name, Elsewhere(head))


class _StageReader:
    """`WeightReader` of a stage. `layers`: name of the list of layers. `left_out`: other parameters of other stages."""

    def __init__(
        self, inner: WeightReader, num_elements: int, part: StagePart, layers: str, left_out: Set[str]
    ) -> None:
        self._inner, self.num_elements = inner, num_elements
        self._part, self._left_out = part, left_out
        self._number = re.compile(rf"(?:^|\.){re.escape(layers)}\.(\d+)\.")
        self.is_quantized, self.has_integers = inner.is_quantized, inner.has_integers

    def tensors(self, dtype: torch.dtype) -> Mapping[str, Callable[[], Value]]:
        """See WeightReader."""
        found = self._inner.tensors(dtype)
        return {name: read for name, read in found.items() if self._has(name)}

    def _has(self, name: str) -> bool:
        found = self._number.search(name)  # weights within a layer may have older names
        return name not in self._left_out if found is None else int(found[1]) in self._part.layers

    def float_shapes(self) -> Mapping[str, tuple[int, int]]:
        """See WeightReader: none, since devices that read weights late have no stages."""
        return {}

    def finish(self, model: PreTrainedModel) -> None:
        """See WeightReader."""
        self._inner.finish(model)


class PlainReader:
    """`WeightReader` of safetensors files that are not quantized."""

    is_quantized = has_integers = False

    def __init__(self, files: Iterable[Path]) -> None:
        self._files = tuple(files)
        self.num_elements = stored_weights.num_elements(stored_weights.entries_of(self._files))

    def tensors(self, dtype: torch.dtype) -> Mapping[str, Callable[[], Value]]:
        """See WeightReader."""
        opened = [safe_open(file, "pt") for file in self._files]
        return {name: partial(file.get_tensor, name) for file in opened for name in file.keys()}  # noqa: SIM118

    def float_shapes(self) -> Mapping[str, tuple[int, int]]:
        """See WeightReader."""
        return {}

    def finish(self, model: PreTrainedModel) -> None:
        """See WeightReader."""
