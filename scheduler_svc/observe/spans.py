"""OpenTelemetry spans of requests in the scheduler, children of the gateway's span, made from plans and results.

Only for requests with a sampled trace context, and only if telemetry is on; otherwise every call returns at
once. There is no span or event per token: a step that only gives a traced request its next token costs three
counter increments.
"""

from collections.abc import Callable

from protos.common.v1 import common_pb2
from scheduler_svc.core.entries import ScheduledSequence
from scheduler_svc.core.fast_decode.share import FastShare
from scheduler_svc.core.parts.preemption import SWAP
from scheduler_svc.core.plan import StepPlan
from scheduler_svc.core.reasons import WAITING_QUEUES, CoreEvent, Reason
from scheduler_svc.observe.head_of_line import QueueHeads
from scheduler_svc.observe.request_trace import PlanMoment, RequestTrace, Value, WaitingSample
from scheduler_svc.observe.step_observer import StepObserver
from scheduler_svc.observe.step_record import StepOrigin
from scheduler_svc.observe.timelines import BETWEEN_PLANS, behind
from scheduler_svc.requests.live_request import LiveRequest
from svc_common.clock import NS_PER_S, monotonic_ns, unix_ns
from svc_common.errors import Cancelled, DeadlineExceeded, QuireError
from svc_common.observability import trace_names as names
from svc_common.observability.telemetry import Telemetry, context_of, error_numbers, is_sampled

NS_PER_MS = 1_000_000
_CANCELLED = common_pb2.FINISH_REASON_CANCELLED


