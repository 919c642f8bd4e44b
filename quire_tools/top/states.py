"""States read from a source of numbers, and the interface of sources (quire_tools.top.live, quire_tools.top.recorded)."""

import time
from dataclasses import dataclass
from typing import Protocol

from quire_tools.top.numbers import TopNumbers


@dataclass(frozen=True, slots=True)
class TopState:
    """The latest numbers, read at `read_s` (monotonic); None = none yet. `problem`: why there are no newer ones.

    `when`: the time they are of, as text. `is_over`: there will be no further states.
    """

    numbers: TopNumbers | None = None
    when: str = ""
    problem: str = ""
    read_s: float = 0.0
    is_over: bool = False

    @property
    def age_s(self) -> float:
        """Seconds since the numbers were read."""
        return time.monotonic() - self.read_s


class Source(Protocol):
    """A source of numbers. `title`: its name. `is_live`: its time advances without reads."""

    title: str
    is_live: bool

    def read(self) -> TopState:
        """The next state. Raises errors that a retry will not change."""

    def last(self) -> TopState:
        """The newest state available now. Raises QuireError if there is none."""
