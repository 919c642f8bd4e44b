"""Mixtures of experts whose router sends some tokens to the experts of one of two ranks, and reads of where tokens are sent."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

from tests.support.checkpoints import EOS_TOKEN_ID, make_checkpoint

TOKENS_OF_RANK = (range(256, 384), range(384, EOS_TOKEN_ID))
"""Token ids that are routed to the experts of rank 0 alone and of rank 1 alone; others are routed by random weights."""
NUM_EXPERTS = 4
_SIZE, _WEIGHT = 2.0, 100.0
_READERS = tuple(f".{name}.weight" for name in ("q_proj", "k_proj", "v_proj", "w1", "w3", "gate_proj", "up_proj"))
_WRITERS = (".o_proj.weight", ".w2.weight", ".down_proj.weight")


def make_routed(family: str, path: Path) -> Path:
    """A random checkpoint of `family` in `path`, in which each of `TOKENS_OF_RANK` is followed by tokens of the same rank.

    Hidden dimension 0 is positive, negative or zero by the token's rank, dimension 1 is positive for all other tokens. Layers
    neither read nor change them, except for the router.
    """
    file = make_checkpoint(family, path) / "model.safetensors"
    tensors = load_file(file)
    marks = torch.zeros(len(tensors["lm_head.weight"]), 2)
    marks[:, 1] = 1
    for rank, sign in enumerate((1.0, -1.0)):
        marks[list(TOKENS_OF_RANK[rank])] = torch.tensor([sign, 0.0])
    for name, tensor in tensors.items():
        if name.endswith("embed_tokens.weight"):
            tensor[:, :2] = _SIZE * marks
        elif name == "lm_head.weight":
            tensor[:, 0], tensor[:, 1] = _WEIGHT * marks[:, 0], _WEIGHT * (2 * marks[:, 1] - 1)
        elif name.endswith(".gate.weight"):
            tensor[:, 0], tensor[:, 1] = _WEIGHT, 0
            tensor[NUM_EXPERTS // 2 :, 0] = -_WEIGHT
        elif name.endswith(_READERS):
            tensor[:, :2] = 0
        elif name.endswith(_WRITERS):
            tensor[:2] = 0
    save_file(tensors, file, metadata={"format": "pt"})
    return path


@torch.inference_mode()
def ranks_of(model: PreTrainedModel, token_ids: Sequence[int]) -> set[int]:
    """The ranks, of two, that have the experts to which `transformers` sends these tokens in any layer."""
    found: set[int] = set()
    hooks = [
        module.register_forward_pre_hook(partial(_note, found))
        for name, module in model.named_modules()
        if name.endswith(".experts")
    ]
    assert hooks
    model(torch.tensor([list(token_ids)]))
    for hook in hooks:
        hook.remove()
    return found


def _note(found: set[int], _module: object, given: tuple[torch.Tensor, ...]) -> None:
    found |= set((given[1].flatten() * 2 // NUM_EXPERTS).tolist())
