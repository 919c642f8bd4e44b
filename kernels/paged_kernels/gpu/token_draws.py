"""Triton kernels that draw tokens: one program per row, no sort, no tensor of vocabulary size, no synchronisation.

The tokens equal those of the worker's sampler in plain torch: a row's uniform number is a hash of its seed,
sequence and position (same bits), and falls into the running total of the tokens' weights: by id, or, for rows
with min-p, top-k or top-p, from the most likely token to the least likely one (`token_filters.py`).
"""

from typing import Protocol

import torch
import triton
import triton.language as tl

from paged_kernels.decoder import FixedColumns, KeptRows
from paged_kernels.gpu.token_filters import draw_filtered, scaled_piece

GREEDY_BELOW = tl.constexpr(1e-5)
_MOST_PIECE = 4096
_MOST_CHOSEN_PIECE = 2048  # fits the registers of sm_80
_MOST_LIKELY = 1024
"""Tokens of a row that are gathered."""
# Constants of SplitMix64 (Steele, Lea, Flood 2014).
_GOLDEN = tl.constexpr(0x9E3779B97F4A7C15)
_MIX_1 = tl.constexpr(0xBF58476D1CE4E5B9)
_MIX_2 = tl.constexpr(0x94D049BB133111EB)


class DrawColumns(Protocol):
    """Sampling parameters of n rows, tensors [n] on the logits' device. The worker's SamplingRows documents each."""

    temperatures: torch.Tensor
    top_ks: torch.Tensor
    top_ps: torch.Tensor
    seeds: torch.Tensor
    sequence_indexes: torch.Tensor


class DrawRows(DrawColumns, Protocol):
    """The same with the rest."""

    positions: torch.Tensor
    min_ps: torch.Tensor | None


@triton.jit
def mix(x):
    """The finaliser of SplitMix64; uint64."""
    x = (x ^ (x >> 30)) * _MIX_1
    x = (x ^ (x >> 27)) * _MIX_2
    return x ^ (x >> 31)


@triton.jit
def uniform(seed, sequence, position):
    """float64 in [0, 1) from int64 arguments, with 52 random bits."""
    state = mix(seed.to(tl.uint64, bitcast=True) + _GOLDEN)
    state = mix(state ^ mix(sequence.to(tl.uint64, bitcast=True) + _MIX_1))
    state = mix(state + (position + 1).to(tl.uint64, bitcast=True) * _GOLDEN)
    return (state >> 12).to(tl.float64) * 2.220446049250313e-16


@triton.jit
def draw_whole(row, vocab, temperature, peak, share, PIECE: tl.constexpr):
    """The token at `share` of all weight, by id."""
    mass = tl.zeros([PIECE], tl.float64)
    for start in range(0, vocab, PIECE):
        mass += tl.exp(scaled_piece(row, start, vocab, temperature, PIECE) - peak).to(tl.float64)
    target = share * tl.sum(mass, 0)
    running = target * 0.0
    index = vocab * 0
    last = vocab * 0
    for start in range(0, vocab, PIECE):
        weights = tl.exp(scaled_piece(row, start, vocab, temperature, PIECE) - peak).to(tl.float64)
        at = start + tl.arange(0, PIECE)
        index += tl.sum(((running + tl.cumsum(weights, 0) <= target) & (at < vocab)).to(tl.int32), 0)
        last = tl.maximum(last, tl.max(tl.where(weights > 0.0, at, 0), 0))
        running += tl.sum(weights, 0)
    return tl.minimum(index, last)


@triton.jit
def best_of(row, vocab, PIECE: tl.constexpr):
    """Largest logit of a row and its lowest id; NaN ignored."""
    best = tl.full([], float("-inf"), tl.float32)
    index = tl.full([], 0, tl.int32)
    for start in range(0, vocab, PIECE):
        at = start + tl.arange(0, PIECE)
        logits = tl.load(row + at, mask=at < vocab, other=float("-inf"))
        logits = tl.where(logits == logits, logits, float("-inf"))  # noqa: PLR0124 (false for NaN)
        value, place = tl.max(logits, 0, return_indices=True)
        index = tl.where(value > best, start + place, index)
        best = tl.maximum(best, value)
    return best, index


