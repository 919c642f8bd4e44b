"""Fold runs of alternating values (A, B, A, B, ...). Pure."""

from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from typing import TypeVar

T = TypeVar("T")

_MOST_KINDS = 3
_FEWEST_OF_A_KIND = 2
_FEWEST_IN_A_RUN = 4


def folded(values: Sequence[T], key: Callable[[T], Hashable]) -> list[Sequence[T]]:
    """The values in order, in runs.

    A run of more than one has at least four values of at most three keys, each at least twice.
    """
    keys = [key(value) for value in values]
    runs: list[Sequence[T]] = []
    start = 0
    while start < len(values):
        length = _length(keys[start:])
        runs.append(values[start : start + length])
        start += length
    return runs


def _length(keys: Sequence[Hashable]) -> int:
    """Length of the longest run that starts at the first key."""
    counts: Counter[Hashable] = Counter()
    longest = 1
    for number, key in enumerate(keys, 1):
        counts[key] += 1
        if len(counts) > _MOST_KINDS:
            break
        if number >= _FEWEST_IN_A_RUN and min(counts.values()) >= _FEWEST_OF_A_KIND:
            longest = number
    return longest
