"""A model's own MTP head (multi-token prediction, DeepSeek-V3 report, section 2.2) as a causal model of one layer.

Its layer is of the model's own class. In place of an embedding it has a projection of the next token's embedding and the model's
last hidden state, both normalised; embedding and output head are the model's own.

    last hidden state h[i] -----> hidden norm ----.
    token t[i + 1] -> embedding -> embed norm ----+-> projection -> decoder layer -> final norm -> output head -> token i + 2
"""

import copy
from collections.abc import Callable, Collection, Mapping
from functools import partial

import torch
from safetensors import safe_open
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from paged_kernels.quantized import QuantizedWeight
from svc_common.errors import ConfigError
from worker_svc.model import checkpoint
from worker_svc.model.checkpoint import Checkpoint
from worker_svc.model.decoder.part import decoder_of
from worker_svc.model.drafts.mtp_names import MtpNames, layout_of, one_layer_settings
from worker_svc.model.weight_reader import Value

_EMBEDDING, _HEAD = "model.embed_tokens.weight", "lm_head.weight"


class MtpInput(nn.Module):
    """In place of the embedding: tokens and hidden states to the input of the head's layer."""

    def __init__(self, embed: nn.Module, embed_norm: nn.Module, hidden_norm: nn.Module, projection: nn.Linear) -> None:
        """`embed`: the model's own, which is not a part of this module."""
        super().__init__()
        self.embed_norm, self.hidden_norm, self.projection = embed_norm, hidden_norm, projection
        self._embed = (embed,)
        self.states: torch.Tensor | None = None
        """Set it before each forward pass: the model's last hidden states, [T, H]; None = zeros."""

    @property
    def weight(self) -> torch.Tensor:
        """No elements; a decoder may read where they are."""
        return self.projection.weight[:0]

    def forward(self, token_ids: torch.Tensor) -> torch.Tensor:
        """[1, T, H] for `token_ids` [1, T], each behind the token that the given hidden state is of."""
        embedded = self._embed[0](token_ids)
        states = torch.zeros_like(embedded) if self.states is None else self.states[None].to(embedded.dtype)
        both = torch.cat([self.embed_norm(embedded), self.hidden_norm(states)], -1)
        projected: torch.Tensor = self.projection(both)
        return projected


class _HeadWeights:
    """`WeightReader` of the head's layer under the names of a model of one layer."""

    is_quantized = has_integers = False

    def __init__(self, tensors: Mapping[str, Callable[[], Value]], layer: Mapping[str, str], width: int) -> None:
        self.num_elements = 0
        placeholder = partial(torch.zeros, 1, width)
        self._tensors = {new: partial(_dequantized, tensors[name]) for name, new in layer.items() if name in tensors}
        self._tensors |= {_EMBEDDING: placeholder, _HEAD: placeholder}

    def tensors(self, dtype: torch.dtype) -> Mapping[str, Callable[[], Value]]:
        """See WeightReader."""
        return self._tensors

    def float_shapes(self) -> Mapping[str, tuple[int, int]]:
        """See WeightReader."""
        return {}

    def finish(self, model: PreTrainedModel) -> None:
        """See WeightReader."""


def _dequantized(read: Callable[[], Value]) -> torch.Tensor:
    value = read()
    return value.dequantized() if isinstance(value, QuantizedWeight) else value


def load_head(
    found: Checkpoint,
    dtype: torch.dtype,
    attention: str,
    ends: tuple[nn.Module, nn.Module],
    device: torch.device | None,
) -> tuple[PreTrainedModel, PreTrainedConfig, MtpInput]:
    """The MTP head of a checkpoint as a model of one layer, its configuration, and what takes hidden states.

    `ends`: the model's embedding and output head. `attention`, `device`: see `checkpoint.load_model`. Raises ConfigError
    if the checkpoint has no head that is known, or it lacks weights.
    """
    config, tensors = found.text_config, _tensors(found, dtype)
    layout, layer, one = described_head(found, tensors)
    reader = _HeadWeights(tensors, layer, config.hidden_size)
    alone = Checkpoint(found.path, one, found.weight_files, reader)
    cls = checkpoint.model_class(found)
    model, _ = checkpoint.load_model(alone, cls, dtype, attention, lambda _done: None, device)
    joined = _input(model, layout, tensors, config.num_hidden_layers, ends[0])
    model.set_input_embeddings(joined)
    model.set_output_embeddings(ends[1])
    return model, one, joined


def described_head(found: Checkpoint, names: Collection[str]) -> tuple[MtpNames, Mapping[str, str], PreTrainedConfig]:
    """Layout of the head of a checkpoint with tensors of these names; names of its layer's weights; its configuration.

    Raises ConfigError if the checkpoint has no head that is known.
    """
    config = found.text_config
    layout = layout_of(names, config.num_hidden_layers)
    if layout is None or config is not found.config:
        raise ConfigError(
            f"--drafts mtp: {found.path} has no MTP head that is known (as of DeepSeek-V3, GLM-4.5, MiMo-V2-Flash, Qwen3-Next); "
            "use --draft-model, or --drafts ngram",
            reason="DRAFTS_UNSUPPORTED",
        )
    layer = layout.layer_weights(names, config.num_hidden_layers)
    one = copy.deepcopy(config)
    has_experts = any(".experts." in name for name in layer.values())
    for name, value in one_layer_settings(config.to_dict(), layout, has_experts=has_experts).items():
        setattr(one, name, value)
    return layout, layer, one


def _input(
    model: PreTrainedModel,
    layout: MtpNames,
    tensors: Mapping[str, Callable[[], Value]],
    num_layers: int,
    embed: nn.Module,
) -> MtpInput:
    def read(part: str) -> nn.Parameter:
        name = layout.of(part, num_layers)
        if name not in tensors:
            raise ConfigError(
                f"--drafts mtp: the checkpoint lacks {name}; use another copy of it", reason="DRAFTS_UNSUPPORTED"
            )
        return nn.Parameter(_dequantized(tensors[name]).to(model.device, model.dtype), requires_grad=False)

    final_norm = decoder_of(model).norm
    norms = []
    for part in (layout.embed_norm, layout.hidden_norm):
        norm = copy.copy(final_norm)
        norm._parameters = {"weight": read(part)}
        norms.append(norm)
    weight = read(layout.projection)
    projection = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    projection.weight = weight
    return MtpInput(embed, *norms, projection)


def _tensors(found: Checkpoint, dtype: torch.dtype) -> Mapping[str, Callable[[], Value]]:
    """What reads each tensor of the checkpoint."""
    if found.reader is not None:
        return found.reader.tensors(dtype)
    opened = [safe_open(file, "pt") for file in found.weight_files]
    return {name: partial(file.get_tensor, name) for file in opened for name in file.keys()}  # noqa: SIM118
