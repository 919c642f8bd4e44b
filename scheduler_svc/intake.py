"""What happens to the core between a result and the next plan: stops, cancels, deadlines first, then new requests.

So the blocks of whatever ended are free before the next plan, and the core never changes under a plan that is out.
"""

from protos.common.v1 import common_pb2
from scheduler_svc.core.request import SequenceStatus
from scheduler_svc.core.stop_rules import check_stop
from scheduler_svc.live_request import LiveRequest, Place
from scheduler_svc.recording.recorder import AnyCore
from scheduler_svc.request_book import RequestBook
from scheduler_svc.submission import to_core
from svc_common.errors import QuireError, Unavailable


class Intake:
    """Moves inputs from the book into the core. `core` is None where there is none (yet)."""

    def __init__(self, book: RequestBook) -> None:
        self._book = book

    def take_ends(self, core: AnyCore | None) -> None:
        """Ends what is stopped, cancelled or expired."""
        for live, offset in self._book.take_stops():
            live.cut_to(offset)
            if core is not None:
                core.stop_at(live.name, offset)
            self._book.finish(live, common_pb2.FINISH_REASON_STOP)
        for live in self._book.take_cancels():
            self.leave_core(live, core)
            self._book.finish(live, common_pb2.FINISH_REASON_CANCELLED)
        for live in self._book.take_expired():
            self.leave_core(live, core)
            self._book.expire(live)

    def take_requests(self, core: AnyCore, limits: common_pb2.ModelLimits) -> None:
        """Queues new requests in order of arrival; those that cannot be served fail."""
        for live in self._book.take_pending():
            try:
                self._enter(live, core, limits)
            except QuireError as error:
                self._book.fail(live, error)

    def fail_unserved(self, core: AnyCore | None, arrived_until_ns: int, why: str) -> None:
        """Nobody waits for ever for a worker that does not come: fails what arrived until then."""
        for live in self._book.live():
            if live.time.arrival_ns <= arrived_until_ns:
                self.leave_core(live, core)
                self._book.fail(live, Unavailable(why, reason="NO_WORKER", retry_after_s=5.0))

    def leave_core(self, live: LiveRequest, core: AnyCore | None) -> None:
        """Out of the core; its end is told by the caller."""
        if live.place is Place.IN_CORE and core is not None:
            core.abort([live.core_id])

    def _enter(self, live: LiveRequest, core: AnyCore, limits: common_pb2.ModelLimits) -> None:
        """A request whose committed tokens already end it ends here."""
        request = to_core(live.submission, live.core_id, live.tokens, limits)
        first = request.sequences[0]
        status = check_stop(first, limits.max_model_len)
        if status is None:
            core.add(request)
            self._book.entered(live)
        elif status is SequenceStatus.FINISHED_STOPPED:
            self._book.finish(live, common_pb2.FINISH_REASON_STOP, stop_token_id=first.stop_token_id)
        else:
            self._book.finish(live, common_pb2.FINISH_REASON_LENGTH)
