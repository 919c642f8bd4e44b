"""Event counters: completed steps, and requests as they start, are preempted and end."""

from prometheus_client import CollectorRegistry, Counter

from protos.common.v1 import common_pb2
from scheduler_svc.core.parts.preemption import RECOMPUTE, SWAP
from scheduler_svc.core.plan import StepPlan
from scheduler_svc.observe.metrics import definitions as d
from scheduler_svc.observe.step_observer import StepObserver
from scheduler_svc.observe.step_record import StepOrigin, StepRecord
from scheduler_svc.requests.listener import RequestListener
from scheduler_svc.requests.live_request import LiveRequest
from svc_common.clock import NS_PER_S
from svc_common.errors import QuireError
from svc_common.observability.metrics import exemplar_of
from svc_common.reasons import known_reason

_UNSPECIFIED = common_pb2.FINISH_REASON_UNSPECIFIED


class StepCounts(StepObserver):
    """Counts steps. `sums`: its counters that the statistics line uses."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._steps = d.STEPS.counter(registry)
        self._duration = d.STEP_DURATION.histogram(registry)
        self._schedule = d.SCHEDULE_DURATION.histogram(registry)
        tokens = d.STEP_TOKENS.counter(registry)
        self._prefill, self._decode = tokens.labels("prefill"), tokens.labels("decode")
        self._prompt_steps = d.PROMPT_STEPS.counter(registry)
        self._repeated = d.REPEATED_STEPS.counter(registry)
        self._revoked = d.REVOKED_GRANTS.counter(registry)
        self._output = d.OUTPUT_TOKENS.counter(registry)
        swapped = d.SWAPPED_BLOCKS.counter(registry)
        self._moves: dict[str, Counter] = {
            "swap_in": swapped.labels("in"),
            "swap_out": swapped.labels("out"),
            "copy": d.COPIED_BLOCKS.counter(registry),
        }
        self._moved_groups = d.MOVED_GROUPS.counter(registry)
        self._failed = d.FAILED_STEPS.counter(registry)
        self.sums = (self._steps, tokens, self._prompt_steps, self._output, self._failed)
        self._counted: tuple[object, tuple[int, int]] = (None, (0, 0))

    def on_plan(self, plan: StepPlan, origin: StepOrigin) -> None:
        """Count groups that moved, and a revocation, before the plan."""
        if plan.placed:
            self._moved_groups.inc(len(plan.placed))
        if plan.revoked is not None:
            self._revoked.labels(plan.revoked).inc()

    def on_end(self, record: StepRecord) -> None:
        """Count a completed step."""
        self._steps.inc()
        if record.plan.is_repeat:
            self._repeated.inc()
        self._schedule.observe(record.origin.schedule_ns / NS_PER_S)
        num_prefill, num_decode = self._num_tokens(record)
        if num_prefill:
            self._prompt_steps.inc()
            self._prefill.inc(num_prefill)
        if num_decode:
            self._decode.inc(num_decode)
        self._output.inc(record.num_sampled)
        for name, counter in self._moves.items():
            if pairs := getattr(record.plan, name):
                counter.inc(len(pairs))
        if record.failure:
            self._failed.labels(record.failure).inc()
        if not record.error:
            self._duration.observe(record.duration_ns / NS_PER_S)

    def _num_tokens(self, record: StepRecord) -> tuple[int, int]:
        """Prefill and decode tokens. Fast decode steps share their columns, so the last result is reused."""
        shape = record.plan.shape
        if self._counted[0] is not shape:
            self._counted = shape, shape.token_counts
        return self._counted[1]


class RequestCounts(RequestListener):
    """Counts requests. `sums`: its counters that the statistics line uses."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._queue_time = d.QUEUE_TIME.histogram(registry)
        self._queried = d.QUERIED_TOKENS.counter(registry)
        self._hit = d.HIT_TOKENS.counter(registry)
        self._preemptions = d.PREEMPTIONS.counter(registry)
        for mode in (RECOMPUTE, SWAP):
            self._preemptions.labels(mode)
        self._refused = d.REFUSED.counter(registry)
        self._ended = d.ENDED.counter(registry)
        self.sums = (self._queried, self._hit, self._preemptions, self._refused, self._ended)

    def started(self, live: LiveRequest) -> None:
        """Count a request's queue time and prefix cache hits."""
        time = live.time
        if time.first_scheduled_ns is not None:
            queued_s = (time.first_scheduled_ns - time.arrival_ns) / NS_PER_S
            span = None if live.trace is None else live.trace.span
            self._queue_time.observe(queued_s, None if span is None else exemplar_of(span))
        self._queried.inc(len(live.submission.prompt))
        self._hit.inc(live.cached_prompt_tokens)

    def preempted(self, mode: str) -> None:
        """Count a preemption."""
        self._preemptions.labels(mode).inc()

    def ended(self, live: LiveRequest, error: QuireError | None) -> None:
        """Count a request's end by status and reason."""
        self._ended.labels(*_end(live, error)).inc()

    def refused(self, error: QuireError) -> None:
        """Count a refusal by reason."""
        self._refused.labels(known_reason(error.reason)).inc()


def _end(live: LiveRequest, error: QuireError | None) -> tuple[str, str]:
    """Status and reason."""
    if error is not None:
        return error.status, known_reason(error.reason)
    reason = next((choice.ending.reason for choice in live.output.choices if choice.ending is not None), _UNSPECIFIED)
    status = "CANCELLED" if reason == common_pb2.FINISH_REASON_CANCELLED else "OK"
    return status, common_pb2.FinishReason.Name(reason).removeprefix("FINISH_REASON_")