@triton.jit
def choose_kernel(logits, tokens, finite, vocab, stride, PIECE: tl.constexpr):
    """Program i: the first highest logit of row i, and whether all of its logits are finite."""
    i = tl.program_id(0)
    row = logits + i.to(tl.int64) * stride
    _, token = best_of(row, vocab, PIECE)
    off = tl.zeros([PIECE], tl.int32)
    for start in range(0, vocab, PIECE):
        at = start + tl.arange(0, PIECE)
        x = tl.load(row + at, mask=at < vocab, other=0.0)
        off += (tl.abs(x) < float("inf")).to(tl.int32) ^ 1
    tl.store(tokens + i, token.to(tl.int64))
    tl.store(finite + i, (tl.sum(off, 0) == 0).to(tl.uint8))


@triton.jit
def draw_kernel(
    logits, tokens, temperatures, top_ks, top_ps, min_ps, seeds, sequences, positions, fit, likely, likely_ids,
    rows, kept_ids, kept_positions, vocab, stride, PIECE: tl.constexpr, MOST: tl.constexpr, CHOSEN: tl.constexpr,
):  # fmt: skip
    """Program i: draw row i of float32 `logits` [n, vocab]; argmax if the row is greedy or not `fit`.

    `likely` float32, `likely_ids` int32 [n, MOST]: memory for each row's likeliest tokens. `CHOSEN`: `tokens` has the argmax, and
    row `rows[i]` of what is kept (decoder.KeptRows) goes on with the drawn token.
    """
    i = tl.program_id(0)
    row = logits + i.to(tl.int64) * stride
    if CHOSEN:
        token = tl.load(tokens + i).to(tl.int32)
        best = tl.load(row + token)
    else:
        best, token = best_of(row, vocab, PIECE)
    temperature = tl.load(temperatures + i)
    if (temperature >= GREEDY_BELOW) & (tl.load(fit + i) != 0):
        peak = tl.div_rn(best, temperature)
        top_k = tl.load(top_ks + i)
        top_p = tl.load(top_ps + i)
        min_p = tl.load(min_ps + i)
        log_min_p = tl.where(min_p > 0.0, tl.log(tl.maximum(min_p, 1e-38)), float("-inf"))
        share = uniform(tl.load(seeds + i), tl.load(sequences + i), tl.load(positions + i))
        if (top_k > 0) | (top_p < 1.0) | (log_min_p > float("-inf")):
            at = i.to(tl.int64) * MOST
            token = draw_filtered(
                row, likely + at, likely_ids + at, vocab, temperature, peak, top_k, top_p, log_min_p, share, PIECE, MOST
            )
        else:
            token = draw_whole(row, vocab, temperature, peak, share, PIECE)
    tl.store(tokens + i, token.to(tl.int64))
    if CHOSEN:
        kept = tl.load(rows + i)
        if kept >= 0:
            tl.store(kept_ids + kept, token.to(tl.int64))
            tl.store(kept_positions + kept, tl.load(kept_positions + kept) + 1)


@triton.jit
def logprob_kernel(logits, tokens, wanted, logprobs, vocab, stride, PIECE: tl.constexpr):
    """Program i: natural logarithm of the probability of row i's token; 0 if not wanted."""
    i = tl.program_id(0)
    result = tl.full([], 0.0, tl.float32)
    if tl.load(wanted + i) != 0:
        row = logits + i.to(tl.int64) * stride
        best, _ = best_of(row, vocab, PIECE)
        total = tl.zeros([PIECE], tl.float32)
        for start in range(0, vocab, PIECE):
            at = start + tl.arange(0, PIECE)
            total += tl.exp(tl.load(row + at, mask=at < vocab, other=float("-inf")) - best)
        result = tl.load(row + tl.load(tokens + i)) - best - tl.log(tl.sum(total, 0))
    tl.store(logprobs + i, result)


