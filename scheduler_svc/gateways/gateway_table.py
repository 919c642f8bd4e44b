"""Table of all gateways with a stream. `detached_requests` holds the requests of gateways that lost theirs."""

import logging

from protos.engine.v1 import engine_pb2
from scheduler_svc.gateways.detached_requests import CallLater, DetachedRequests
from scheduler_svc.gateways.gateway_stream import Attachment, Frontend
from scheduler_svc.gateways.output_messages import queue_message
from scheduler_svc.readiness import Readiness
from scheduler_svc.requests.request_book import RequestBook
from svc_common.clock import monotonic_ns

log = logging.getLogger(__name__)


class FrontendTable:
    """Owner of all frontends and of the detached requests. `call_later(seconds, callback)` runs the grace time."""

    def __init__(
        self,
        book: RequestBook,
        readiness: Readiness,
        grace_s: float,
        call_later: CallLater,
    ) -> None:
        self._book = book
        self._readiness = readiness
        self._holding = DetachedRequests(book, grace_s, call_later)
        self._frontends: dict[str, Frontend] = {}
        readiness.listen(self._tell_all)
        book.room.listen(self._tell_of_queue)

    def __len__(self) -> int:
        return len(self._frontends)

    def attach(self, frontend_id: str) -> tuple[Frontend, Attachment]:
        """Open a stream for the frontend with that id, known or new."""
        frontend = self._frontends.get(frontend_id)
        if frontend is None:
            frontend = self._frontends[frontend_id] = Frontend(frontend_id, self._book, self._readiness, self._holding)
        attachment = frontend.attach()
        self._holding.renew(frontend_id)
        return frontend, attachment

    def detach(self, frontend: Frontend, attachment: Attachment) -> None:
        """Handle the end of a stream, from either side."""
        if frontend.attachment is not attachment:
            return
        frontend.detach()
        del self._frontends[frontend.frontend_id]
        if held := frontend.held:
            log.info("frontend %s lost; %d resumable requests are held", frontend.frontend_id, len(held))

    def queue(self) -> engine_pb2.QueueState:
        """Message with the tenants for which the waiting queue has no room."""
        return queue_message(self._book.room, monotonic_ns())

    def close_all(self) -> None:
        """End all streams, because the service stops."""
        for frontend in list(self._frontends.values()):
            if frontend.attachment is not None:
                frontend.attachment.close()

    def _tell_all(self) -> None:
        for frontend in self._frontends.values():
            frontend.state_changed()

    def _tell_of_queue(self) -> None:
        for frontend in self._frontends.values():
            frontend.queue_changed()