class RequestSpans(StepObserver):
    """Traces of the live requests (`LiveRequest.trace`). `outage()`: why no worker runs steps, "" = one does."""

    def __init__(self, telemetry: Telemetry, outage: Callable[[], str] = lambda: "") -> None:
        self._telemetry = telemetry
        self._outage = outage
        self._traces: dict[str, RequestTrace] = {}
        self._heads = QueueHeads()
        self._moment = PlanMoment(0, 0)

    # --- requests arriving --------------------------------------------------------------------------------------------

    def accepted(self, live: LiveRequest) -> RequestTrace | None:
        """Open the queue span of a traced request; None for others."""
        message = live.submission.sampling.trace
        if not self._telemetry.enabled or message is None or not is_sampled(message):
            return None
        parent = context_of(message)
        if parent is None:
            return None
        submission = live.submission
        trace = RequestTrace(self._telemetry, parent, submission.request_id, is_single=submission.best_of == 1)
        self._traces[live.core_id] = trace
        attributes = {names.INPUT_TOKENS: len(submission.prompt), names.PRIORITY: -submission.priority}
        trace.open(names.QUEUE, _now_ns(), attributes)
        if why := self._outage():
            _tell_outage(trace, why)
        return trace

    def refused(self, message: common_pb2.TraceContext, request_id: str, error: QuireError) -> None:
        """Record a zero-length span with the error of a request that was not accepted."""
        if not self._telemetry.enabled or not is_sampled(message) or (parent := context_of(message)) is None:
            return
        trace, now_ns = RequestTrace(self._telemetry, parent, request_id), _now_ns()
        trace.open(names.ADMIT, now_ns, {})
        trace.event(names.REFUSED, now_ns, error_numbers(error))
        trace.fail(error)
        trace.close(now_ns)

    def readiness_changed(self) -> None:
        """Note the outage on all open spans if no worker runs steps."""
        if why := self._outage():
            for trace in self._traces.values():
                _tell_outage(trace, why)

    # --- plans --------------------------------------------------------------------------------------------------------

    def on_plan(self, plan: StepPlan, origin: StepOrigin) -> None:
        """Record a plan's decisions on traced requests: starts, preemptions, waits, prefill chunks, blocks and swaps."""
        if not self._traces:
            return
        place = origin.step_id, origin.epoch, origin.worker, origin.worker_id
        self._moment = moment = PlanMoment(plan.step, unix_ns(origin.planned_ns), *place, is_repeat=plan.is_repeat)
        for event in plan.events:
            if event.of_queue:
                self._heads.observe(event)
            if (trace := self._traces.get(event.request_id)) is not None:
                self._take(trace, event, moment)
        for request_id, num_blocks in plan.swapped_in.items():
            if (trace := self._traces.get(request_id)) is not None:
                trace.event(names.SWAPPED_IN, moment.at_ns, {**moment.ids, names.BLOCKS: num_blocks})
        for entry in plan.entries:
            if entry.is_prefill or entry.new_block_ids:
                self._take_share(entry, moment)
        if plan.fast is not None:
            self._take_fast_blocks(plan.fast)

    def _take_fast_blocks(self, fast: FastShare) -> None:
        for row, blocks in fast.new_blocks.items():
            sequence = fast.members[row].sequences[0]
            if (trace := self._traces.get(sequence.request.request_id)) is not None:
                trace.hold(sequence.name, len(blocks), anew=False)

    def _take_share(self, entry: ScheduledSequence, moment: PlanMoment) -> None:
        trace = self._traces.get(entry.request_id)
        if trace is None:
            return
        trace.hold(entry.name, len(entry.new_block_ids), anew=entry.fresh)
        if not entry.is_prefill:
            return
        if trace.name == names.PREFILL:
            trace.count_step(moment.step)
        attributes: dict[str, Value] = {
            **moment.ids,
            names.SEQUENCE_NAME: entry.name,
            names.TOKENS: entry.num_tokens,
            names.COMPUTED_BEFORE: entry.computed_before,
        }
        trace.event(names.CHUNK, moment.at_ns, attributes, entry.index)

    def _take(self, trace: RequestTrace, event: CoreEvent, moment: PlanMoment) -> None:
        if event.sample in trace.waits:
            self._catch_up(trace, event.sample)
        if event.queue not in WAITING_QUEUES:
            trace.waits.pop(event.sample, None)
            if event.reason is Reason.RUNNING:
                _runs(trace, event, moment)
            elif event.reason is Reason.MOVED:
                numbers = {f"{names.PREFIX}{name}": value for name, value in event.numbers.items()}
                trace.event(names.MOVED, moment.at_ns, {**moment.ids, **numbers}, event.sample)
            else:
                _ended(trace, event.sample, moment)
            return
        if event.reason is Reason.PREEMPTED or event.sample in trace.running:
            _leaves(trace, event, moment)
        told = trace.waits[event.sample].told if event.sample in trace.waits else ()
        trace.waits[event.sample] = wait = WaitingSample(event, self._heads.position, told)
        _tell(trace, wait, event, event.sample)

    def _catch_up(self, trace: RequestTrace, sample: int) -> None:
        """Note what held up the head of line since the sample's own last event; that event holds for all of its step."""
        wait = trace.waits[sample]
        own = wait.event
        not_in_step = -1 if own.reason in BETWEEN_PLANS else own.step
        for head in self._heads.since(own.queue, wait.position, not_in_step):
            if (head.request_id, head.sample) != (own.request_id, own.sample):
                _tell(trace, wait, behind(head), sample)

    # --- results and ends ---------------------------------------------------------------------------------------------

    def tokens(self, trace: RequestTrace, step: int) -> None:
        """Count a step in which the request got tokens; the first one begins its decode span."""
        if trace.name == names.DECODE:
            trace.count_step(step, is_repeat=self._moment.is_repeat)
            return
        trace.has_token = True
        if trace.name == names.PREFILL and step >= trace.planned_step:
            trace.go_on(names.DECODE, trace.close(_now_ns()), {})
            trace.seen_step = step
        else:
            trace.num_late_tokens += 1

    def ended(self, live: LiveRequest, error: QuireError | None) -> None:
        """Close the request's span with its outcome."""
        trace = live.trace
        if trace is None or trace.span is None:
            return
        for sample in trace.waits:
            self._catch_up(trace, sample)
        now_ns = _now_ns()
        trace.span.set_attribute(names.OUTPUT_TOKENS, live.output.num_tokens)
        trace.span.set_attribute(names.NUM_PREEMPTIONS, live.time.num_preemptions)
        if error is not None:
            name = names.EXPIRED if isinstance(error, DeadlineExceeded) else names.FAILED
            trace.event(name, now_ns, {names.STEP: self._moment.step, **error_numbers(error)})
            trace.fail(error)
        elif any(c.ending is not None and c.ending.reason == _CANCELLED for c in live.output.choices):
            self._cancelled(trace, live, now_ns)
        trace.close(now_ns)
        del self._traces[live.core_id]

    def _cancelled(self, trace: RequestTrace, live: LiveRequest, now_ns: int) -> None:
        """Note a cancel by the client, or by the gateway at the deadline; the remaining time tells them apart."""
        known: dict[str, Value] = {names.STEP: self._moment.step}
        if live.submission.deadline_ns is not None:
            known[names.REMAINING_MS] = (live.submission.deadline_ns - monotonic_ns()) / NS_PER_MS
        trace.event(names.CANCELLED, now_ns, known)
        trace.fail(Cancelled("", reason="CANCELLED"))


