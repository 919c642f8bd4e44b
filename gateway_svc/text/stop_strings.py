"""Find stop strings in text that arrives in pieces. Pure; handles characters, not tokens.

The first occurrence to be *complete* wins; of several that end at the same character, the longest. This does
not depend on how the text is split. Each string is matched by Knuth-Morris-Pratt, so the cost is linear in
the text.
"""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StopMatch:
    """Match of `stop` that ends just before index `end` of the text just fed."""

    stop: str
    end: int


class StopMatcher:
    """Matches several non-empty strings; one per stream.

    `num_held`: number of last characters that may begin a stop string.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._automata = [_Automaton(stop) for stop in stops]
        self.num_held = 0

    def feed(self, text: str) -> StopMatch | None:
        """Add `text`; returns the match, if any. Do not feed after a match."""
        best: StopMatch | None = None
        for automaton in self._automata:
            end = automaton.feed(text)
            if end is not None and (best is None or (end, -len(automaton.stop)) < (best.end, -len(best.stop))):
                best = StopMatch(automaton.stop, end)
        self.num_held = max((automaton.state for automaton in self._automata), default=0)
        return best


class _Automaton:
    """Knuth-Morris-Pratt automaton of one string; `state`: length of its prefix that the text so far ends with."""

    __slots__ = ("_failure", "state", "stop")

    def __init__(self, stop: str) -> None:
        self.stop = stop
        self.state = 0
        self._failure = _failure_table(stop)

    def feed(self, text: str) -> int | None:
        """Add `text`; returns the index just after the first occurrence, or None."""
        stop, failure, state, i = self.stop, self._failure, self.state, 0
        while i < len(text):
            if state == 0:
                i = text.find(stop[0], i)
                if i < 0:
                    break
                state = 1
            else:
                while state and text[i] != stop[state]:
                    state = failure[state - 1]
                state += text[i] == stop[state]
            i += 1
            if state == len(stop):
                return i
        self.state = state
        return None


def _failure_table(stop: str) -> list[int]:
    """For each prefix, the length of its longest proper prefix that is also its suffix."""
    table = [0] * len(stop)
    length = 0
    for i in range(1, len(stop)):
        while length and stop[i] != stop[length]:
            length = table[length - 1]
        length += stop[i] == stop[length]
        table[i] = length
    return table
