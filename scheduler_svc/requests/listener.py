"""Who is told what becomes of requests: what counts them joins here."""

from typing import Protocol

from scheduler_svc.requests.live_request import LiveRequest
from svc_common.errors import QuireError


class RequestListener(Protocol):
    """Called by the book, on the event loop; must not change anything."""

    def started(self, live: LiveRequest) -> None:
        """It is in a plan for the first time."""

    def preempted(self, mode: str) -> None:
        """One of them had to leave."""

    def ended(self, live: LiveRequest, error: QuireError | None) -> None:
        """Its single end; by `error` where it failed."""

    def refused(self, error: QuireError) -> None:
        """One was not accepted."""
