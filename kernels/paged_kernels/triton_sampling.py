"""Triton kernels that draw tokens: one program per row, no sort, no tensor of vocabulary size, no synchronisation.

The tokens equal those of the worker's sampler in plain torch: a row's uniform number is a hash of its seed,
sequence and position (same bits), and falls into the running total of the tokens' weights. For filtered rows
(min-p, then top-k, then top-p) the total runs from the most likely token to the least likely one, ties by id,
and each filter ends it at some place; that place is found by bisection over the bits of a scaled logit, with
one pass over the row per bit.

    order of float32 as int32   |-- below the floor --|-- ties at the floor, the first `kept` by id --|-- all kept --| peak
"""

from typing import Protocol

import torch
import triton
import triton.language as tl

GREEDY_BELOW = tl.constexpr(1e-5)
_MOST_PIECE = 4096
# Constants of SplitMix64 (Steele, Lea, Flood 2014).
_GOLDEN = tl.constexpr(0x9E3779B97F4A7C15)
_MIX_1 = tl.constexpr(0xBF58476D1CE4E5B9)
_MIX_2 = tl.constexpr(0x94D049BB133111EB)
_ALL = tl.constexpr(2**31 - 1)


class DrawRows(Protocol):
    """Sampling parameters of n rows, tensors [n] on the logits' device. The worker's SamplingRows documents each."""

    temperatures: torch.Tensor
    top_ks: torch.Tensor
    top_ps: torch.Tensor
    seeds: torch.Tensor
    sequence_indexes: torch.Tensor
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
def ordered(x):
    """int32 that compare as the float32 `x` do; both zeros are equal."""
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def weight_of(key, peak):
    """Weight of the scaled logit with this `ordered` key."""
    return tl.exp((key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True) - peak).to(tl.float64)


@triton.jit
def scaled_piece(row, start, vocab, temperature, PIECE: tl.constexpr):
    """PIECE logits from `start` on, divided by the temperature; -inf past the end."""
    at = start + tl.arange(0, PIECE)
    return tl.div_rn(tl.load(row + at, mask=at < vocab, other=float("-inf")), temperature)


@triton.jit
def mass_from(row, vocab, temperature, peak, key, PIECE: tl.constexpr):
    """Total weight of the tokens at or above `key`."""
    mass = tl.zeros([PIECE], tl.float64)
    for start in range(0, vocab, PIECE):
        scaled = scaled_piece(row, start, vocab, temperature, PIECE)
        mass += tl.where(ordered(scaled) >= key, tl.exp(scaled - peak), 0.0).to(tl.float64)
    return tl.sum(mass, 0)


@triton.jit
def count_from(row, vocab, temperature, key, PIECE: tl.constexpr):
    """Number of tokens at or above `key`."""
    count = tl.zeros([PIECE], tl.int32)
    for start in range(0, vocab, PIECE):
        count += (ordered(scaled_piece(row, start, vocab, temperature, PIECE)) >= key).to(tl.int32)
    return tl.sum(count, 0)


@triton.jit
def key_of_mass(row, vocab, temperature, peak, low, high, wanted, OVER: tl.constexpr, PIECE: tl.constexpr):
    """The highest key at or above which tokens weigh `wanted` (OVER: more than it).

    `low` satisfies this, `high` does not.
    """
    while high - low > 1:
        middle = low + (high - low) // 2
        mass = mass_from(row, vocab, temperature, peak, middle.to(tl.int32), PIECE)
        enough = mass > wanted if OVER else mass >= wanted
        low = tl.where(enough, middle, low)
        high = tl.where(enough, high, middle)
    return low.to(tl.int32)


@triton.jit
def key_of_count(row, vocab, temperature, low, high, wanted, PIECE: tl.constexpr):
    """The highest key at or above which there are `wanted` tokens. `low` satisfies this, `high` does not."""
    while high - low > 1:
        middle = low + (high - low) // 2
        enough = count_from(row, vocab, temperature, middle.to(tl.int32), PIECE) >= wanted
        low = tl.where(enough, middle, low)
        high = tl.where(enough, high, middle)
    return low.to(tl.int32)


