"""Spans of the worker (design.md 9): `worker.step` in traces of their own, `worker.sequence` in the requests' traces.

Which steps get a span: one in `interval`; every step that failed, that carries a trace context itself, or in which a traced
sequence joins or leaves, so that both ends of a request's stay are explained. A span costs tens of microseconds: never one per
token. Nothing here costs anything while traces are off.
"""

from dataclasses import dataclass, field

from opentelemetry.trace import Span, Status, StatusCode

from protos.common.v1 import common_pb2
from protos.worker.v1 import worker_pb2
from svc_common import columns, telemetry
from svc_common.errors import InvalidArgument


@dataclass(slots=True)
class _Visit:
    """A traced sequence's stay: its span, open until the row is removed."""

    span: Span
    trace: common_pb2.TraceContext
    first_step_id: int
    last_step_id: int
    num_steps: int = 0
    num_sampled_tokens: int = 0


@dataclass(slots=True)
class StepTimes:
    """When a step ran, wall clock nanoseconds."""

    start_ns: int
    end_ns: int


@dataclass(slots=True)
class _Composition:
    """Which rows a step touched, as far as messages tell."""

    joined: list[int] = field(default_factory=list)
    changed: list[int] = field(default_factory=list)
    left: list[int] = field(default_factory=list)
    computed: set[int] = field(default_factory=set)


class StepSpans:
    """Owner of the open `worker.sequence` spans. Told of each step after it ran, in order; called from the event loop."""

    def __init__(self, tracing: telemetry.Telemetry, *, interval: int) -> None:
        self._tracing = tracing
        self._interval = interval
        self._visits: dict[int, _Visit] = {}

    @property
    def num_open(self) -> int:
        """Traced sequences on the worker."""
        return len(self._visits)

    def step(self, outputs: worker_pb2.SchedulerOutputs, result: worker_pb2.WorkerOutputs, times: StepTimes) -> None:
        """One step ran; `result` may be its error. A step that was refused changed no row: it opens and closes no visit."""
        if not self._tracing.enabled:
            return
        if result.error.status == InvalidArgument.status:
            self._step_span(outputs, result, times, _Composition(), [])
            return
        rows = _composition(outputs, result)
        left = [visit for row in rows.left if (visit := self._close(row, times.end_ns)) is not None]
        self._open(outputs, times)
        here = [visit for row in sorted(rows.computed) if (visit := self._visits.get(row)) is not None]
        self._count(here, outputs.step_id, result)
        joined = any(row in self._visits for row in rows.joined)
        if self._is_wanted(outputs) or result.HasField("error") or joined or left:
            self._step_span(outputs, result, times, rows, here + left)

    def end_all(self, why: str) -> None:
        """Ends what is open: the epoch is over, or the process."""
        for visit in self._visits.values():
            visit.span.set_attribute("quire.ended_by", why)
            _end(visit, None)
        self._visits.clear()

    # --- sequences ---------------------------------------------------------------------------------------------------

    def _open(self, outputs: worker_pb2.SchedulerOutputs, times: StepTimes) -> None:
        added = outputs.added
        if not added.traces:
            return
        rows = columns.unpack(added.rows, "added.rows").tolist()
        lives = columns.unpack(added.incarnations, "added.incarnations").tolist()
        prompts = columns.unpack(added.num_prompt_tokens, "added.num_prompt_tokens").tolist()
        cached = columns.unpack(added.num_computed_tokens, "added.num_computed_tokens").tolist()
        for i, row in enumerate(rows):
            parent = telemetry.context_of(added.traces[i])
            if parent is None:
                continue
            attributes = {
                "quire.sequence": added.names[i],
                "quire.row": row,
                "quire.incarnation": lives[i],
                "quire.epoch": outputs.epoch,
                "quire.prompt_tokens": prompts[i],
                "quire.cached_tokens": cached[i],
            }
            span = self._tracing.span("worker.sequence", parent=parent, attributes=attributes, start_ns=times.start_ns)
            self._close(row, times.start_ns)
            if span.is_recording():
                self._visits[row] = _Visit(span, added.traces[i], outputs.step_id, outputs.step_id)

    def _close(self, row: int, end_ns: int) -> _Visit | None:
        visit = self._visits.pop(row, None)
        if visit is not None:
            _end(visit, end_ns)
        return visit

    def _count(self, here: list[_Visit], step_id: int, result: worker_pb2.WorkerOutputs) -> None:
        for visit in here:
            visit.num_steps += 1
            visit.last_step_id = step_id
        if not here:
            return
        rows, counts = columns.unpack(result.rows, "rows"), columns.unpack(result.num_tokens, "num_tokens")
        for row, count in zip(rows.tolist(), counts.tolist(), strict=True):
            if row in self._visits:
                self._visits[row].num_sampled_tokens += count

    # --- steps -------------------------------------------------------------------------------------------------------

    def _is_wanted(self, outputs: worker_pb2.SchedulerOutputs) -> bool:
        return outputs.step_id % self._interval == 0 or bool(outputs.trace.traceparent)

    def _step_span(
        self,
        outputs: worker_pb2.SchedulerOutputs,
        result: worker_pb2.WorkerOutputs,
        times: StepTimes,
        rows: _Composition,
        visits: list[_Visit],
    ) -> None:
        span = self._tracing.span(
            "worker.step",
            parent=telemetry.context_of(outputs.trace),
            attributes=_step_attributes(outputs, result, rows),
            links=telemetry.step_links([visit.trace for visit in visits]),
            start_ns=times.start_ns,
        )
        if result.HasField("error"):
            span.set_attribute("error.type", result.error.reason)
            span.set_status(Status(StatusCode.ERROR, result.error.message))
        span.end(times.end_ns)


