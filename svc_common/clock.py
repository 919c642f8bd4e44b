"""Time as the services see it. Logic uses the monotonic clock alone; wall time is for people and span timestamps."""

import time

NS_PER_S = 1_000_000_000
# Whatever comes between the two readings makes the difference too small.
_UNIX_OFFSET_NS = max(time.time_ns() - time.monotonic_ns() for _ in range(5))


def monotonic_ns() -> int:
    """Nanoseconds that never go backwards; only differences mean anything."""
    return time.monotonic_ns()


def unix_ns(monotonic: int) -> int:
    """Wall time of a monotonic one. By an offset taken once, so that equal times stay equal whatever is done to the clock."""
    return monotonic + _UNIX_OFFSET_NS


def wall_ns() -> int:
    """Nanoseconds since the epoch, for span timestamps."""
    return time.time_ns()
