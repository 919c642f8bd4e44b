"""States that a module asks transformers' cache for, and gives it: those of the sequences that it computes."""

from dataclasses import dataclass

import torch
from torch.nn import functional


@dataclass(frozen=True, slots=True)
class StateKey:
    """Names a state as transformers' cache does: `kind` "conv" or "recurrent", and which of several of a layer."""

    layer: int
    kind: str
    index: int


class ModuleStates:
    """The states of the sequences that a module computes: [sequences, ...] by key; none of sequences at their first token.

    As `LinearAttentionLayer` of transformers, which has one batch of sequences for good. Modules may change them in place.
    """

    def __init__(self) -> None:
        self.values: dict[StateKey, torch.Tensor] = {}

    def get(self, key: StateKey) -> torch.Tensor | None:
        """The state before these tokens; None at the first token."""
        return self.values.get(key)

    def convolve(self, key: StateKey, columns: torch.Tensor, width: int | None) -> torch.Tensor:
        """Keep the last `width` columns (default: as many as are kept, or given) of [sequences, channels, columns].

        Returns the columns kept before, and these; at the first token, zeros before these up to `width`.
        """
        before = self.values.get(key)
        width = width or (columns if before is None else before).shape[-1]
        if before is None:
            whole = functional.pad(columns, (max(0, width - columns.shape[-1]), 0))
        else:
            whole = torch.cat([before, columns], dim=-1)
        self.values[key] = whole[..., -width:].clone()
        return whole

    def replace(self, key: StateKey, state: torch.Tensor) -> torch.Tensor:
        """Keep `state`, in the dtype of the one before; returns what is kept."""
        before = self.values.get(key)
        self.values[key] = state if before is None else state.to(before.dtype)
        return self.values[key]
