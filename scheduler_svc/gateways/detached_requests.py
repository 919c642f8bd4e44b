"""Resumable requests without a reader: each goes on for the grace time, until a reader attaches."""

from collections.abc import Callable
from dataclasses import dataclass

from scheduler_svc.requests.live_request import LiveRequest
from scheduler_svc.requests.request_book import RequestBook

CallLater = Callable[[float, Callable[[], None]], object]


@dataclass(frozen=True, slots=True, eq=False)
class _Held:
    """One period without a reader: the gateway that may reclaim the request under its handle there (empty = none)."""

    frontend_id: str
    handle: int


class DetachedRequests:
    """Owner of the detached requests; those without a reader for the grace time are ended. `call_later(seconds, callback)`."""

    def __init__(self, book: RequestBook, grace_s: float, call_later: CallLater) -> None:
        self._book = book
        self._grace_s = grace_s
        self._call_later = call_later
        self._held: dict[LiveRequest, _Held] = {}

    def __len__(self) -> int:
        return len(self._held)

    def hold(self, live: LiveRequest, frontend_id: str = "", handle: int = 0) -> None:
        """Detach a request. A gateway that lost its stream may reclaim it under its handle."""
        held = self._held[live] = _Held(frontend_id, handle)
        self._call_later(self._grace_s, lambda: self._over(live, held))

    def release(self, live: LiveRequest) -> None:
        """Remove a request that has a reader again."""
        self._held.pop(live, None)

    def of(self, frontend_id: str) -> dict[int, LiveRequest]:
        """The detached requests of that gateway, by its handles."""
        return {held.handle: live for live, held in self._held.items() if held.frontend_id == frontend_id}

    def renew(self, frontend_id: str) -> None:
        """Restart the grace time of that gateway's detached requests, after it reconnected."""
        for handle, live in self.of(frontend_id).items():
            self.hold(live, frontend_id, handle)

    def abandon(self, frontend_id: str) -> None:
        """End that gateway's detached requests, because it will not reconnect."""
        for live in self.of(frontend_id).values():
            self.release(live)
            self._book.abandon(live)

    def _over(self, live: LiveRequest, held: _Held) -> None:
        if self._held.get(live) is held:
            self.release(live)
            self._book.abandon(live)
