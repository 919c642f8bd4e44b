"""Token bucket that may go into debt: the cost estimated at admission is corrected when it is known. Pure."""

from collections.abc import Callable

_ROUNDING = 1e-6


class TokenBucket:
    """Fills at `rate_per_s` up to `capacity`, starting full. `now()`: monotonic seconds."""

    def __init__(self, rate_per_s: float, capacity: float, now: Callable[[], float]) -> None:
        self._now = now
        self._rate_per_s = rate_per_s
        self._capacity = capacity
        self._level = capacity
        self._at_s = now()

    @property
    def level(self) -> float:
        """Current level; negative = debt."""
        now_s = self._now()
        self._level = min(self._capacity, self._level + self._rate_per_s * (now_s - self._at_s))
        self._at_s = now_s
        return self._level

    def change(self, rate_per_s: float, capacity: float) -> None:
        """Change the limits; a debt stays."""
        self._level = min(self.level, capacity)
        self._rate_per_s, self._capacity = rate_per_s, capacity

    def wait_s(self, amount: float) -> float:
        """Seconds until `amount` may be taken, 0 = now. More than the capacity may be taken when the bucket is full."""
        missing = min(amount, self._capacity) - self.level
        return missing / self._rate_per_s if missing > _ROUNDING else 0.0

    def take(self, amount: float) -> None:
        """Take an amount even if it is not there; a negative one is returned to the bucket."""
        self._level = min(self._capacity, self.level - amount)
