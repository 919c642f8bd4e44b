"""Table of all gateways with a stream. `detached_requests` holds the requests of gateways that lost theirs."""

import logging

from protos.engine.v1 import engine_pb2
from scheduler_svc.gateways.detached_requests import CallLater, DetachedRequests
from scheduler_svc.gateways.gateway_stream import AttachedGateway, GatewayStream
from scheduler_svc.gateways.output_messages import queue_message
from scheduler_svc.readiness import Readiness
from scheduler_svc.requests.request_book import RequestBook
from svc_common.clock import monotonic_ns

log = logging.getLogger(__name__)


class GatewayTable:
    """Owner of the attached gateways and of the detached requests. `call_later(seconds, callback)` runs the grace time."""

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
        self._gateways: dict[str, AttachedGateway] = {}
        readiness.listen(self._tell_all)
        book.room.listen(self._tell_of_queue)

    def __len__(self) -> int:
        return len(self._gateways)

    def attach(self, frontend_id: str) -> tuple[AttachedGateway, GatewayStream]:
        """Open a stream for the gateway with that id, known or new."""
        gateway = self._gateways.get(frontend_id)
        if gateway is None:
            gateway = self._gateways[frontend_id] = AttachedGateway(
                frontend_id, self._book, self._readiness, self._holding
            )
        stream = gateway.attach()
        self._holding.renew(frontend_id)
        return gateway, stream

    def detach(self, gateway: AttachedGateway, stream: GatewayStream) -> None:
        """Handle the end of a stream, from either side."""
        if gateway.stream is not stream:
            return
        gateway.detach()
        del self._gateways[gateway.frontend_id]
        if held := gateway.held:
            log.info("gateway %s lost; %d resumable requests are held", gateway.frontend_id, len(held))

    def queue(self) -> engine_pb2.QueueState:
        """Message with the tenants for which the waiting queue has no room."""
        return queue_message(self._book.room, monotonic_ns())

    def close_all(self) -> None:
        """End all streams, because the service stops."""
        for gateway in list(self._gateways.values()):
            if gateway.stream is not None:
                gateway.stream.close()

    def _tell_all(self) -> None:
        for gateway in self._gateways.values():
            gateway.state_changed()

    def _tell_of_queue(self) -> None:
        for gateway in self._gateways.values():
            gateway.queue_changed()
