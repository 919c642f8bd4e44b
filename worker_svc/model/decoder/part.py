"""The decoder within a model of transformers: where it is, and what it is told of positions and states.

`PackedPast` stands in for transformers' cache where layers ask it how many tokens came before, as Llama 4's temperature
tuning does. Such a layer takes that number for the position of its first row and counts on from there. In a packed row each
token has a place of its own, so the number is a tensor: with one element per token, the sum is its position.

Layers with states (recurrent ones, short convolutions) ask it for these, and give it new ones. A module that does so runs
some sequences at a time: `ModuleStates` has theirs.
"""

from typing import Any

import torch
from torch import nn
from transformers import DynamicCache, PreTrainedConfig, PreTrainedModel

from worker_svc.model.decoder.module_states import ModuleStates, StateKey


def decoder_of(model: PreTrainedModel) -> nn.Module:
    """The decoder of a causal language model; the model itself if it has no such part.

    transformers looks under the model's prefix, which may name something that only a larger model has (Llama 4).
    """
    found: nn.Module = model.get_decoder()
    if found is not model:
        return found
    parts = [child for child in model.children() if isinstance(child, PreTrainedModel)]
    return parts[0] if len(parts) == 1 else model


class PackedPast(DynamicCache):
    """Holds no keys and values. `is_asked`: true once a layer has asked for its number of tokens; a probe finds that out.

    `states`: of the module that runs.
    """

    def __init__(self, config: PreTrainedConfig, states: ModuleStates | None = None) -> None:
        super().__init__(config=config)
        self.is_asked = False
        self.states = states or ModuleStates()
        self._before: torch.Tensor | int = 0

    def begin(self, positions: torch.Tensor) -> "PackedPast":
        """Set the tokens of the next forward pass. `positions`: int64 [1, T]."""
        self._before = positions[0] - torch.arange(positions.shape[1], device=positions.device)
        return self

    def get_seq_length(self, layer_idx: int | None = None) -> Any:
        """See Cache. Of a layer: [T], by how much each token's position exceeds its place in the packed row."""
        if layer_idx is None:
            return 0
        self.is_asked = True
        return self._before

    def get_query_offset(self, layer_idx: int = 0) -> int:
        """See Cache. For masks, which a probe alone asks for."""
        return 0

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *_args: Any, **_options: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See Cache. Keys and values are stored by attention."""
        return key_states, value_states

    # --- states ------------------------------------------------------------------------------------------------------

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> torch.Tensor | None:
        """See Cache."""
        return self.states.get(StateKey(layer_idx, "conv", state_idx))

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> torch.Tensor | None:
        """See Cache."""
        return self.states.get(StateKey(layer_idx, "recurrent", state_idx))

    def update_conv_state(
        self,
        conv_states: torch.Tensor,
        layer_idx: int,
        state_idx: int = 0,
        conv_kernel_size: int | None = None,
        **_options: Any,
    ) -> torch.Tensor:
        """See Cache."""
        return self.states.convolve(StateKey(layer_idx, "conv", state_idx), conv_states, conv_kernel_size)

    def update_recurrent_state(
        self, recurrent_states: torch.Tensor, layer_idx: int, state_idx: int = 0, **_options: Any
    ) -> torch.Tensor:
        """See Cache."""
        return self.states.replace(StateKey(layer_idx, "recurrent", state_idx), recurrent_states)

    def is_recording_past(self, layer_idx: int) -> bool:
        """See Cache. False: rows continue from blocks, not from earlier states of a layer."""
        return False
