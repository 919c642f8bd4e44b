"""Expected output lengths, learned from finished requests."""

from collections import deque

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

MOST_KEPT = 512
_FADING = 1 / 64
_UNIT = 2**52
"""Values are summed as whole multiples of 1 / _UNIT, so that the sum does not depend on values dropped since."""


class Sample:
    """The last MOST_KEPT values of a quantity, with the mean of those above a given value."""

    def __init__(self) -> None:
        self._recent: deque[float] = deque()
        self._total = 0
        self._tables: tuple[Floats, Floats] | None = None

    @property
    def mean(self) -> float:
        """Mean of all values; 0 if there are none."""
        return self._total / _UNIT / max(1, len(self._recent))

    def note(self, number: float) -> None:
        """Add a value; the oldest is dropped."""
        self._recent.append(number)
        self._total += int(number * _UNIT)
        if len(self._recent) > MOST_KEPT:
            self._total -= int(self._recent.popleft() * _UNIT)
        self._tables = None

    def mean_above(self, numbers: Floats) -> Floats:
        """For each number the mean of the larger values; infinite where there is none."""
        ascending, means = self._tabulate()
        above: Floats = means[ascending.searchsorted(numbers, "right")]
        return above

    def _tabulate(self) -> tuple[Floats, Floats]:
        """All values in ascending order, and the mean from each on; infinite behind the last."""
        if self._tables is None:
            ascending = np.sort(np.array(self._recent, np.float64))
            means = ascending[::-1].cumsum()[::-1] / np.arange(len(ascending), 0, -1)
            self._tables = ascending, np.append(means, np.inf)
        return self._tables


class OutputLengths:
    """Owner of the lengths of naturally finished outputs: in tokens, and as fractions of the possible maximum.

    Some clients set max_tokens close to the actual length, others far too high: of the two predictors, the one
    with the smaller recent error is used. `num_noted`: outputs seen so far.
    """

    def __init__(self) -> None:
        self._lengths = Sample()
        self._parts = Sample()
        self.num_noted = 0
        self._error_by_length = 0.0
        self._error_by_part = 0.0

    @property
    def mean(self) -> float:
        """Mean length in tokens; 0 before any output has finished."""
        return self._lengths.mean

    def note(self, num_output_tokens: int, most: int) -> None:
        """Record an output that finished with that many tokens of at most `most` >= 1."""
        self.num_noted += 1
        if self.num_noted > 1:
            by_length, by_part = min(self._lengths.mean, most), self._parts.mean * most
            self._error_by_length += _FADING * (abs(by_length - num_output_tokens) - self._error_by_length)
            self._error_by_part += _FADING * (abs(by_part - num_output_tokens) - self._error_by_part)
        self._lengths.note(num_output_tokens)
        self._parts.note(num_output_tokens / most)

    def remaining(self, num_so_far: Floats, left: Floats) -> Floats:
        """Expected further tokens of outputs that have `num_so_far` and get at most `left` more.

        The mean over finished outputs that were longer; `left` where there were none.
        """
        most = np.maximum(1.0, num_so_far + left)
        if self._error_by_part <= self._error_by_length:
            expected = self._parts.mean_above(num_so_far / most) * most
        else:
            expected = self._lengths.mean_above(num_so_far)
        remaining: Floats = np.minimum(np.maximum(expected - num_so_far, 1.0), left)
        return remaining