def choose(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """See registry.GreedyKernel. The vocabulary axis has unit stride."""
    tokens = torch.empty(len(logits), dtype=torch.int64, device=logits.device)
    finite = torch.empty(len(logits), dtype=torch.bool, device=logits.device)
    choose_into(logits, tokens, finite)
    return tokens, finite


def choose_into(logits: torch.Tensor, tokens: torch.Tensor, finite: torch.Tensor) -> None:
    """The same into int64 and bool [n]."""
    num_rows, vocab = logits.shape
    if num_rows:
        choose_kernel[(num_rows,)](
            logits,
            tokens,
            finite.view(torch.uint8),
            vocab,
            logits.stride(0),
            PIECE=min(_piece(vocab), _MOST_CHOSEN_PIECE),
            num_warps=8,
            enable_fp_fusion=True,
        )


def draw(logits: torch.Tensor, rows: DrawRows, fit: torch.Tensor) -> torch.Tensor:
    """One token per row of float32 `logits` [n, vocab], int64 [n]; undefined for rows that are not `fit` (bool [n]).

    Never draws a token with logit -inf. The vocabulary axis has unit stride.
    """
    tokens = torch.empty(len(logits), dtype=torch.int64, device=logits.device)
    min_ps = torch.zeros_like(rows.top_ps) if rows.min_ps is None else rows.min_ps
    if len(logits):
        _draw(logits, tokens, rows, rows.positions, min_ps, fit)
    return tokens


def draw_chosen(
    logits: torch.Tensor, tokens: torch.Tensor, columns: FixedColumns, kept: KeptRows, positions: torch.Tensor,
    fit: torch.Tensor,
) -> None:  # fmt: skip
    """Replace the tokens, those of `choose`, of the rows that are not greedy, and take all of them into `kept`.

    `positions`: int64 [n], of the drawn tokens.
    """
    _draw(logits, tokens, columns, positions, columns.min_ps, fit, (columns.rows, kept.token_ids, kept.positions))


def _draw(
    logits: torch.Tensor, tokens: torch.Tensor, rows: DrawColumns, positions: torch.Tensor, min_ps: torch.Tensor,
    fit: torch.Tensor, kept: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None,
) -> None:  # fmt: skip
    num_rows, vocab = logits.shape
    likely = torch.empty(num_rows, _MOST_LIKELY, dtype=torch.float32, device=logits.device)
    likely_ids = torch.empty(num_rows, _MOST_LIKELY, dtype=torch.int32, device=logits.device)
    draw_kernel[(num_rows,)](
        logits, tokens, rows.temperatures, rows.top_ks, rows.top_ps, min_ps, rows.seeds, rows.sequence_indexes,
        positions, fit.view(torch.uint8), likely, likely_ids, *(kept or (tokens, tokens, tokens)), vocab, logits.stride(0),
        PIECE=_piece(vocab), MOST=_MOST_LIKELY, CHOSEN=kept is not None, num_warps=8, enable_fp_fusion=True,
    )  # fmt: skip


def chosen_logprobs(logits: torch.Tensor, tokens: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    """float32 [n]: logprob of each row's token; 0 for rows that are not `wanted` (bool [n])."""
    num_rows, vocab = logits.shape
    logprobs = torch.empty(num_rows, dtype=torch.float32, device=logits.device)
    if num_rows:
        logprob_kernel[(num_rows,)](
            logits,
            tokens,
            wanted.view(torch.uint8),
            logprobs,
            vocab,
            logits.stride(0),
            PIECE=_piece(vocab),
            num_warps=8,
            enable_fp_fusion=True,
        )
    return logprobs


def _piece(vocab: int) -> int:
    return min(_MOST_PIECE, triton.next_power_of_2(vocab))
