"""Frontends (gateway processes) and what is still to be written to each: a cursor per request, never a queue of messages.

A slow gateway coalesces by itself: the next message carries everything new since the last one, and only token ids are kept.
The stream is `engine_service`'s, the messages' parts are `output_messages`'s; requests live in the `RequestBook`.
"""

import asyncio
from dataclasses import dataclass, field

from protos.engine.v1 import engine_pb2
from scheduler_svc.frontends.output_messages import TokenRuns, finished_message, put_extras
from scheduler_svc.readiness import Readiness
from scheduler_svc.requests.book import RequestBook
from scheduler_svc.requests.live_request import LiveRequest, Outlet
from scheduler_svc.requests.submission import Submission, parse
from svc_common import rpc
from svc_common.clock import monotonic_ns
from svc_common.errors import Aborted, AlreadyExists, InvalidArgument, QuireError

MAX_TOKENS_PER_MESSAGE = 2_000_000


@dataclass(slots=True, eq=False)
class Attachment:
    """One stream of a frontend. `wake`: something to write, or over. `over`: ends the stream; with `error`, by that error."""

    wake: asyncio.Event = field(default_factory=asyncio.Event)
    over: bool = False
    error: QuireError | None = None

    def close(self, error: QuireError | None = None) -> None:
        """Ends the stream from our side."""
        self.over, self.error = True, error
        self.wake.set()


