"""Streams of gateway processes and what is still to be written to each: sent counts per request, never a queue of messages.

A slow gateway gets larger messages: each carries everything new since the last one, and only token ids are
kept. `engine_service` is the transport, `output_messages` builds the messages' parts, `RequestBook` holds the
requests.
"""

import asyncio
from dataclasses import dataclass, field

from protos.engine.v1 import engine_pb2
from scheduler_svc.gateways.detached_requests import DetachedRequests
from scheduler_svc.gateways.output_messages import (
    TokenRuns,
    finished_message,
    held_message,
    put_extras,
    queue_message,
)
from scheduler_svc.gateways.resubmission import attached_elsewhere, meant_by_attach, meant_by_submit
from scheduler_svc.readiness import Readiness
from scheduler_svc.requests.live_request import Delivery, LiveRequest
from scheduler_svc.requests.request_book import RequestBook
from scheduler_svc.requests.submission import Submission, parse
from svc_common.clock import monotonic_ns
from svc_common.errors import Aborted, InvalidArgument, QuireError
from svc_common.net import rpc

MAX_TOKENS_PER_MESSAGE = 2_000_000
MAX_CONFIRMED_BYTES = 8 * 2**20


@dataclass(slots=True, eq=False)
class GatewayStream:
    """One stream of a gateway. `wake`: there is something to write, or it is over. `error`: ends the stream with that error."""

    wake: asyncio.Event = field(default_factory=asyncio.Event)
    over: bool = False
    error: QuireError | None = None

    def close(self, error: QuireError | None = None) -> None:
        """End the stream from the scheduler's side."""
        self.over, self.error = True, error
        self.wake.set()


