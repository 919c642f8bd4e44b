"""Clocks of the services. Logic uses only the monotonic clock; wall time is for people and span timestamps."""

import time

NS_PER_S = 1_000_000_000
# A delay between the two readings makes the difference too small, hence the maximum.
_UNIX_OFFSET_NS = max(time.time_ns() - time.monotonic_ns() for _ in range(5))


monotonic_ns = time.monotonic_ns
"""Monotonic nanoseconds; only differences are meaningful."""

wall_ns = time.time_ns
"""Nanoseconds since the epoch, for span timestamps."""


def unix_s() -> int:
    """Whole seconds since the epoch, for people."""
    return wall_ns() // NS_PER_S


def unix_ns(monotonic: int) -> int:
    """Convert a monotonic time to wall time.

    The offset is taken once, so that later changes of the clock do not separate equal times.
    """
    return monotonic + _UNIX_OFFSET_NS