class Frontend:
    """Owner of one gateway's handles. Outlives its streams by the grace time.

    `held`: resumable requests whose reader went with the last stream. They go on; a Submit of the same id reads them again from
    the tokens it has; what nobody asks for is cancelled when the grace time is over.
    """

    def __init__(self, frontend_id: str, book: RequestBook, readiness: Readiness) -> None:
        self.frontend_id = frontend_id
        self.attachment: Attachment | None = None
        self.held: dict[int, LiveRequest] = {}
        self._book = book
        self._readiness = readiness
        self._outlets: dict[int, Outlet] = {}
        self._dirty: dict[int, Outlet] = {}
        self._refusals: list[engine_pb2.Failed] = []
        self._state_changed = False

    # --- what the gateway says ------------------------------------------------------------------------------------

    def receive(self, message: engine_pb2.FrontendMessage) -> None:
        """Takes one message after the first. A bad part is refused alone. InvalidArgument: a second hello."""
        if message.HasField("hello"):
            raise InvalidArgument.field("hello", "belongs into the first message of a stream only")
        for submit in message.submits:
            self._submit(submit)
        for stop in message.stops:
            outlet = self._outlets.get(stop.handle)
            if outlet is not None:
                self._book.stop(outlet.live, stop.choice, stop.token_offset)
        for cancel in message.cancels:
            self._cancel(cancel)
        if message.HasField("goodbye"):
            self.leave()

    def _submit(self, submit: engine_pb2.Submit) -> None:
        try:
            if submit.handle == 0 or (submit.handle in self._outlets and not self._is_same(submit)):
                raise InvalidArgument.field("handle", f"{submit.handle} is zero or in use for another request")
            submission = parse(submit, monotonic_ns())
            live = self._known(submission) or self._book.accept(submission)
        except QuireError as error:
            self._refuse(submit.handle, error)
            return
        self._bind(submit.handle, live, [len(tokens) for tokens in submission.committed])

    def _is_same(self, submit: engine_pb2.Submit) -> bool:
        return self._outlets[submit.handle].live.submission.key == (submit.tenant, submit.request_id)

    def _known(self, submission: Submission) -> LiveRequest | None:
        live = self._book.find(submission.tenant, submission.request_id)
        if live is not None and live.submission.prompt.tobytes() != submission.prompt.tobytes():
            raise AlreadyExists(
                f"request id {submission.request_id} is in use for another prompt; choose a new id",
                reason="REQUEST_ID_IN_USE",
            )
        return live

    def _bind(self, handle: int, live: LiveRequest, cursors: list[int]) -> None:
        """From here on the request's output goes to `handle`, from those tokens on; a former reader has lost it."""
        if live.outlet is not None and live.outlet.reader is self:
            self._forget(live.outlet)
        elif live.outlet is not None:
            live.outlet.reader.lose(live.outlet)
        self.held = {h: other for h, other in self.held.items() if other is not live}
        live.outlet = self._outlets[handle] = Outlet(
            self, handle, live, cursors + [0] * (live.submission.num_choices - len(cursors))
        )
        self.touch(live.outlet)

    def _cancel(self, cancel: engine_pb2.Cancel) -> None:
        outlet = self._outlets.get(cancel.handle)
        live = outlet.live if outlet is not None else self.held.get(cancel.handle)
        if not cancel.handle:
            live = self._book.find(cancel.tenant, cancel.request_id)
        if live is not None:
            self._book.cancel(live)

    # --- what it gets ---------------------------------------------------------------------------------------------

    def touch(self, outlet: Outlet) -> None:
        """The outlet has something new."""
        self._dirty[outlet.handle] = outlet
        self._wake()

    def lose(self, outlet: Outlet) -> None:
        """Another reader took the request over."""
        self._forget(outlet)
        self._refuse(outlet.handle, Aborted("another reader attached to this request", reason="ATTACHED_ELSEWHERE"))

    def state_changed(self) -> None:
        """The service's state is to be told."""
        self._state_changed = True
        self._wake()

    def collect(self) -> engine_pb2.EngineMessage | None:
        """Everything new since the last call, or None. Ends that it carries count as delivered."""
        dirty, self._dirty = self._dirty, {}
        message = engine_pb2.EngineMessage(failed=self._refusals)
        self._refusals = []
        if self._state_changed:
            message.state.CopyFrom(self._readiness.state())
            self._state_changed = False
        runs = TokenRuns()
        for outlet in dirty.values():
            if len(runs.token_ids) >= MAX_TOKENS_PER_MESSAGE:
                self.touch(outlet)
            elif outlet.live.outlet is outlet:
                self._put(outlet, message, runs)
        if runs.handles:
            message.tokens.CopyFrom(runs.message())
        return message if message.ByteSize() else None

    def _put(self, outlet: Outlet, message: engine_pb2.EngineMessage, runs: TokenRuns) -> None:
        live = outlet.live
        if not outlet.started_written and live.time.first_scheduled_ns is not None:
            outlet.started_written = True
            message.started.add(handle=outlet.handle, cached_prompt_tokens=live.cached_prompt_tokens)
        if not live.output.ranked or live.is_over:
            self._put_choices(outlet, message, runs)
        if live.is_over:
            self._put_end(outlet, message)

    def _put_choices(self, outlet: Outlet, message: engine_pb2.EngineMessage, runs: TokenRuns) -> None:
        """New tokens of each choice, and its end, but for the request's last, which has the account."""
        live = outlet.live
        if live.is_over and live.failure is None:
            put_extras(outlet, message)
        for number, choice in enumerate(live.output.choices):
            if len(choice.tokens) > outlet.cursors[number]:
                runs.put(outlet, number, choice)
            if choice.ending is not None and number not in outlet.ends_written and live.failure is None:
                outlet.ends_written.add(number)
                last = live.is_over and len(outlet.ends_written) == len(live.output.choices)
                account = live.account_at_end if last else None
                message.finished.append(finished_message(outlet.handle, number, choice, account))

    def _put_end(self, outlet: Outlet, message: engine_pb2.EngineMessage) -> None:
        live = outlet.live
        if live.failure is not None:
            message.failed.add(handle=outlet.handle, account=live.account_at_end).MergeFrom(live.failure)
        outlet.end_written = True
        self._forget(outlet)
        self._book.delivered(live)

    def _refuse(self, handle: int, error: QuireError) -> None:
        self._refusals.append(engine_pb2.Failed(handle=handle, error=rpc.to_error_status(error)))
        self._wake()

    def _wake(self) -> None:
        if self.attachment is not None:
            self.attachment.wake.set()

    def _forget(self, outlet: Outlet) -> None:
        if self._outlets.get(outlet.handle) is outlet:
            del self._outlets[outlet.handle]
        self._dirty.pop(outlet.handle, None)

    # --- streams come and go --------------------------------------------------------------------------------------

    def attach(self) -> Attachment:
        """A new stream; an older one of the same frontend is closed."""
        if self.attachment is not None:
            self._drop_readers()
            self.attachment.close(Aborted("another stream of this frontend took over", reason="FRONTEND_REPLACED"))
        self.attachment = Attachment()
        return self.attachment

    def detach(self) -> None:
        """The stream is gone: what is not resumable is cancelled, the rest is held."""
        self.attachment = None
        self._drop_readers()

    def leave(self) -> None:
        """The gateway leaves for good: all of it is cancelled and the stream ends."""
        self._drop_readers()
        self.cancel_held()
        if self.attachment is not None:
            self.attachment.close()

    def cancel_held(self) -> None:
        """Nobody came back for them."""
        for live in self.held.values():
            self._book.cancel(live)
        self.held = {}

    def _drop_readers(self) -> None:
        outlets, self._outlets, self._dirty, self._refusals = self._outlets, {}, {}, []
        for handle, outlet in outlets.items():
            live, live.outlet = outlet.live, None
            if live.submission.resumable:
                self.held[handle] = live
            elif live.is_over:
                self._book.delivered(live)
            else:
                self._book.cancel(live)
