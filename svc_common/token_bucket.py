"""A token bucket that may go into debt: what was estimated at admission is corrected when the cost is known. Pure."""

from collections.abc import Callable

_ROUNDING = 1e-6


class TokenBucket:
    """Fills at `rate_per_s` up to `capacity`, from full. `now()`: seconds, never going backwards."""

    def __init__(self, rate_per_s: float, capacity: float, now: Callable[[], float]) -> None:
        self._now = now
        self._rate_per_s = rate_per_s
        self._capacity = capacity
        self._level = capacity
        self._at_s = now()

    @property
    def level(self) -> float:
        """What is in it now; below 0: the debt."""
        now_s = self._now()
        self._level = min(self._capacity, self._level + self._rate_per_s * (now_s - self._at_s))
        self._at_s = now_s
        return self._level

    def change(self, rate_per_s: float, capacity: float) -> None:
        """Other limits from now on; a debt stays."""
        self._level = min(self.level, capacity)
        self._rate_per_s, self._capacity = rate_per_s, capacity

    def wait_s(self, amount: float) -> float:
        """Seconds until `amount` may be taken, 0 = now. More than it can hold may be taken when it is full."""
        missing = min(amount, self._capacity) - self.level
        return missing / self._rate_per_s if missing > _ROUNDING else 0.0

    def take(self, amount: float) -> None:
        """Takes it, whether it is there or not; less than 0 gives back."""
        self._level = min(self._capacity, self.level - amount)