def _runs(trace: RequestTrace, event: CoreEvent, moment: PlanMoment) -> None:
    """Note that a sample runs; the first one begins a phase on a worker."""
    trace.running.add(event.sample)
    if trace.name not in (names.QUEUE, names.REQUEUED):
        return
    came_back = trace.name == names.REQUEUED
    trace.close(moment.at_ns)
    cached = int(event.numbers.get("computed_tokens", 0))
    if came_back and trace.mode == SWAP:
        trace.start(names.DECODE if trace.has_token else names.PREFILL, moment, {names.RECOMPUTES: False})
    else:
        trace.start(names.PREFILL, moment, {names.CACHED_TOKENS: cached, names.RECOMPUTES: came_back})


def _leaves(trace: RequestTrace, event: CoreEvent, moment: PlanMoment) -> None:
    """Note that a running sample was preempted or lost its worker, and waits again."""
    trace.running.discard(event.sample)
    trace.mode = str(event.numbers.get("mode", ""))
    if event.reason is Reason.PREEMPTED:
        numbers = {f"{names.PREFIX}{name}": value for name, value in event.numbers.items()}
        trace.event(names.PREEMPTED, moment.at_ns, {**moment.ids, **numbers}, event.sample)
    if trace.mode == SWAP:
        blocks = {**moment.ids, names.BLOCKS: event.numbers["blocks"]}
        trace.event(names.SWAPPED_OUT, moment.at_ns, blocks, event.sample)
    _requeue(trace, event.reason, moment)


def _ended(trace: RequestTrace, sample: int, moment: PlanMoment) -> None:
    """Note that a sample ended; if the others all wait, the request waits again."""
    trace.running.discard(sample)
    if trace.waits:
        _requeue(trace, next(iter(trace.waits.values())).event.reason, moment)


def _requeue(trace: RequestTrace, reason: Reason, moment: PlanMoment) -> None:
    """Open a requeued span if no sample of the request runs any more."""
    if trace.running or trace.name not in (names.PREFILL, names.DECODE):
        return
    at_ns = trace.close(moment.at_ns)
    trace.blocks.clear()
    why: dict[str, Value] = {names.REASON: reason.value}
    trace.open(names.REQUEUED, at_ns, {**why, names.MODE: trace.mode} if trace.mode else why)


def _tell(trace: RequestTrace, wait: WaitingSample, event: CoreEvent, sample: int) -> None:
    """Add an event for a reason to wait, with its numbers, if it differs from the last: `quire why` shows these as episodes."""
    told = (event.queue, event.reason, event.numbers.get("head_reason") if event.reason is Reason.BEHIND else None)
    if told == wait.told:
        return
    wait.told = told
    numbers = {f"{names.PREFIX}{name}": value for name, value in event.numbers.items()}
    attributes: dict[str, Value] = {names.STEP: event.step, names.WAITING_QUEUE: event.queue, **numbers}
    trace.event(event.reason.value, unix_ns(int(event.now * NS_PER_S)), attributes, sample)


def _tell_outage(trace: RequestTrace, why: str) -> None:
    trace.event(Reason.NO_WORKER.value, _now_ns(), {f"{names.PREFIX}why": why})


def _now_ns() -> int:
    return unix_ns(monotonic_ns())