@triton.jit
def nth_tie(row, vocab, temperature, key, nth, PIECE: tl.constexpr):
    """Id of the `nth` token (from 0) at `key`, by id; of the last one if there are fewer."""
    seen = nth * 0
    found = nth * 0
    for start in range(0, vocab, PIECE):
        tie = (ordered(scaled_piece(row, start, vocab, temperature, PIECE)) == key).to(tl.int32)
        rank = seen + tl.cumsum(tie, 0) - 1
        at = start + tl.arange(0, PIECE)
        found = tl.maximum(found, tl.max(tl.where((tie > 0) & (rank <= nth), at, 0), 0))
        seen += tl.sum(tie, 0)
    return found


@triton.jit
def draw_filtered(row, vocab, temperature, peak, top_k, top_p, log_min_p, share, PIECE: tl.constexpr):
    """The token at `share` of the weight that the filters leave, counted from the most likely one."""
    above_all = ordered(peak).to(tl.int64) + 1
    floor = ordered(tl.maximum(peak + log_min_p, -3.4028234663852886e38))
    kept = _ALL
    if (top_k > 0) & (top_k < vocab):  # noqa: SIM102 (`and` would not spare the pass)
        if count_from(row, vocab, temperature, floor, PIECE) > top_k:
            floor = key_of_count(row, vocab, temperature, floor.to(tl.int64), above_all, top_k, PIECE)
            kept = (top_k - count_from(row, vocab, temperature, floor + 1, PIECE)).to(tl.int32)
    if kept == _ALL:
        total = mass_from(row, vocab, temperature, peak, floor, PIECE)
    else:
        total = mass_from(row, vocab, temperature, peak, floor + 1, PIECE) + kept * weight_of(floor, peak)
    low = floor.to(tl.int64)
    if top_p < 1.0:
        wanted = top_p.to(tl.float64) * total
        last = key_of_mass(row, vocab, temperature, peak, low, above_all, wanted, False, PIECE)
        above = mass_from(row, vocab, temperature, peak, last + 1, PIECE)
        weight = weight_of(last, peak)
        ties = tl.maximum(tl.ceil((wanted - above) / weight), 1.0)
        total = tl.minimum(total, above + ties * weight)
        low = last.to(tl.int64)
    target = share * total
    key = key_of_mass(row, vocab, temperature, peak, low, above_all, target, True, PIECE)
    above = mass_from(row, vocab, temperature, peak, key + 1, PIECE)
    return nth_tie(row, vocab, temperature, key, ((target - above) / weight_of(key, peak)).to(tl.int32), PIECE)


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
def draw_kernel(
    logits, tokens, temperatures, top_ks, top_ps, log_min_ps, seeds, sequences, positions, fit, vocab, stride,
    PIECE: tl.constexpr,
):  # fmt: skip
    """Program i: draw row i of float32 `logits` [n, vocab]; argmax if the row is greedy or not `fit`."""
    i = tl.program_id(0)
    row = logits + i.to(tl.int64) * stride
    best, token = best_of(row, vocab, PIECE)
    temperature = tl.load(temperatures + i)
    if (temperature >= GREEDY_BELOW) & (tl.load(fit + i) != 0):
        peak = tl.div_rn(best, temperature)
        top_k = tl.load(top_ks + i)
        top_p = tl.load(top_ps + i)
        log_min_p = tl.load(log_min_ps + i)
        share = uniform(tl.load(seeds + i), tl.load(sequences + i), tl.load(positions + i))
        if (top_k > 0) | (top_p < 1.0) | (log_min_p > float("-inf")):
            token = draw_filtered(row, vocab, temperature, peak, top_k, top_p, log_min_p, share, PIECE)
        else:
            token = draw_whole(row, vocab, temperature, peak, share, PIECE)
    tl.store(tokens + i, token.to(tl.int64))


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


def draw(logits: torch.Tensor, rows: DrawRows, fit: torch.Tensor) -> torch.Tensor:
    """One token per row of float32 `logits` [n, vocab], int64 [n]; undefined for rows that are not `fit` (bool [n]).

    Never draws a token with logit -inf. The vocabulary axis has unit stride.
    """
    num_rows, vocab = logits.shape
    tokens = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
    min_ps = torch.zeros_like(rows.top_ps) if rows.min_ps is None else rows.min_ps
    if num_rows:
        draw_kernel[(num_rows,)](
            logits, tokens, rows.temperatures, rows.top_ks, rows.top_ps, min_ps.log(), rows.seeds, rows.sequence_indexes,
            rows.positions, fit.view(torch.uint8), vocab, logits.stride(0), PIECE=_piece(vocab), num_warps=8, enable_fp_fusion=True,
        )  # fmt: skip
    return tokens


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