class AttachedGateway:
    """One connected gateway: its handles and what is to be written to it.

    Resumable requests without a reader, because its stream ended or it detached, are held (`DetachedRequests`). An
    Attach from any gateway reads such a request from its beginning; its own gateway's Submit of the same id,
    from the tokens that the gateway has.
    """

    def __init__(self, frontend_id: str, book: RequestBook, readiness: Readiness, holding: DetachedRequests) -> None:
        self.frontend_id = frontend_id
        self.stream: GatewayStream | None = None
        self._book = book
        self._readiness = readiness
        self._holding = holding
        self._unconfirmed: dict[int, engine_pb2.HeldRequest] = {}
        self._deliveries: dict[int, Delivery] = {}
        self._dirty: dict[int, Delivery] = {}
        self._refusals: list[engine_pb2.Failed] = []
        self._state_changed = False
        self._queue_changed = False

    # --- what the gateway says ------------------------------------------------------------------------------------

    def receive(self, message: engine_pb2.FrontendMessage) -> None:
        """Process one message after the first. Invalid parts are refused individually; a second hello raises InvalidArgument."""
        if message.HasField("hello"):
            raise InvalidArgument.field("hello", "belongs into the first message of a stream only")
        for submit in message.submits:
            self._submit(submit)
        for attach in message.attaches:
            self._attach(attach)
        for stop in message.stops:
            delivery = self._deliveries.get(stop.handle)
            if delivery is not None:
                self._book.stop(delivery.live, stop.choice, stop.token_offset)
        for cancel in message.cancels:
            self._cancel(cancel)
        for detach in message.detaches:
            self._detach(detach.handle)
        if message.HasField("goodbye"):
            self.leave()

    def _submit(self, submit: engine_pb2.Submit) -> None:
        try:
            if submit.handle == 0 or (submit.handle in self._deliveries and not self._is_same(submit)):
                raise InvalidArgument.field("handle", f"{submit.handle} is zero or in use for another request")
            submission = parse(submit, monotonic_ns())
            known = meant_by_submit(self._book, submission, self)
            live = known or self._accept(submission)
        except QuireError as error:
            self._book.refused(submit, error)
            self._refuse(submit.handle, error)
            return
        self._bind(submit.handle, live, list(map(len, submission.committed)))
        if submission.resumable and not submission.resubmitted:
            self._confirm(submit.handle, live, is_known=known is not None)

    def _accept(self, submission: Submission) -> LiveRequest:
        """Accept a request. A draining scheduler refuses new ones, but not those accepted before, here or by its predecessor."""
        if not submission.resubmitted:
            self._readiness.check_open()
        return self._book.accept(submission)

    def _is_same(self, submit: engine_pb2.Submit) -> bool:
        return self._deliveries[submit.handle].live.submission.key == (submit.tenant, submit.request_id)

    def _attach(self, attach: engine_pb2.Attach) -> None:
        try:
            if attach.handle == 0 or attach.handle in self._deliveries:
                raise InvalidArgument.field("handle", f"{attach.handle} is zero or in use for another request")
            live = meant_by_attach(self._book, attach)
        except QuireError as error:
            self._refuse(attach.handle, error)
            return
        self._bind(attach.handle, live, [])
        self._confirm(attach.handle, live, is_known=True)

    def _confirm(self, handle: int, live: LiveRequest, *, is_known: bool) -> None:
        """Queue a confirmation of the handle, with the request as first submitted if it was known."""
        held = held_message(handle, live)
        if is_known:
            held.submit.CopyFrom(live.message(monotonic_ns()))
            self._book.read_again(live)
        self._unconfirmed[handle] = held
        self._wake()

    def _bind(self, handle: int, live: LiveRequest, sent_counts: list[int]) -> None:
        """Send the request's output to `handle` from now on, starting behind the given counts; a former reader loses it."""
        if live.delivery is not None and live.delivery.reader is self and live.delivery.handle == handle:
            self._forget(live.delivery)
        elif live.delivery is not None:
            live.delivery.reader.lose(live.delivery)
        self._holding.release(live)
        live.delivery = self._deliveries[handle] = Delivery(
            self, handle, live, sent_counts + [0] * (live.submission.num_choices - len(sent_counts))
        )
        self.touch(live.delivery)

    def _cancel(self, cancel: engine_pb2.Cancel) -> None:
        delivery = self._deliveries.get(cancel.handle)
        live = delivery.live if delivery is not None else self.held.get(cancel.handle)
        if not cancel.handle:
            live = self._book.find(cancel.tenant, cancel.request_id)
        if live is not None:
            self._book.cancel(live)

    def _detach(self, handle: int) -> None:
        delivery = self._deliveries.get(handle)
        if delivery is not None:
            self._forget(delivery)
            self._drop(delivery, "")

    @property
    def held(self) -> dict[int, LiveRequest]:
        """Detached requests that the gateway can still reclaim, by handle."""
        return self._holding.of(self.frontend_id)

    # --- what it gets ---------------------------------------------------------------------------------------------

    def touch(self, delivery: Delivery) -> None:
        """Mark the delivery as having new output."""
        self._dirty[delivery.handle] = delivery
        self._wake()

    def lose(self, delivery: Delivery) -> None:
        """Stop writing a delivery that another reader took over, and report that to the gateway."""
        if self._forget(delivery):
            self._refuse(delivery.handle, attached_elsewhere())

    def state_changed(self) -> None:
        """Queue the service's state for writing."""
        self._state_changed = True
        self._wake()

    def queue_changed(self) -> None:
        """Queue the list of tenants without room in the waiting queue for writing."""
        self._queue_changed = True
        self._wake()

    def collect(self) -> engine_pb2.EngineMessage | None:
        """A message with everything new since the last call, or None. Ends in it count as delivered."""
        dirty, self._dirty = self._dirty, {}
        message = engine_pb2.EngineMessage()
        if self._refusals or self._unconfirmed:
            message.failed.extend(self._refusals)
            message.attached.extend(self._take_confirmations())
            self._refusals = []
        if self._state_changed:
            message.state.CopyFrom(self._readiness.state())
            self._state_changed = False
        if self._queue_changed:
            message.queue.CopyFrom(queue_message(self._book.room, monotonic_ns()))
            self._queue_changed = False
        runs = TokenRuns()
        for delivery in dirty.values():
            if len(runs.token_ids) >= MAX_TOKENS_PER_MESSAGE or delivery.handle in self._unconfirmed:
                self.touch(delivery)
            elif delivery.live.delivery is delivery:
                self._put(delivery, message, runs)
        if runs.handles:
            runs.fill(message.tokens)
        return message if message.ByteSize() else None

    def _take_confirmations(self) -> list[engine_pb2.HeldRequest]:
        """As many confirmations as fit into a message; output of the others is delayed with them."""
        taken, size = [], 0
        while self._unconfirmed and size < MAX_CONFIRMED_BYTES:
            taken.append(self._unconfirmed.pop(next(iter(self._unconfirmed))))
            size += taken[-1].ByteSize()
        if self._unconfirmed:
            self._wake()
        return taken

    def _put(self, delivery: Delivery, message: engine_pb2.EngineMessage, runs: TokenRuns) -> None:
        live, is_over = delivery.live, delivery.live.is_over
        if not delivery.started_written and live.time.first_scheduled_ns is not None:
            delivery.started_written = True
            message.started.add(handle=delivery.handle, cached_prompt_tokens=live.cached_prompt_tokens)
        if is_over and live.failure is None:
            put_extras(delivery, message)
        if is_over or not live.output.ranked:
            self._put_choices(delivery, message, runs)
        if is_over:
            self._put_end(delivery, message)

    def _put_choices(self, delivery: Delivery, message: engine_pb2.EngineMessage, runs: TokenRuns) -> None:
        """Put new tokens and the end of each choice; the last end carries the request's account."""
        live = delivery.live
        for number, choice in enumerate(live.output.choices):
            if len(choice.tokens) > delivery.sent_counts[number]:
                runs.put(delivery, number, choice)
            if choice.ending is not None and number not in delivery.ends_written and live.failure is None:
                delivery.ends_written.add(number)
                last = live.is_over and len(delivery.ends_written) == len(live.output.choices)
                account = live.account_at_end if last else None
                message.finished.append(finished_message(delivery.handle, number, choice, account))

    def _put_end(self, delivery: Delivery, message: engine_pb2.EngineMessage) -> None:
        live = delivery.live
        if live.failure is not None:
            message.failed.add(handle=delivery.handle, account=live.account_at_end).MergeFrom(live.failure)
        delivery.end_written = True
        self._forget(delivery)
        self._book.delivered(live)

    def _refuse(self, handle: int, error: QuireError) -> None:
        self._refusals.append(engine_pb2.Failed(handle=handle, error=rpc.to_error_status(error)))
        self._wake()

    def _wake(self) -> None:
        if self.stream is not None:
            self.stream.wake.set()

    def _forget(self, delivery: Delivery) -> bool:
        """Stop writing the delivery; False if it was not being written."""
        if self._deliveries.get(delivery.handle) is not delivery:
            return False
        del self._deliveries[delivery.handle]
        self._dirty.pop(delivery.handle, None)
        self._unconfirmed.pop(delivery.handle, None)
        return True

    # --- streams connecting and ending ----------------------------------------------------------------------------

    def attach(self) -> GatewayStream:
        """Open a new stream; an older one of the same gateway is closed."""
        if self.stream is not None:
            self._drop_readers()
            self.stream.close(Aborted("another stream of this gateway took over", reason="FRONTEND_REPLACED"))
        self.stream = GatewayStream()
        return self.stream

    def detach(self) -> None:
        """Handle the loss of the stream: cancel requests that are not resumable and hold the others."""
        self.stream = None
        self._drop_readers()

    def leave(self) -> None:
        """Handle a gateway's goodbye: cancel all requests that it did not detach from, and end the stream."""
        self._drop_readers()
        self._holding.abandon(self.frontend_id)
        if self.stream is not None:
            self.stream.close()

    def _drop_readers(self) -> None:
        deliveries, self._deliveries, self._dirty = self._deliveries, {}, {}
        self._refusals, self._unconfirmed = [], {}
        for delivery in deliveries.values():
            self._drop(delivery, self.frontend_id)

    def _drop(self, delivery: Delivery, frontend_id: str) -> None:
        """Handle the loss of a request's reader; `frontend_id`: the gateway that may reclaim it under its handle."""
        live, live.delivery = delivery.live, None
        if live.submission.resumable:
            self._holding.hold(live, frontend_id, delivery.handle)
        elif live.is_over:
            self._book.delivered(live)
        else:
            # Not only cancelled: a gateway that reconnects before the next plan submits it anew under its id.
            self._book.abandon(live)
