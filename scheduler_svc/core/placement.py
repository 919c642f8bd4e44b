"""Placements: which lane takes the next plan."""


class SingleLane:
    """One worker group, one plan in flight (the plain loop: result k before plan k+1)."""

    def __init__(self) -> None:
        self._in_flight: int | None = None

    def next_lane(self) -> int | None:
        """Lane 0 unless its plan is still out."""
        return 0 if self._in_flight is None else None

    def on_planned(self, lane: int, step: int) -> None:
        """Lane 0 is busy."""
        self._in_flight = step

    def on_result(self, step: int) -> None:
        """Lane 0 is free again."""
        if step == self._in_flight:
            self._in_flight = None

    def reset(self) -> None:
        """Lane 0 is free."""
        self._in_flight = None
