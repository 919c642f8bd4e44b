"""Serves the text of a model that also takes images or sound: its class without the parts that text does not reach.

Such a model has a decoder, a head, and for each other input a tower and a projector, which make embeddings of it. Without these
inputs its forward pass is that of the text alone, with the model's own rules for positions, so the towers are neither built nor
read.
"""

import logging
import re
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedConfig, PreTrainedModel

from svc_common.errors import ConfigError
from worker_svc.model.decoder.part import decoder_of

log = logging.getLogger(__name__)


class NotLoaded(nn.Module):
    """In place of the part `name`, which text does not reach. Has no weights."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name

    def forward(self, *_args: Any, **_options: Any) -> torch.Tensor:
        """Raise ConfigError, when the model is probed: it cannot be served without this part."""
        raise ConfigError(
            f"the model passes text through {self.name}, which is loaded for other inputs only: it cannot be served",
            reason="MODEL_UNSUPPORTED",
            metadata={"module": self.name},
        )


class TextHalf:
    """Base of the classes that `text_half` makes."""


def text_half(cls: type[PreTrainedModel]) -> type[PreTrainedModel]:
    """`cls`, of which only the decoder, the head and what contains them is built and read."""

    def __init__(self: PreTrainedModel, config: PreTrainedConfig, *args: object, **options: object) -> None:
        cls.__init__(self, config, *args, **options)
        decoder, head = decoder_of(self), self.get_output_embeddings()
        if decoder is not self and head is not None:
            _cut(self, (decoder, head), "")
        unread = {f"^{re.escape(part.name)}\\." for part in not_loaded(self)}
        # transformers warns of other weights that it does not read.
        self._keys_to_ignore_on_load_unexpected = {*(self._keys_to_ignore_on_load_unexpected or ()), *unread}

    return type(cls.__name__, (cls, TextHalf), {"__init__": __init__, "__module__": cls.__module__})


def class_of(config: PreTrainedConfig) -> type[PreTrainedModel] | None:
    """transformers' class from text, or images and text, to text; None if there is none."""
    return _class_in(AutoModelForCausalLM, config) or _class_in(AutoModelForImageTextToText, config)


def _class_in(auto: Any, config: PreTrainedConfig) -> type[PreTrainedModel] | None:
    found: type[PreTrainedModel] | None = auto._model_mapping.get(type(config), None)
    return found


def without_other_parts(config: PreTrainedConfig) -> PreTrainedConfig:
    """The text decoder's configuration where that is what transformers' causal class takes (Llama 4); else all of it."""
    text, cls = config.get_text_config(decoder=True), _class_in(AutoModelForCausalLM, config)
    if text is config or cls is None or cls.config_class is not type(text):
        return config
    text.dtype, text.architectures = text.dtype or config.dtype, text.architectures or config.architectures
    return text


def _cut(owner: nn.Module, kept: Sequence[nn.Module], prefix: str) -> None:
    """Replace the children of `owner` with weights that neither are one of `kept` nor contain one."""
    for name, child in list(owner.named_children()):
        if child in kept or next(child.parameters(), None) is None:
            continue
        if set(child.modules()).isdisjoint(kept):
            setattr(owner, name, NotLoaded(f"{prefix}{name}"))
        else:
            _cut(child, kept, f"{prefix}{name}.")


def not_loaded(model: nn.Module) -> list[NotLoaded]:
    """The parts that `text_half` left out."""
    return [module for module in model.modules() if isinstance(module, NotLoaded)]


def report(model: nn.Module) -> None:
    """Log which parts are not loaded, if any."""
    if parts := ", ".join(part.name for part in not_loaded(model)):
        name = type(model).__name__
        log.info("%s is served as a text model; not loaded, because other inputs need it: %s", name, parts)


def num_read(cls: type[PreTrainedModel], config: PreTrainedConfig) -> int | None:
    """Elements of the weights that such a class reads of its checkpoint; None for other classes, which read all."""
    if not issubclass(cls, TextHalf):
        return None
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in cls._from_config(config).parameters())
