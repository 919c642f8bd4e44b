"""What a source of numbers says, moment by moment, and what sources have in common. Sources: quire.top.live, quire.top.recorded."""

import time
from dataclasses import dataclass
from typing import Protocol

from quire.top.numbers import TopNumbers


@dataclass(frozen=True, slots=True)
class State:
    """The last numbers there are, read at `read_s` monotonic; None = none yet. `problem`: why there are no newer ones.

    `when`: which moment they are of, for people. `is_over`: there will be no others.
    """

    numbers: TopNumbers | None = None
    when: str = ""
    problem: str = ""
    read_s: float = 0.0
    is_over: bool = False

    @property
    def age_s(self) -> float:
        """Since they were read."""
        return time.monotonic() - self.read_s


class Source(Protocol):
    """Who reads numbers, once each time it is asked. `title`: what is read, for people. `is_live`: time passes by itself there."""

    title: str
    is_live: bool

    def read(self) -> State:
        """The next state. What trying again cannot change is raised."""

    def last(self) -> State:
        """The newest that there is now. QuireError where there is none."""
