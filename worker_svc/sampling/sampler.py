"""Tokens from logits: a pure function of (seed, sequence index, position, logits) for each row, vectorised over rows.

The generator is counter-based: a 64-bit integer hash of seed, sequence and position gives the one uniform
number that a token needs, so a row's token does not depend on other rows, on earlier draws or on the device.
Integer arithmetic wraps, as the hash requires.
"""

from dataclasses import dataclass
from typing import Protocol

import torch

from worker_svc.sampling.logprobs import of_tokens

# Temperatures below this mean greedy (vLLM's value): dividing by less only overflows.
GREEDY_BELOW = 1e-5
_MASK_64 = 2**64 - 1
_PIECE = 64
_MOST_DRAWN_AT_ONCE = 2**21
"""Logits per draw: drawing takes about ten times their memory, which can exceed the model's."""


def _signed(value: int) -> int:
    return (value & _MASK_64) - 2**64 if value & 2**63 else value & _MASK_64


# Constants of SplitMix64 (Steele, Lea, Flood 2014).
_GOLDEN = _signed(0x9E3779B97F4A7C15)
_MIX_1 = _signed(0xBF58476D1CE4E5B9)
_MIX_2 = _signed(0x94D049BB133111EB)


@dataclass(frozen=True, slots=True)
class SamplingRows:
    """Sampling parameters of n rows; tensors [n] on the logits' device.

    `temperatures` float32, 0 = greedy; `top_ks` int64, 0 = all; `top_ps` float32 in (0, 1]; `seeds` int64
    (the bits of a uint64); `sequence_indexes` int64; `positions` int64: position of the drawn token in its
    sequence; `logprobs` bool; `min_ps` float32 in [0, 1], 0 = off, None = off for all rows.
    """

    temperatures: torch.Tensor
    top_ks: torch.Tensor
    top_ps: torch.Tensor
    seeds: torch.Tensor
    sequence_indexes: torch.Tensor
    positions: torch.Tensor
    logprobs: torch.Tensor
    min_ps: torch.Tensor | None = None


def finite_rows(logits: torch.Tensor) -> torch.Tensor:
    """bool [n]: True if all of a row's logits are finite."""
    # Minimum and maximum propagate NaN and infinities without a mask of the logits' size; torch.aminmax takes
    # 20 times as long.
    return torch.isfinite(logits.amin(-1)) & torch.isfinite(logits.amax(-1))


def argmax(logits: torch.Tensor) -> torch.Tensor:
    """int64 [n]: argmax of each row, the first one if tied."""
    num_rows, vocab_size = logits.shape
    if logits.device.type != "cpu" or vocab_size % _PIECE or not num_rows:
        return logits.argmax(-1)
    # Maximum of each piece, then argmax in the first piece that has it: argmax over a whole row takes several
    # times as long.
    pieces = logits.view(num_rows, -1, _PIECE)
    first = pieces.amax(-1).argmax(-1)
    return first * _PIECE + pieces[torch.arange(num_rows), first].argmax(-1)


