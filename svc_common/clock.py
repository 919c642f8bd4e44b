"""Time as the services see it. Logic uses the monotonic clock alone; wall time is for people and span timestamps."""

import time

NS_PER_S = 1_000_000_000


def monotonic_ns() -> int:
    """Nanoseconds that never go backwards; only differences mean anything."""
    return time.monotonic_ns()


def wall_ns() -> int:
    """Nanoseconds since the epoch, for span timestamps."""
    return time.time_ns()
