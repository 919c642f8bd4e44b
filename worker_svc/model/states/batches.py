"""Divides the tokens of a forward pass into what state layers run: batches of equally many tokens of several sequences.

A sequence's tokens are cut where a checkpoint is kept, and where it may end because its draft tokens are wrong. What continues
another part of the same pass runs after it: a row behind its checkpoint, and a row that begins with a checkpoint which another
one keeps.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from svc_common.errors import InvalidArgument
from worker_svc.rows.states import RowStateBlocks, RowStates, StateEnds

IntArray = NDArray[np.int32]
LongArray = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class PassStates:
    """The states of a forward pass, in which row i of `rows` computes the packed tokens `offsets[i] : offsets[i + 1]`.

    `starts`: position of the first of them.
    """

    rows: RowStates
    starts: IntArray
    offsets: IntArray


@dataclass(frozen=True, slots=True)
class SequenceBatch:
    """B sequences that compute t tokens each.

    `places` [B, t]: of the tokens in the packed row. `sources` [B, blocks]: of the states before; None = all are at token 0.
    `begins`, `ends` [B]: tokens taken in before and after. `rows` [B]: row indexes, for errors. The states after them go to
    `targets` [W, blocks], those of sequence `owners` [W] to each. `open_ends`: sequences that may end here.
    """

    places: LongArray
    sources: LongArray | None
    begins: LongArray
    ends: LongArray
    rows: IntArray
    owners: LongArray
    targets: LongArray
    open_ends: LongArray


@dataclass(frozen=True, slots=True)
class _Segments:
    """Parts of rows [s]: row `of` the pass, its first packed place, number of tokens, first token, and number in its row."""

    of: LongArray
    begins: LongArray
    counts: LongArray
    starts: LongArray
    numbers: LongArray


def batches_of(work: PassStates, *, continues: bool, most: int) -> list[SequenceBatch]:
    """The batches of a pass, in order, each of at most `most` sequences.

    `continues`: False if modules that have a state compute one token at a time.
    """
    if not len(work.rows.rows):
        return []
    segments = _segments(work, continues=continues)
    keeps = _segments_at(segments, work.rows.keep)
    may_end = np.zeros(len(segments.of), np.bool_)
    may_end[(at := _segments_at(segments, work.rows.ends))[at >= 0]] = True
    waves = segments.numbers + _first_waves(work.rows, segments, keeps)[segments.of]
    kinds = np.stack([waves, segments.starts > 0, segments.counts])
    _, kind = np.unique(kinds, axis=1, return_inverse=True)
    kind = kind.reshape(-1)
    chosen = (np.flatnonzero(kind == number) for number in range(int(kind.max(initial=-1)) + 1))
    return [_batch(work, segments, keeps, may_end, part) for group in chosen for part in _pieces(group, most)]


def _pieces(group: LongArray, most: int) -> Iterator[LongArray]:
    return (group[begin : begin + most] for begin in range(0, len(group), most))


def _segments(work: PassStates, *, continues: bool) -> _Segments:
    counts = np.diff(work.offsets).astype(np.int64)
    starts = work.starts.astype(np.int64)
    active = np.flatnonzero(counts)
    of, at = _cuts(work.rows, starts, starts + counts)
    of, at = np.concatenate([active, of]), np.concatenate([starts[active], at])
    of, at = np.unique(np.stack([of, at]), axis=1) if len(of) > len(active) else (of, at)
    if not continues:
        of, at = _one_by_one(of, at, starts + counts)
    is_last = np.append(of[1:] != of[:-1], True)
    ends = np.where(is_last, (starts + counts)[of], np.append(at[1:], 0))
    begins = work.offsets[of] + at - starts[of]
    first = np.flatnonzero(np.append(True, is_last[:-1]))
    numbers = np.arange(len(of)) - np.repeat(first, np.diff(np.append(first, len(of))))
    return _Segments(of, begins, ends - at, at, numbers)


def _cuts(rows: RowStates, starts: LongArray, ends: LongArray) -> tuple[LongArray, LongArray]:
    """Rows, and after which of their tokens they are cut: between `starts` and `ends`, which are of all rows."""
    places = (rows.keep, rows.ends)
    of, at = (
        np.concatenate([getattr(each, name) for each in places]).astype(np.int64) for name in ("rows", "num_tokens")
    )
    inside = (at > starts[of]) & (at < ends[of])
    return of[inside], at[inside]


def _one_by_one(of: LongArray, at: LongArray, row_ends: LongArray) -> tuple[LongArray, LongArray]:
    """The same segments, those that continue a state cut into tokens."""
    ends = np.where(np.append(of[1:] != of[:-1], True), row_ends[of], np.append(at[1:], 0))
    sizes = np.where(at > 0, ends - at, 1)
    firsts = np.cumsum(sizes) - sizes
    return np.repeat(of, sizes), np.repeat(at - firsts, sizes) + np.arange(int(sizes.sum()))


def _segments_at(segments: _Segments, places: RowStateBlocks | StateEnds) -> LongArray:
    """Of each of these places the segment that ends there; -1 if this pass has none."""
    ends = segments.starts + segments.counts
    beyond = max(int(ends.max()), int(places.num_tokens.max(initial=0))) + 1
    keys, wanted = segments.of * beyond + ends, places.rows.astype(np.int64) * beyond + places.num_tokens
    at = np.minimum(np.searchsorted(keys, wanted), len(keys) - 1)
    return np.where(keys[at] == wanted, at, -1)


def _first_waves(rows: RowStates, segments: _Segments, keeps: LongArray) -> LongArray:
    """The wave in which each row's first segment runs: after those that keep the states which it begins with."""
    first = np.zeros(len(rows.rows), np.int64)
    reads = np.flatnonzero((rows.before != rows.own).any(axis=1))
    pairs = [
        (reader, rows.keep.rows[i], segments.numbers[segment])
        for i, segment in enumerate(keeps.tolist())
        for reader in reads.tolist()
        if segment >= 0 and reader != rows.keep.rows[i] and np.isin(rows.before[reader], rows.keep.block_ids[i]).any()
    ]
    for _ in range(len(first) + 1):
        before = first.copy()
        for reader, keeper, number in pairs:
            first[reader] = max(first[reader], first[keeper] + number + 1)
        if (before == first).all():
            return first
    raise InvalidArgument.field("states_to_read", "rows begin with checkpoints of each other")


def _batch(
    work: PassStates, segments: _Segments, keeps: LongArray, may_end: NDArray[np.bool_], chosen: LongArray
) -> SequenceBatch:
    rows, of = work.rows, segments.of[chosen]
    begins, count = segments.starts[chosen], int(segments.counts[chosen[0]])
    kept = np.flatnonzero(np.isin(keeps, chosen))
    owners = np.searchsorted(chosen, keeps[kept])
    is_first = (begins == rows.starts[of])[:, None]
    return SequenceBatch(
        places=segments.begins[chosen][:, None] + np.arange(count),
        sources=np.where(is_first, rows.before[of], rows.own[of]).astype(np.int64) if begins[0] else None,
        begins=begins,
        ends=begins + count,
        rows=rows.rows[of],
        owners=np.concatenate([np.arange(len(chosen)), owners]),
        targets=np.concatenate([rows.own[of], rows.keep.block_ids[kept]]).astype(np.int64),
        open_ends=np.flatnonzero(may_end[chosen]),
    )