def greedy(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """`argmax` and `finite_rows`."""
    return argmax(logits), finite_rows(logits)


def draw(logits: torch.Tensor, rows: SamplingRows, valid: torch.Tensor) -> torch.Tensor:
    """One token per row, int64 [n]; undefined for rows that are not `valid` (bool [n]).

    Never draws a token with logit -inf.
    """
    tokens = argmax(logits)
    drawn = (rows.temperatures >= GREEDY_BELOW) & valid
    filtered = drawn & ((rows.top_ks > 0) | (rows.top_ps < 1))
    if rows.min_ps is not None:
        filtered |= drawn & (rows.min_ps > 0)
    for chosen, method in ((drawn & ~filtered, _draw), (filtered, _draw_filtered)):
        for at in chosen.nonzero().squeeze(1).split(rows_at_once(logits.shape[1])):
            if len(at):
                tokens[at] = method(logits[at] / rows.temperatures[at, None], rows, at)
    return tokens


def rows_at_once(vocab_size: int) -> int:
    """Maximum number of rows that `draw` processes together: more rows take no more memory."""
    return max(1, _MOST_DRAWN_AT_ONCE // vocab_size)


def uniform(seeds: torch.Tensor, sequence_indexes: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """float64 in [0, 1) with 52 random bits (so that a share of a total stays below it); int64 arguments of one shape."""
    state = _mix(seeds + _GOLDEN)
    state = _mix(state ^ _mix(sequence_indexes + _MIX_1))
    state = _mix(state + (positions + 1) * _GOLDEN)
    return _shift(state, 12).to(torch.float64) * 2.0**-52


def _mix(x: torch.Tensor) -> torch.Tensor:
    x = (x ^ _shift(x, 30)) * _MIX_1
    x = (x ^ _shift(x, 27)) * _MIX_2
    return x ^ _shift(x, 31)


def _shift(x: torch.Tensor, bits: int) -> torch.Tensor:
    """Logical right shift; torch's keeps the sign."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _uniform_of(rows: SamplingRows, at: torch.Tensor) -> torch.Tensor:
    return uniform(rows.seeds[at], rows.sequence_indexes[at], rows.positions[at])


def _draw(scaled: torch.Tensor, rows: SamplingRows, at: torch.Tensor) -> torch.Tensor:
    return _invert(torch.softmax(scaled, -1), _uniform_of(rows, at))


def _draw_filtered(scaled: torch.Tensor, rows: SamplingRows, at: torch.Tensor) -> torch.Tensor:
    """Draw after min-p, top-k, then top-p: the smallest set of top tokens with that mass; ties by lower id."""
    ordered, ids = torch.sort(scaled, dim=-1, descending=True, stable=True)
    if rows.min_ps is not None:
        ordered = ordered.masked_fill(ordered < ordered[:, :1] + rows.min_ps[at, None].log(), float("-inf"))
    top_ks = rows.top_ks[at, None]
    rank = torch.arange(scaled.shape[-1], device=scaled.device)[None]
    ordered = ordered.masked_fill((rank >= top_ks) & (top_ks > 0), float("-inf"))
    weights = torch.softmax(ordered, -1)
    before = weights.to(torch.float64).cumsum(-1) - weights
    weights = weights.masked_fill((before >= rows.top_ps[at, None]) & (rank > 0), 0.0)
    return ids.gather(-1, _invert(weights, _uniform_of(rows, at))[:, None]).squeeze(1)


def _invert(weights: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
    """Index of the share of the running total that contains `uniforms`; never one of weight 0."""
    total = weights.to(torch.float64).cumsum(-1)
    target = uniforms[:, None] * total[:, -1:]
    # `target` is below the full total, so the first running total above it belongs to a weight above 0.
    return torch.searchsorted(total, target, right=True).squeeze(1).clamp_(max=weights.shape[-1] - 1)


def chosen_logprobs(logits: torch.Tensor, tokens: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    """float32 [n]: logprob of each row's token; 0 for rows that are not `wanted`."""
    result = torch.zeros(len(tokens), dtype=torch.float32, device=logits.device)
    at = wanted.nonzero().squeeze(1)
    if len(at):
        result[at] = of_tokens(logits[at], tokens[at])
    return result


class TokenDraws(Protocol):
    """Token sampling on a device. Every implementation draws the same tokens."""

    def draw(self, logits: torch.Tensor, rows: SamplingRows, valid: torch.Tensor) -> torch.Tensor:
        """See `draw`. Tokens are below the vocabulary size even where they are undefined."""
        ...

    def chosen_logprobs(self, logits: torch.Tensor, tokens: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
        """See `chosen_logprobs`."""
        ...


class TorchDraws:
    """Works on any device; synchronises with all but the host."""

    def draw(self, logits: torch.Tensor, rows: SamplingRows, valid: torch.Tensor) -> torch.Tensor:
        """See TokenDraws."""
        return draw(logits, rows, valid)

    def chosen_logprobs(self, logits: torch.Tensor, tokens: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
        """See TokenDraws."""
        return chosen_logprobs(logits, tokens, wanted)


TORCH_DRAWS = TorchDraws()


@dataclass(frozen=True, slots=True)
class SampledTokens:
    """Sampled tokens of n rows.

    `token_ids` int64 [n]. `finite` bool [n]: False if the row's logits were not finite and its token is
    undefined. `logprobs` float32 [n]: of the chosen token under the unmodified distribution, natural
    logarithm, 0 if not requested.
    """

    token_ids: torch.Tensor
    finite: torch.Tensor
    logprobs: torch.Tensor


def sample(logits: torch.Tensor, rows: SamplingRows, draws: TokenDraws = TORCH_DRAWS) -> SampledTokens:
    """Draw one token per row from float32 `logits` [n, vocab]."""
    finite = finite_rows(logits)
    tokens = draws.draw(logits, rows, finite)
    return SampledTokens(tokens, finite, draws.chosen_logprobs(logits, tokens, rows.logprobs & finite))
