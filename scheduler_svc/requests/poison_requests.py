"""Isolation of requests that were repeatedly in a step when its worker was lost: one of them may crash workers.

If suspects ran together, all would reach the limit of losses (`max_worker_losses`) together. Therefore the
core has one suspect at a time, in order of arrival, until it yields a token (cleared) or reaches the limit
(failed). Other requests do not wait for suspects.
"""

from collections.abc import Iterable

from scheduler_svc.requests.live_request import LiveRequest, RequestStage

NUM_LOSSES = 2
"""Worker losses since a request's last token that make it a suspect; a single loss has no consequence."""


class Suspects:
    """The suspects, by id in the core."""

    def __init__(self) -> None:
        self._found: dict[str, LiveRequest] = {}
        self._lost: list[LiveRequest] = []

    def lost(self, live: LiveRequest) -> None:
        """Note that the request's worker was lost; its `num_losses` is already incremented."""
        if live.num_losses >= NUM_LOSSES:
            self._found[live.core_id] = live
            self._lost.append(live)

    def clear(self, live: LiveRequest) -> None:
        """Reset the request's losses and suspicion, because it has a new token or ended."""
        live.num_losses = 0
        self._found.pop(live.core_id, None)

    def take_crowd(self) -> list[LiveRequest]:
        """Pop the suspects in the core that lost their worker since the last call and must leave it and wait.

        If no other suspect is in the core, the earliest of them may stay.
        """
        if not self._lost:
            return []
        lost = [live for live in self._lost if live.place is RequestStage.IN_CORE]
        self._lost = []
        others = any(live.place is RequestStage.IN_CORE and live not in lost for live in self._found.values())
        return sorted(lost, key=_arrival)[0 if others else 1 :]

    def may_enter(self, waiting: Iterable[LiveRequest]) -> list[LiveRequest]:
        """The requests of `waiting`, in its order, that may enter the core: at most one suspect, none while one is in the core."""
        if not self._found:
            return list(waiting)
        has_suspect, found = any(live.place is RequestStage.IN_CORE for live in self._found.values()), []
        for live in waiting:
            is_suspect = live.core_id in self._found
            if not (is_suspect and has_suspect):
                found.append(live)
            has_suspect = has_suspect or is_suspect
        return found


def _arrival(live: LiveRequest) -> tuple[int, str]:
    return live.time.arrival_ns, live.core_id
