"""Finds the part of a model that turns tokens into last hidden states, which its head turns into logits."""

from torch import nn
from transformers import PreTrainedModel


def decoder_of(model: PreTrainedModel) -> nn.Module:
    """The decoder of a causal language model; the model itself if it has no such part.

    transformers looks under the model's prefix, which may name something that only a larger model has (Llama 4).
    """
    found: nn.Module = model.get_decoder()
    if found is not model:
        return found
    parts = [child for child in model.children() if isinstance(child, PreTrainedModel)]
    return parts[0] if len(parts) == 1 else model
