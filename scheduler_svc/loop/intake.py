"""Inputs applied to the core between a result and the next plan: stops, cancels and deadlines first, then new requests.

So blocks of ended requests are free before the next plan, and the core never changes while a plan is in
flight.
"""

from collections.abc import Callable

from protos.common.v1 import common_pb2
from scheduler_svc.core.request import Request
from scheduler_svc.core.stop_rules import check_stop
from scheduler_svc.observe.recording.recorder import AnyCore
from scheduler_svc.requests.choice_output import Ending
from scheduler_svc.requests.live_request import LiveRequest, RequestStage
from scheduler_svc.requests.request_book import RequestBook
from scheduler_svc.requests.submission import to_core
from svc_common.errors import QuireError, Unavailable


class LoopIntake:
    """Moves inputs from the book into the core. `core` arguments are None while there is no core.

    `adapter_id(name)` raises NotFound or FailedPrecondition.
    """

    def __init__(self, book: RequestBook, adapter_id: Callable[[str], int]) -> None:
        self._book = book
        self._adapter_id = adapter_id

    def take_ends(self, core: AnyCore | None) -> None:
        """End requests that were stopped, cancelled or expired."""
        if self._book.inputs.has_ends:
            self._take_asked(core)
        for live in self._book.deadlines.take_expired():
            self.leave_core(live, core)
            self._book.expire(live)

    def _take_asked(self, core: AnyCore | None) -> None:
        """End requests that were stopped or cancelled."""
        for live, choice, offset in self._book.inputs.take_stops():
            if core is not None:
                core.stop_at(live.name(choice), offset)
            self._book.stopped(live, choice, offset)
        for live in self._book.inputs.take_cancels():
            self.leave_core(live, core)
            self._book.finish(live, common_pb2.FINISH_REASON_CANCELLED)

    def take_requests(self, core: AnyCore, limits: common_pb2.ModelLimits) -> None:
        """Queue new requests in the core in order of arrival; those that cannot be served fail."""
        for live in self._book.inputs.suspects.take_crowd():
            self.leave_core(live, core)
            self._book.back_to_pending(live)
        for live in self._book.inputs.take_pending():
            try:
                self._enter(live, core, limits)
            except QuireError as error:
                self._book.fail(live, error)

    def fail_unserved(self, core: AnyCore | None, arrived_until_ns: int, why: str) -> None:
        """Fail all requests that arrived until that time with Unavailable; `why` is the message."""
        for live in self._book.live():
            if live.time.arrival_ns <= arrived_until_ns:
                self.leave_core(live, core)
                self._book.fail(live, Unavailable(why, reason="NO_WORKER", retry_after_s=5.0))

    def fail_without_adapter(self, core: AnyCore | None) -> None:
        """After a change of workers, fail requests in the core that use an adapter which a worker lacks."""
        for live in self._book.live():
            if live.place is not RequestStage.IN_CORE:
                continue  # looked at when it enters
            try:
                self._adapter_id(live.submission.adapter)
            except QuireError as error:
                self.leave_core(live, core)
                self._book.fail(live, error)

    def leave_core(self, live: LiveRequest, core: AnyCore | None) -> None:
        """Remove a request from the core, if it is there. The caller reports its end or requeues it."""
        if live.place is RequestStage.IN_CORE and core is not None:
            core.abort([live.core_id])

    def _enter(self, live: LiveRequest, core: AnyCore, limits: common_pb2.ModelLimits) -> None:
        """Add a request to the core. Choices that their committed tokens already end, end here, and with the last the request."""
        adapter_id = self._adapter_id(live.submission.adapter)
        live.output.sequences.clear()  # ranked ones start from the prompt
        request = to_core(live.submission, live.core_id, live.output, limits, adapter_id)
        if request.committed:
            self._end_complete(live, request, limits)
            if live.is_over:
                return
            request = to_core(live.submission, live.core_id, live.output, limits, adapter_id)
        live.request = request
        core.add(request)
        self._book.entered(live)

    def _end_complete(self, live: LiveRequest, request: Request, limits: common_pb2.ModelLimits) -> None:
        for sequence in request.unfinished:
            status = check_stop(sequence, limits.max_model_len)
            if status is not None:
                self._book.choice_ended(live, sequence.index, Ending.of(status, sequence.stop_token_id))
