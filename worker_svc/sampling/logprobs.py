"""Log probabilities of the unmodified distribution: of chosen tokens, and of the likeliest beside them."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Likeliest:
    """The `most` likeliest tokens of n rows, best first, ties by lower id: int64 and float32 [n, most]."""

    token_ids: torch.Tensor
    logprobs: torch.Tensor


def likeliest(logits: torch.Tensor, most: int) -> Likeliest:
    """Of float32 `logits` [n, vocab]; -inf comes last. The same for a row in any company and for any larger `most`."""
    ids = _ordered_keys(logits).topk(most, dim=-1).indices
    return Likeliest(ids, torch.log_softmax(logits, -1).gather(-1, ids))


def of_tokens(logits: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
    """float32 [n]: log probability of each row's token, int64 [n]."""
    return torch.log_softmax(logits, -1).gather(-1, token_ids[:, None]).squeeze(1)


def _ordered_keys(logits: torch.Tensor) -> torch.Tensor:
    """int64, distinct within a row, ordered as (logit, lower id first): the choice among equals is ours, not the library's."""
    # Adding zero makes -0 the same as 0. Bits of negative floats run backwards.
    bits = (logits + 0.0).view(torch.int32)
    ordered = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(torch.int64)
    return (ordered << 32) - torch.arange(logits.shape[-1], device=logits.device)
