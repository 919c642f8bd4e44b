"""Requests that were in the step when workers were lost, again and again: one of them may kill whoever runs it.

Together they would all come to the limit together. So they are in the core one at a time, in order of arrival, until a token shows
that it was another, or the limit that it was this one (design.md 8). Nobody else waits for them.
"""

from collections.abc import Iterable

from scheduler_svc.requests.live_request import LiveRequest, Place

NUM_LOSSES = 2
"""Workers lost with a request since its last token that make it a suspect: one loss is bad luck, and costs nobody his turn."""


class Suspects:
    """Owner of the list, by id in the core; who moves requests asks here."""

    def __init__(self) -> None:
        self._found: dict[str, LiveRequest] = {}
        self._lost: list[LiveRequest] = []

    def lost(self, live: LiveRequest) -> None:
        """Its worker is gone; `num_losses` counts that already."""
        if live.num_losses >= NUM_LOSSES:
            self._found[live.core_id] = live
            self._lost.append(live)

    def clear(self, live: LiveRequest) -> None:
        """It has a new token, or is over."""
        live.num_losses = 0
        self._found.pop(live.core_id, None)

    def take_crowd(self) -> list[LiveRequest]:
        """Those in the core that lost their worker since the last call, and must leave it: one may stay if none else is there."""
        lost = [live for live in self._lost if live.place is Place.IN_CORE]
        self._lost = []
        others = any(live.place is Place.IN_CORE and live not in lost for live in self._found.values())
        return sorted(lost, key=_arrival)[0 if others else 1 :]

    def may_enter(self, waiting: Iterable[LiveRequest]) -> list[LiveRequest]:
        """Who of `waiting`, in its order, may enter the core: one suspect at most, and none while one is there."""
        has_suspect, found = any(live.place is Place.IN_CORE for live in self._found.values()), []
        for live in waiting:
            is_suspect = live.core_id in self._found
            if not (is_suspect and has_suspect):
                found.append(live)
            has_suspect = has_suspect or is_suspect
        return found


def _arrival(live: LiveRequest) -> tuple[int, str]:
    return live.time.arrival_ns, live.core_id
