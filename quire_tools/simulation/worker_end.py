"""The scheduler's end of the stream to one worker group of a simulation."""

from typing import Protocol

from quire_tools.simulation.link import SimulatedAnswer, SimulatedStream


class WorkerEvents(Protocol):
    """What happens at the workers of a simulation, each with a number."""

    def on_answer(self, worker: int, answer: SimulatedAnswer) -> None:
        """A plan's result arrived."""

    def on_killed(self, worker: int) -> None:
        """The worker's process died."""

    def on_new_epoch(self, worker: int) -> None:
        """The worker holds nothing, and plans in flight have no results."""

    def on_resumed(self, worker: int) -> None:
        """The stream is open again."""


class WorkerEnd:
    """Passes the events of one stream on with the worker's number; see `link.Scheduling`.

    `is_dry`: its last plan was empty, and nothing happened since. `is_handed_over`: its sequences continue elsewhere.
    """

    link: SimulatedStream

    def __init__(self, number: int, events: WorkerEvents) -> None:
        self.number = number
        self.is_dry = False
        self.is_handed_over = False
        self._events = events

    def on_answer(self, answer: SimulatedAnswer) -> None:
        """A plan's result arrived."""
        self._events.on_answer(self.number, answer)

    def on_killed(self) -> None:
        """The worker's process died."""
        self._events.on_killed(self.number)

    def on_new_epoch(self) -> None:
        """The worker holds nothing."""
        self._events.on_new_epoch(self.number)

    def on_resumed(self) -> None:
        """The stream is open again."""
        self._events.on_resumed(self.number)
