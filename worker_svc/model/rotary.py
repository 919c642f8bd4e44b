"""Fixes, at load time, rotary scaling that depends on the longest sequence of a packed row (`longrope`).

transformers chooses between short and long frequencies by the largest position it sees, which in a packed row
may be another sequence's. Here the choice is fixed by `max_model_len`, in place of the per-sequence choice of
the scaling's authors.
"""

import torch
from torch import nn
from transformers import PreTrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

_KIND = "longrope"
_FIXED = "longrope (fixed)"


def fix_longrope(model: nn.Module, config: PreTrainedConfig, max_model_len: int) -> int:
    """Fix every rotary module that scales by length. Returns their number."""
    found = 0
    for module in model.modules():
        kind = getattr(module, "rope_type", None)
        if kind == _KIND:
            _fix(module, config, max_model_len, None)
            module.rope_type = _FIXED
            found += 1
        elif isinstance(kind, dict) and _KIND in kind.values():
            layer_types = [layer_type for layer_type, of_layer in kind.items() if of_layer == _KIND]
            for layer_type in layer_types:
                _fix(module, config, max_model_len, layer_type)
            module.rope_type = kind | dict.fromkeys(layer_types, _FIXED)
            found += 1
    return found


def _fix(module: nn.Module, config: PreTrainedConfig, max_model_len: int, layer_type: str | None) -> None:
    name = "inv_freq" if layer_type is None else f"{layer_type}_inv_freq"
    buffer = getattr(module, name)
    extra = {} if layer_type is None else {"layer_type": layer_type}
    frequencies, _ = ROPE_INIT_FUNCTIONS[_KIND](config, buffer.device, seq_len=max_model_len, **extra)
    buffer.copy_(frequencies)


def divide_frequencies(model: nn.Module, factors: torch.Tensor) -> None:
    """Divide each frequency of every rotary module by its factor, as files of llama.cpp state Llama 3's scaling."""
    for module in model.modules():
        for name in ("inv_freq", "original_inv_freq"):
            buffer = getattr(module, name, None)
            if isinstance(buffer, torch.Tensor):
                buffer.div_(factors.to(buffer))