def _end(visit: _Visit, end_ns: int | None) -> None:
    visit.span.set_attributes(
        {
            "quire.first_step_id": visit.first_step_id,
            "quire.last_step_id": visit.last_step_id,
            "quire.steps": visit.num_steps,
            "quire.sampled_tokens": visit.num_sampled_tokens,
        }
    )
    visit.span.end(end_ns)


def _composition(outputs: worker_pb2.SchedulerOutputs, result: worker_pb2.WorkerOutputs) -> _Composition:
    rows = _Composition(
        joined=columns.unpack(outputs.added.rows, "added.rows").tolist(),
        changed=columns.unpack(outputs.changed.rows, "changed.rows").tolist(),
        left=columns.unpack(outputs.removed_rows, "removed_rows").tolist(),
    )
    rows.computed.update(columns.unpack(result.rows, "rows").tolist())
    for mentioned, num_tokens in ((rows.joined, outputs.added.num_tokens), (rows.changed, outputs.changed.num_tokens)):
        counts = columns.unpack(num_tokens, "num_tokens").tolist()
        rows.computed.update(row for row, count in zip(mentioned, counts, strict=True) if count)
    return rows


def _step_attributes(
    outputs: worker_pb2.SchedulerOutputs, result: worker_pb2.WorkerOutputs, rows: _Composition
) -> dict[str, int]:
    timings = result.timings
    pair_bytes = 2 * columns.I32.itemsize
    return {
        "quire.step_id": outputs.step_id,
        "quire.epoch": outputs.epoch,
        "quire.scheduler_step": outputs.scheduler_step,
        "quire.step.rows_computed": len(rows.computed),
        "quire.step.rows_joined": len(rows.joined),
        "quire.step.rows_changed": len(rows.changed),
        "quire.step.rows_left": len(rows.left),
        "quire.step.computed_tokens": result.num_computed_tokens,
        "quire.step.sampled_tokens": len(result.token_ids) // columns.I32.itemsize,
        "quire.step.blocks_swapped_in": len(outputs.blocks_to_swap_in) // pair_bytes,
        "quire.step.blocks_swapped_out": len(outputs.blocks_to_swap_out) // pair_bytes,
        "quire.step.blocks_copied": len(outputs.blocks_to_copy) // pair_bytes,
        "quire.step.queued_ns": timings.queued_ns,
        "quire.step.cache_ns": timings.cache_ns,
        "quire.step.prepare_ns": timings.prepare_ns,
        "quire.step.model_ns": timings.model_ns,
        "quire.step.sample_ns": timings.sample_ns,
    }
