"""Modules that take the place of those which other stages have. They have no weights."""

from typing import Any

import torch
from torch import nn


class Elsewhere(nn.Module):
    """A layer, or the head, that another stage has: passes hidden states on.

    `seen`: those of the last pass, [1, T, H]. Has the plain attributes of the module in its place, since a decoder may
    read them.
    """

    keeps_row_bits = True
    """See RowModules."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.seen = torch.empty(0)
        for name, value in vars(layer).items():
            if isinstance(value, str | int | float) and not name.startswith("_"):
                setattr(self, name, value)

    def forward(self, hidden_states: torch.Tensor, *_args: Any, **_options: Any) -> torch.Tensor:
        """`hidden_states`."""
        self.seen = hidden_states
        return hidden_states


class StageArrival(Elsewhere):
    """The same in place of the decoder's first layer: gives `states` instead, which the stage before has computed.

    Set `states`, [1, T, H], before each forward pass.
    """

    def __init__(self, layer: nn.Module) -> None:
        super().__init__(layer)
        self.states = torch.empty(0)

    def forward(self, hidden_states: torch.Tensor, *_args: Any, **_options: Any) -> torch.Tensor:
        """`states`."""
        return super().forward(self.states)


class NoEmbedding(nn.Module):
    """In place of an embedding that no layer reads: zeros of its width, in torch's default dtype when it was made."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self._width, self._dtype = width, torch.get_default_dtype()

    @property
    def weight(self) -> torch.Tensor:
        """No elements; a decoder may read where they are."""
        return torch.empty(0, device="cpu")

    def forward(self, token_ids: torch.Tensor) -> torch.Tensor:
        """[..., H] for `token_ids` [...]."""
        return torch.zeros(*token_ids.shape, self._width, dtype=self._dtype)
