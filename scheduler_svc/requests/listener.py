"""Base class of listeners for request events, implemented by metrics and explanations."""

from scheduler_svc.requests.live_request import LiveRequest
from svc_common.errors import QuireError


class RequestListener:
    """Called by the book on the event loop; must not change any request. Methods that are not overridden do nothing."""

    def started(self, live: LiveRequest) -> None:
        """The request is in a plan for the first time."""

    def preempted(self, mode: str) -> None:
        """A request was preempted; `mode` is its kind."""

    def ended(self, live: LiveRequest, error: QuireError | None) -> None:
        """The request ended; `error` is None unless it failed."""

    def refused(self, error: QuireError) -> None:
        """A request was not accepted."""
