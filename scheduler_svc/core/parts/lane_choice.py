"""Lane choices: which lane of a worker group takes the next plan."""


class OneWorker:
    """Base of lane choices with all lanes on one worker."""

    has_worker_per_lane = keeps_groups = False

    def lose(self, lane: int) -> None:
        """Raise AssertionError: the worker is lost as a whole."""
        raise AssertionError("lanes of one worker are lost together")

    def vacate(self) -> None:
        """No-op: groups keep no places."""

    def take_back(self, lane: int) -> None:
        """Raise AssertionError: the worker is lost as a whole."""
        raise AssertionError("lanes of one worker are back together")


class SingleLane(OneWorker):
    """One lane with at most `depth` plans in flight (1: result k is needed before plan k+1)."""

    num_lanes = 1

    def __init__(self, depth: int = 1) -> None:
        self.depth = depth
        self._in_flight: dict[int, None] = {}

    def free_lanes(self) -> list[int]:
        """Lane 0 unless it is full."""
        return [0] if len(self._in_flight) < self.depth else []

    def on_planned(self, lane: int, step: int) -> None:
        """Count the plan as in flight."""
        self._in_flight[step] = None

    def on_result(self, step: int) -> None:
        """Remove the plan from those in flight."""
        self._in_flight.pop(step, None)

    def reset(self) -> None:
        """Clear the plans in flight."""
        self._in_flight.clear()
