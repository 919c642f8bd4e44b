"""Detects steps slower than the 99th percentile of the steps before them."""

from collections import deque

_NUM_STEPS = 512
_LEAST_STEPS = 100
_NUM_FRESH = 64


class SlowSteps:
    """The last 512 durations. The limit is recomputed after every 64 steps; there is none for the first 100."""

    def __init__(self) -> None:
        self._durations: deque[int] = deque(maxlen=_NUM_STEPS)
        self._num_seen = 0
        self._limit_ns: int | None = None

    def observe(self, duration_ns: int) -> bool:
        """Record a duration. Returns True if it exceeds the limit."""
        is_slow = self._limit_ns is not None and duration_ns > self._limit_ns
        self._durations.append(duration_ns)
        self._num_seen += 1
        if self._num_seen >= _LEAST_STEPS and (self._limit_ns is None or self._num_seen % _NUM_FRESH == 0):
            ascending = sorted(self._durations)
            self._limit_ns = ascending[len(ascending) * 99 // 100]
        return is_slow
