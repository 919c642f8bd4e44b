"""All accepted requests, from acceptance to their single terminal message.

`RequestBook` owns the tables of `LiveRequest`s and notifies listeners. Inputs queued for the step loop are in
`loop_inputs`; gateway streams (`scheduler_svc.gateways`) and workers are unknown here.
"""

import asyncio
import itertools
from collections.abc import Callable, Iterator

from protos.common.v1 import common_pb2
from protos.engine.v1 import engine_pb2
from scheduler_svc.core.parts.waiting_deadlines import EXPIRED
from scheduler_svc.core.plan import EndedSequence, SequenceTokens
from scheduler_svc.core.request import SequenceStatus
from scheduler_svc.observe.spans import RequestSpans
from scheduler_svc.requests.choice_output import Ending
from scheduler_svc.requests.deadlines import RequestDeadlines, deadline_passed
from scheduler_svc.requests.listener import RequestListener
from scheduler_svc.requests.live_request import LiveRequest, RequestStage, Timeline
from scheduler_svc.requests.loop_inputs import LoopInputs
from scheduler_svc.requests.retention import Retention
from scheduler_svc.requests.sequence_errors import sequence_error
from scheduler_svc.requests.submission import Submission
from scheduler_svc.requests.waiting_room import WaitingRoom
from scheduler_svc.settings import SchedulerSettings
from scheduler_svc.worker_values import PromptRun, TokenExtras
from svc_common.errors import AlreadyExists, OutOfRange, QuireError, ResourceExhausted
from svc_common.net import rpc
from svc_common.observability import log_context
from svc_common.observability.log_context import LogContext


