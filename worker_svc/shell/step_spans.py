"""Spans of the worker's steps, in traces of their own, with links to the requests in them.

See docs/tracing.md.

A step gets a span if it is one in `interval`, if it failed, was slow or carries a trace context, or if a
traced sequence was added or removed in it (limited per second). A span costs tens of microseconds: never one
per token. Without tracing there is no cost.
"""

import time
from collections import deque
from collections.abc import Callable

from opentelemetry.trace import Status, StatusCode

from protos.common.v1 import common_pb2
from protos.worker.v1 import worker_pb2
from svc_common import wire_arrays
from svc_common.errors import InvalidArgument
from svc_common.observability import telemetry
from svc_common.observability import trace_names as names
from svc_common.percentiles import percentiles
from svc_common.token_bucket import TokenBucket
from worker_svc.shell.sequence_spans import SequenceSpans, StepClock, StepRows

__all__ = ["StepClock", "StepSpans"]

_COMINGS_PER_S = 10
"""Limit of step spans per second because a traced sequence was added or removed; else each request would make two."""
_NUM_STEPS, _LEAST_STEPS, _NUM_FRESH = 512, 100, 64


class StepSpans:
    """Called with each step after it ran, in order, on the event loop. Owns the sequence spans. `clock`: seconds."""

    def __init__(
        self, tracing: telemetry.Telemetry, *, interval: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._tracing = tracing
        self._interval = interval
        self._sequences = SequenceSpans(tracing)
        self._slow = SlowSteps()
        self._comings = TokenBucket(_COMINGS_PER_S, _COMINGS_PER_S, clock)
        self._continues = False

    @property
    def num_open(self) -> int:
        """Traced sequences on the worker."""
        return len(self._sequences)

    def step(self, outputs: worker_pb2.SchedulerOutputs, result: worker_pb2.WorkerOutputs, times: StepClock) -> None:
        """Record a step; `result` may be an error. A refused step changed no row: it opens and closes no sequence span."""
        if not self._tracing.enabled:
            return
        cause = self._cause(outputs, result, times)
        is_repeat, self._continues = self._continues, result.continues
        changes_rows = result.error.status != InvalidArgument.status
        links: list[common_pb2.TraceContext] = []
        if changes_rows:
            removed_rows = outputs.removed_rows if self._sequences else b""
            left = self._sequences.leave(wire_arrays.unpack(removed_rows, "removed_rows"))
            if (self._sequences.open(outputs, times) or left) and not cause and not self._comings.wait_s(1):
                self._comings.take(1)
                cause = "joins_or_leaves"
            links = self._take_part(outputs, result, times, wants_links=bool(cause)) + left
        if cause:
            self._step_span(outputs, result, times, links, {names.CAUSE: cause, names.IS_REPEAT: is_repeat})

    def end_all(self, why: str) -> None:
        """Close all spans at the end of the epoch or process."""
        self._continues = False
        self._sequences.end_all(why)

    def _take_part(
        self,
        outputs: worker_pb2.SchedulerOutputs,
        result: worker_pb2.WorkerOutputs,
        times: StepClock,
        *,
        wants_links: bool,
    ) -> list[common_pb2.TraceContext]:
        """Count the step for its traced sequences. Returns their contexts if wanted."""
        if not self._sequences:
            return []
        rows = StepRows.of(outputs, result)
        self._sequences.count(outputs, result, rows, times)
        return self._sequences.traces_of(rows.computed) if wants_links else []

    def _cause(self, outputs: worker_pb2.SchedulerOutputs, result: worker_pb2.WorkerOutputs, times: StepClock) -> str:
        """Reason for a span of the step; empty if only an added or removed sequence could justify one."""
        is_slow = self._slow.observe(times.end_ns - times.start_ns)
        if result.HasField("error"):
            return "failed"
        if is_slow:
            return "slow"
        if outputs.trace.traceparent:
            return "traced"
        return "interval" if outputs.step_id % self._interval == 0 else ""

    def _step_span(
        self,
        outputs: worker_pb2.SchedulerOutputs,
        result: worker_pb2.WorkerOutputs,
        times: StepClock,
        links: list[common_pb2.TraceContext],
        about: dict[str, str | bool],
    ) -> None:
        span = self._tracing.span(
            names.WORKER_STEP,
            parent=telemetry.context_of(outputs.trace),
            attributes=about | _attributes(outputs, result),
            links=telemetry.step_links(links),
            start_ns=times.start_ns,
        )
        if result.HasField("error"):
            span.set_attribute(names.ERROR_TYPE, result.error.reason)
            span.set_status(Status(StatusCode.ERROR, result.error.message))
        span.end(times.end_ns)


class SlowSteps:
    """Detects steps slower than the 99th percentile of the last 512, computed every 64 steps; none among the first 100."""

    def __init__(self) -> None:
        self._durations: deque[int] = deque(maxlen=_NUM_STEPS)
        self._num_seen = 0
        self._limit_ns: float | None = None

    def observe(self, duration_ns: int) -> bool:
        """Record a duration. Returns True if it exceeds the limit."""
        is_slow = self._limit_ns is not None and duration_ns > self._limit_ns
        self._durations.append(duration_ns)
        self._num_seen += 1
        if self._num_seen >= _LEAST_STEPS and (self._limit_ns is None or self._num_seen % _NUM_FRESH == 0):
            self._limit_ns = percentiles(self._durations, (99,), observed=True)["p99"]
        return is_slow


def _attributes(outputs: worker_pb2.SchedulerOutputs, result: worker_pb2.WorkerOutputs) -> dict[str, int]:
    """Composition, blocks and times of a step."""
    rows, timings, pair_bytes = StepRows.of(outputs, result), result.timings, 2 * wire_arrays.I32.itemsize
    figures = {
        "rows_computed": len(set(rows.computed.tolist())),
        "rows_joined": len(rows.joined),
        "rows_changed": len(rows.changed),
        "rows_left": len(rows.left),
        "computed_tokens": result.num_computed_tokens,
        "sampled_tokens": len(result.token_ids) // wire_arrays.I32.itemsize,
        "blocks_swapped_in": len(outputs.blocks_to_swap_in) // pair_bytes,
        "blocks_swapped_out": len(outputs.blocks_to_swap_out) // pair_bytes,
        "blocks_copied": len(outputs.blocks_to_copy) // pair_bytes,
        "queued_ns": timings.queued_ns,
        "cache_ns": timings.cache_ns,
        "prepare_ns": timings.prepare_ns,
        "model_ns": timings.model_ns,
        "sample_ns": timings.sample_ns,
    }
    ids = {names.STEP_ID: outputs.step_id, names.EPOCH: outputs.epoch, names.STEP: outputs.scheduler_step}
    return ids | {f"{names.STEP_PREFIX}{name}": value for name, value in figures.items()}
