"""Triton functions that draw from a row with min-p, then top-k, then top-p, in as few passes over the row as can be.

The tokens' weights are added up from the most likely token to the least likely one, ties by id; each filter ends
this sum at some place.

    order of float32 as int32   |-- below the floor --|-- ties at the floor, the first `kept` by id --|-- all kept --| peak

The places are found by bisection over the bits of a scaled logit, one pass per bit. As a rule some hundred tokens
decide: two passes over the row count the tokens by ranges of their logits, a third one gathers the most likely
ones, and the bisection passes over these. Where the filters may leave more, it passes over the whole row.
"""

import triton
import triton.language as tl

_RANGES = tl.constexpr(32)
_FARTHEST = tl.constexpr(40.0)
"""Below the peak, in units of a scaled logit: what is farther off weighs less than a float64 can tell beside the peak."""


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
def draw_between(row, vocab, temperature, peak, floor, top_k, top_p, allowed, total, share, PIECE: tl.constexpr):
    """Place in the row of the token at `share` of the weight that the filters leave, counted from the most likely one.

    `allowed` tokens, which weigh `total`, are at or above the key `floor`; the row has those that the filters leave.
    """
    above_all = ordered(peak).to(tl.int64) + 1
    if (top_k > 0) & (top_k < allowed):
        floor = key_of_count(row, vocab, temperature, floor.to(tl.int64), above_all, top_k, PIECE)
        kept = (top_k - count_from(row, vocab, temperature, floor + 1, PIECE)).to(tl.int32)
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
def survey(row, vocab, temperature, peak, floor, top, step, PIECE: tl.constexpr):
    """Number of tokens in ranges of `step` of the scaled logits, downwards from `top`; the last one has all that is below.

    The first one has also what is above. Then the weight and number of the tokens at or above the key `floor`.
    """
    counts = tl.zeros([_RANGES], tl.int32)
    mass = tl.zeros([PIECE], tl.float64)
    allowed = tl.zeros([PIECE], tl.int32)
    for start in range(0, vocab, PIECE):
        scaled = scaled_piece(row, start, vocab, temperature, PIECE)
        place = tl.minimum(tl.maximum((top - scaled) / step, 0.0), _RANGES - 1.0)
        counts += tl.histogram(place.to(tl.int32), _RANGES)
        is_allowed = ordered(scaled) >= floor
        mass += tl.where(is_allowed, tl.exp(scaled - peak), 0.0).to(tl.float64)
        allowed += is_allowed.to(tl.int32)
    return counts, tl.sum(mass, 0), tl.sum(allowed, 0)


@triton.jit
def reach(counts, most):
    """How many ranges from the first on have at most `most` tokens together."""
    whole = (tl.cumsum(counts, 0) <= most) & (tl.arange(0, _RANGES) < _RANGES - 1)
    return tl.sum(whole.to(tl.int32), 0)


@triton.jit
def gather(row, likely, likely_ids, vocab, temperature, peak, bound, PIECE: tl.constexpr, MOST: tl.constexpr):
    """Write logits and ids of the tokens at or above the key `bound`, in the order of ids, as many as fit.

    Returns their number and weight.
    """
    count = vocab * 0
    mass = tl.zeros([PIECE], tl.float64)
    for start in range(0, vocab, PIECE):
        at = start + tl.arange(0, PIECE)
        logits = tl.load(row + at, mask=at < vocab, other=float("-inf"))
        scaled = tl.div_rn(logits, temperature)
        is_held = (ordered(scaled) >= bound) & (at < vocab)
        held = is_held.to(tl.int32)
        place = count + tl.cumsum(held, 0) - 1
        fits = is_held & (place < MOST)
        tl.store(likely + place, logits, mask=fits)
        tl.store(likely_ids + place, at, mask=fits)
        mass += tl.where(is_held, tl.exp(scaled - peak), 0.0).to(tl.float64)
        count += tl.sum(held, 0)
    # Other threads read what was written.
    tl.debug_barrier()
    return count, tl.sum(mass, 0)


@triton.jit
def draw_filtered(
    row, likely, likely_ids, vocab, temperature, peak, top_k, top_p, log_min_p, share, PIECE: tl.constexpr,
    MOST: tl.constexpr,
):  # fmt: skip
    """The token at `share` of the weight that the filters leave, counted from the most likely one.

    `likely` float32 [MOST], `likely_ids` int32 [MOST]: memory for the most likely tokens.
    """
    lowest = tl.maximum(peak + log_min_p, -3.4028234663852886e38)
    floor = ordered(lowest)
    # A little more than the distance, so that rounding leaves the floor itself in the last range but one.
    step = tl.minimum(peak - lowest, _FARTHEST) * (1.0001 / (_RANGES - 1)) + 1e-6
    counts, total, allowed = survey(row, vocab, temperature, peak, floor, peak, step, PIECE)
    ranges = reach(counts, MOST)
    bound = peak - ranges * step
    if ranges < _RANGES - 1:
        finer = step / (_RANGES - 1)
        counts, _, _ = survey(row, vocab, temperature, peak, floor, bound, finer, PIECE)
        bound -= reach(counts, MOST) * finer
    bound_key = tl.maximum(ordered(bound), floor)
    count, mass = gather(row, likely, likely_ids, vocab, temperature, peak, bound_key, PIECE, MOST)
    # Without top-k the most likely tokens decide if they weigh enough; with it, if they are enough.
    if (top_k > 0) & (top_k < allowed):
        decides = top_k <= count
    else:
        decides = (count == allowed) | (mass > top_p.to(tl.float64) * total * 1.000001)
    if decides & (count <= MOST):
        place = draw_between(likely, count, temperature, peak, floor, top_k, top_p, allowed, total, share, MOST)
        token = tl.load(likely_ids + place)
    else:
        token = draw_between(row, vocab, temperature, peak, floor, top_k, top_p, allowed, total, share, PIECE)
    return token