class RequestBook:
    """Registry of accepted requests; each of them ends exactly once, here. `clock`: monotonic ns.

    `wake` is set when the step loop has something to take: from `inputs`, which this class fills, or from
    elsewhere.
    """

    def __init__(self, settings: SchedulerSettings, spans: RequestSpans, clock: Callable[[], int]) -> None:
        self.wake = asyncio.Event()
        self._settings = settings
        self._spans = spans
        self._clock = clock
        self._by_key: dict[tuple[str, str], LiveRequest] = {}
        self._by_core_id: dict[str, LiveRequest] = {}
        self.inputs = LoopInputs(self.wake)
        self.deadlines = RequestDeadlines(self._by_core_id, clock)
        self._room = WaitingRoom(settings, clock)
        self._retained = Retention(settings, clock)
        self._listeners: list[RequestListener] = []

    def listen(self, listener: RequestListener) -> None:
        """Notify `listener` of request events from now on."""
        self._listeners.append(listener)

    # --- looking up ----------------------------------------------------------------------------------------------

    def find(self, tenant: str, request_id: str) -> LiveRequest | None:
        """The live or retained request with that public id, or None."""
        self._forget_expired()
        return self._by_key.get((tenant, request_id))

    def in_core(self, core_id: str) -> LiveRequest | None:
        """The live request with that id in the core, or None."""
        return self._by_core_id.get(core_id)

    def num_users(self, adapter_id: int) -> int:
        """Number of live requests that use an adapter and are in the core or about to re-enter it."""
        return sum(
            live.request is not None and live.request.lora_id == adapter_id for live in self._by_core_id.values()
        )

    @property
    def room(self) -> WaitingRoom:
        """Accounting of the bounded queue; read only."""
        return self._room

    @property
    def num_waiting(self) -> int:
        """Number of requests never scheduled so far."""
        return self._room.num_requests

    def log_extra(self, core_id: str) -> dict[str, LogContext]:
        """`extra` argument for a log line about that request."""
        live = self._by_core_id.get(core_id)
        return log_context.about(LogContext(core_id) if live is None else live.log_context)

    def live(self) -> Iterator[LiveRequest]:
        """All requests that have not ended; iterates over a copy, so that the book may change meanwhile."""
        return iter(list(self._by_core_id.values()))

    # --- inputs: from gateway streams -----------------------------------------------------------------------------

    def accept(self, submission: Submission) -> LiveRequest:
        """Accept a new request.

        Raises AlreadyExists for a known (tenant, request id), DeadlineExceeded, and ResourceExhausted when
        the queue is full (never for resubmitted requests).
        """
        now_ns, key = self._clock(), submission.key
        if key in self._by_key:
            raise AlreadyExists(f"request {submission.request_id} exists already", reason="DUPLICATE_REQUEST")
        if submission.deadline_ns is not None and submission.deadline_ns <= now_ns:
            raise deadline_passed(was_started=False)
        if not submission.resubmitted:
            self._check_room(submission, now_ns)
        live = LiveRequest(
            core_id=self._core_id(submission),
            submission=submission,
            time=Timeline(submission.arrival_ns),
            output=submission.new_output(),
        )
        self._by_key[key] = self._by_core_id[live.core_id] = live
        self.inputs.enter(live)
        self._room.enter(submission.tenant, len(submission.prompt))
        if submission.deadline_ns is not None:
            self.deadlines.add(submission.deadline_ns, live.core_id, len(self._by_core_id))
        live.trace = self._spans.accepted(live)
        self.wake.set()
        return live

    def refused(self, submit: engine_pb2.Submit, error: QuireError) -> None:
        """Report a submission that was refused, here or before it reached the book."""
        self._spans.refused(submit.trace, submit.request_id, error)
        for listener in self._listeners:
            listener.refused(error)

    def _check_room(self, submission: Submission, now_ns: int) -> None:
        most = self._settings.max_live_requests
        if len(self._by_core_id) >= most:
            raise ResourceExhausted(
                f"{most} requests are here, which is all that this scheduler takes: try again later",
                reason="QUEUE_FULL",
                metadata={"live_requests": str(most)},
                retry_after_s=self._room.retry_after_s(now_ns),
            )
        self._room.check(submission.tenant, len(submission.prompt), now_ns)

    def cancel(self, live: LiveRequest) -> None:
        """End a request before the next plan, or at once if it is not in the core. No-op if it is over."""
        if live.place is RequestStage.PENDING:
            self.finish(live, common_pb2.FINISH_REASON_CANCELLED)
        elif live.place is RequestStage.IN_CORE:
            self.inputs.cancel(live)

    def abandon(self, live: LiveRequest) -> None:
        """Cancel a request that no reader will return for, and free its id. One that is retained already stays retained."""
        if not live.is_over:
            self._forget(live)
            self.cancel(live)

    def give_up(self, live: LiveRequest) -> None:
        """Drop a request that ended without a result, so that submitting its id again starts it anew."""
        self._retained.drop(live)
        self._forget(live)

    def read_again(self, live: LiveRequest) -> None:
        """Restart the retention time of a request to which a reader reconnected."""
        self._retained.renew(live)

    def stop(self, live: LiveRequest, choice: int, token_offset: int) -> None:
        """End a choice at a stop string after its first `token_offset` output tokens (capped at the output's length).

        No-op for ranked choices, and for choices that do not exist or have ended.
        """
        choices = live.output.choices
        if live.is_over or live.output.ranked or choice >= len(choices) or choices[choice].ending is not None:
            return
        offset = min(token_offset, len(choices[choice].tokens))
        if live.place is RequestStage.PENDING:
            self.stopped(live, choice, offset)
        else:
            self.inputs.stop(live, choice, offset)

    # --- progress: from the loop ----------------------------------------------------------------------------------

    def entered(self, live: LiveRequest) -> None:
        """Mark a request as being in the core."""
        live.place = RequestStage.IN_CORE

    def back_to_pending(self, live: LiveRequest) -> None:
        """Queue a request again after its core was discarded; it keeps its tokens and its queued stops and cancels."""
        live.place = RequestStage.PENDING
        self.inputs.enter(live)

    def scheduled(self, core_id: str, step: int, cached_prompt_tokens: int, worker_id: str) -> None:
        """Record that `step` schedules the request on that worker, for the first time or after a preemption or loss."""
        live, now_ns = self._by_core_id[core_id], self._clock()
        live.worker_id = worker_id
        if live.on_scheduled(now_ns):
            live.cached_prompt_tokens = cached_prompt_tokens
            self._room.leave(live.submission.tenant, len(live.submission.prompt))
            self._room.started(now_ns)
            live.touch()
            for listener in self._listeners:
                listener.started(live)

    def preempted(self, core_id: str, step: int, mode: str) -> None:
        """Record a preemption; `mode` is its kind (recompute or swap)."""
        for listener in self._listeners:
            listener.preempted(mode)
        live = self._by_core_id.get(core_id)
        if live is not None:
            live.time.num_preemptions += 1
            live.time.preempted_since_ns = self._clock()

    def lost_its_worker(self, live: LiveRequest, *, in_step: bool) -> bool:
        """Record the loss of the request's KV with its worker; False if it reached `max_worker_losses` and must be failed.

        `in_step`: the request was in a step without a result, which counts as one loss.
        """
        if live.time.first_scheduled_ns is not None and live.time.preempted_since_ns is None:
            live.time.preempted_since_ns = self._clock()
            live.time.num_migrations += 1
        live.num_losses += in_step
        self.inputs.lost(live)
        return live.num_losses < self._settings.max_worker_losses

    def put_tokens(self, run: SequenceTokens, step: int, extras: TokenExtras | None) -> None:
        """Append new output tokens of a sequence."""
        live = self._by_core_id[run.request_id]
        if live.time.first_token_ns is None:
            live.time.first_token_ns = self._clock()
        if live.trace is not None:
            self._spans.tokens(live.trace, step)
        if live.num_losses:
            self.inputs.absolve(live)
        submission = live.submission
        live.output.put(run, extras, logprobs=submission.sampling.logprobs, tops=submission.num_top_logprobs > 0)
        if not live.output.ranked:
            live.touch()

    def drafts_verified(self, core_id: str, num_accepted: int, num_rejected: int) -> None:
        """Count draft tokens that a step accepted and rejected."""
        live = self._by_core_id.get(core_id)
        if live is not None:
            live.num_accepted_drafts += num_accepted
            live.num_rejected_drafts += num_rejected

    def put_prompt(self, core_id: str, run: PromptRun) -> None:
        """Store log probabilities of some of the request's prompt tokens."""
        live = self._by_core_id.get(core_id)
        if live is not None and live.output.prompt is not None:
            live.output.prompt.put(run)

    def put_embedding(self, core_id: str, values: bytes) -> None:
        """Store the prompt's embedding; the request's end follows."""
        live = self._by_core_id.get(core_id)
        if live is not None:
            live.output.embedding = values

    # --- ends -----------------------------------------------------------------------------------------------------

    def sequence_ended(self, ended: EndedSequence) -> None:
        """Apply a sequence's end in the core: an error fails the request, else its choice ends, or the request with the last."""
        live = self._by_core_id.get(ended.request_id)
        if live is None:
            return
        if ended.status is SequenceStatus.FINISHED_IGNORED:
            self.fail(live, OutOfRange(ended.error or "it can never be served", reason="NEVER_FITS"))
        elif ended.error == EXPIRED:
            self.expire(live)
        elif ended.error is not None:
            self.fail(live, sequence_error(ended.error, live.submission))
        elif live.output.ranked:
            if ended.request_done:
                self._rank(live)
        else:
            self.choice_ended(live, ended.index, Ending.of(ended.status, ended.stop_token_id))

    def stopped(self, live: LiveRequest, choice: int, offset: int) -> None:
        """End a choice at a stop string after `offset` tokens."""
        self.choice_ended(live, choice, live.output.choices[choice].stop_at(offset, keep=live.submission.resumable))

    def finish(self, live: LiveRequest, reason: common_pb2.FinishReason, *, stop_token_id: int | None = None) -> None:
        """End the request without an error; choices without an ending get `reason`."""
        for choice in live.output.choices:
            choice.ending = choice.ending or Ending(reason, stop_token_id)
        self._end(live, error=None)

    def choice_ended(self, live: LiveRequest, choice: int, ending: Ending) -> None:
        """End a choice, and the request if it was the last one. The first ending of a choice stays."""
        output = live.output.choices[choice]
        output.ending = output.ending or ending
        if all(c.ending is not None for c in live.output.choices):
            self._end(live, error=None)
        else:
            live.touch()

    def _rank(self, live: LiveRequest) -> None:
        """All sequences are over: the best ones become the choices."""
        assert live.request is not None
        live.output.rank(live.request)
        self._end(live, error=None)

    def fail(self, live: LiveRequest, error: QuireError) -> None:
        """End the request with an error. No-op if it is over."""
        if not live.is_over:
            live.failure = engine_pb2.Failed(error=rpc.to_error_status(error))
            self._end(live, error=error)

    def expire(self, live: LiveRequest) -> None:
        """Fail the request with DeadlineExceeded."""
        self.fail(live, deadline_passed(was_started=live.time.first_scheduled_ns is not None))

    def delivered(self, live: LiveRequest) -> None:
        """Forget the request after its end was written to its reader, unless it is retained (resumable requests)."""
        if live.is_over and live not in self._retained:
            self._forget(live)

    def _end(self, live: LiveRequest, *, error: QuireError | None) -> None:
        if live.is_over:
            return
        if live.is_waiting:
            self._room.leave(live.submission.tenant, len(live.submission.prompt))
        live.account_at_end, live.place = live.account(self._clock()), RequestStage.ENDED
        self._by_core_id.pop(live.core_id, None)
        self.inputs.ended(live)
        self._spans.ended(live, error)
        live.trace = None
        for listener in self._listeners:
            listener.ended(live, error)
        if live.submission.resumable and self._by_key.get(live.submission.key) is live:
            self._retained.keep(live)
            self._forget_expired()
        elif live.delivery is None:
            self._forget(live)
        live.touch()

    # --- inside ---------------------------------------------------------------------------------------------------

    def _forget_expired(self) -> None:
        for live in self._retained.take_expired():
            if live.delivery is None or live.delivery.end_written:
                self._forget(live)

    def _forget(self, live: LiveRequest) -> None:
        if self._by_key.get(live.submission.key) is live:
            del self._by_key[live.submission.key]

    def _core_id(self, submission: Submission) -> str:
        """The public id if it is unique, else prefixed with the tenant and, if needed, suffixed with a number."""
        base = f"{submission.tenant}:{submission.request_id}" if submission.tenant else submission.request_id
        if base not in self._by_core_id:
            return base
        return next(name for n in itertools.count(2) if (name := f"{base}~{n}") not in self._by_core_id)
