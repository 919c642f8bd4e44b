"""Logprobs of the unmodified distribution, for chosen tokens and for the top tokens."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class TopLogprobs:
    """The `most` top tokens of n rows, best first, ties by lower id: int64 and float32 [n, most]."""

    token_ids: torch.Tensor
    logprobs: torch.Tensor


def top_logprobs(logits: torch.Tensor, most: int) -> TopLogprobs:
    """Top tokens of float32 `logits` [n, vocab]; -inf comes last. Independent of other rows and of a larger `most`."""
    ids = _ordered_keys(logits).topk(most, dim=-1).indices
    return TopLogprobs(ids, torch.log_softmax(logits, -1).gather(-1, ids))


def of_tokens(logits: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
    """float32 [n]: logprob of each row's token, int64 [n]."""
    return torch.log_softmax(logits, -1).gather(-1, token_ids[:, None]).squeeze(1)


def _ordered_keys(logits: torch.Tensor) -> torch.Tensor:
    """int64 keys, distinct within a row, ordered by (logit, lower id first), so that ties do not depend on the library."""
    # Adding zero turns -0 into 0. The bits of negative floats are in reverse order.
    bits = (logits + 0.0).view(torch.int32)
    ordered = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(torch.int64)
    return (ordered << 32) - torch.arange(logits.shape[-1], device=logits.device)
