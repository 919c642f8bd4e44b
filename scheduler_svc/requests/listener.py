"""Listener interface for request events, implemented by metrics."""

from typing import Protocol

from scheduler_svc.requests.live_request import LiveRequest
from svc_common.errors import QuireError


class RequestListener(Protocol):
    """Called by the book on the event loop; must not change any request."""

    def started(self, live: LiveRequest) -> None:
        """The request is in a plan for the first time."""

    def preempted(self, mode: str) -> None:
        """A request was preempted; `mode` is its kind."""

    def ended(self, live: LiveRequest, error: QuireError | None) -> None:
        """The request ended; `error` is None unless it failed."""

    def refused(self, error: QuireError) -> None:
        """A request was not accepted."""
