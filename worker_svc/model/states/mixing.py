"""Whether tokens of a model depend on each other by more than attention and states, found by running it without both."""

from collections.abc import Sequence

import torch
from torch import nn
from transformers import PreTrainedModel

from worker_svc.model.decoder.part import PackedPast, decoder_of
from worker_svc.model.states.tensors import mapped

_TOKENS = ((0, 1, 2, 3), (3, 1, 0, 2))
_PLACE = 1
_TOLERANCES = {torch.float32: 1e-4}
_TOLERANCE = 3e-2  # sums of experts may be rounded otherwise beside other tokens


@torch.inference_mode()
def mixes_tokens(model: PreTrainedModel, state_modules: Sequence[nn.Module]) -> bool:
    """True if a token's hidden state depends on others where `state_modules`, and attention inside a probe, return zeros."""
    hooks = [module.register_forward_hook(_zeros) for module in state_modules]
    try:
        first, other = (_hidden(model, tokens) for tokens in _TOKENS)
    finally:
        for hook in hooks:
            hook.remove()
    return not float((first - other).norm() / first.norm()) <= _TOLERANCES.get(model.dtype, _TOLERANCE)


def _zeros(_module: nn.Module, _given: object, out: object) -> object:
    return mapped(out, torch.zeros_like)


def _hidden(model: PreTrainedModel, tokens: Sequence[int]) -> torch.Tensor:
    """Last hidden state of one token, [H]."""
    ids = torch.tensor([list(tokens)], device=model.device)
    places = torch.arange(len(tokens), device=model.device)[None]
    past = PackedPast(model.config)
    out = decoder_of(model)(input_ids=ids, position_ids=places, use_cache=False, past_key_values=past)
    found: torch.Tensor = out.last_hidden_state[0, _PLACE].float()
    return found
