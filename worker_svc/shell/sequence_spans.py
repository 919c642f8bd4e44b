"""Spans of traced sequences: one `worker.sequence` per stay of a sequence on the worker, in the request's trace.

Per-step figures are columns over all rows, so a step costs a few array operations at any batch size. See
docs/tracing.md.
"""

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray
from opentelemetry.trace import Span

from protos.common.v1 import common_pb2
from protos.worker.v1 import worker_pb2
from svc_common import wire_arrays
from svc_common.observability import telemetry
from svc_common.observability import trace_names as names

Rows = NDArray[np.int32]
_COLUMNS = ("num_steps", "last_step_id", "last_step", "end_ns", "sampled_tokens", "blocks")


@dataclass(slots=True)
class StepClock:
    """Start and end of a step, wall clock nanoseconds."""

    start_ns: int
    end_ns: int


@dataclass(slots=True)
class StepRows:
    """Rows that a step touched, from its messages. `computed` may contain a row twice."""

    joined: Rows
    changed: Rows
    left: Rows
    computed: Rows

    @classmethod
    def of(cls, outputs: worker_pb2.SchedulerOutputs, result: worker_pb2.WorkerOutputs) -> "StepRows":
        """Rows of a step: sampling rows are named in the result, rows that only computed in the request."""
        added, changed = outputs.added, outputs.changed
        joined, altered = wire_arrays.unpack(added.rows, "added.rows"), wire_arrays.unpack(changed.rows, "changed.rows")
        computed = [
            wire_arrays.unpack(result.rows, "rows"),
            joined[wire_arrays.unpack(added.num_tokens, "added.num_tokens", length=len(joined)) > 0],
            altered[wire_arrays.unpack(changed.num_tokens, "changed.num_tokens", length=len(altered)) > 0],
        ]
        left = wire_arrays.unpack(outputs.removed_rows, "removed_rows")
        return cls(joined, altered, left, np.concatenate(computed))


@dataclass(slots=True)
class _SequenceSpan:
    """One row's open span. Step numbers are the worker's (`_id`) and the scheduler's."""

    span: Span
    trace: common_pb2.TraceContext
    first_step_id: int
    first_step: int


@dataclass(slots=True)
class _Counts:
    """Figures of every row since it was added, int64 [rows]. `end_ns`: end of the last step that computed for the row."""

    num_steps: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))
    last_step_id: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))
    last_step: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))
    end_ns: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))
    sampled_tokens: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))
    blocks: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))

    def begin(self, row: int, num_blocks: int, step_id: int, step: int, end_ns: int) -> None:
        """Start the figures of a row that a step added."""
        if row >= len(self.blocks):
            for name in _COLUMNS:
                setattr(self, name, np.concatenate([getattr(self, name), np.zeros(row + 64, np.int64)]))
        self.num_steps[row] = self.sampled_tokens[row] = 0
        self.blocks[row], self.end_ns[row] = num_blocks, end_ns
        self.last_step_id[row], self.last_step[row] = step_id, step

    def known(self, rows: Rows) -> NDArray[np.bool_]:
        """True for rows inside the columns."""
        return rows < len(self.blocks)


class SequenceSpans:
    """Owner of the open `worker.sequence` spans, by row."""

    def __init__(self, tracing: telemetry.Telemetry) -> None:
        self._tracing = tracing
        self._sequences: dict[int, _SequenceSpan] = {}
        self._counts = _Counts()

    def __len__(self) -> int:
        return len(self._sequences)

    def open(self, outputs: worker_pb2.SchedulerOutputs, times: StepClock) -> bool:
        """Open spans for added traced sequences. Returns True if there are any."""
        sampled = [i for i, trace in enumerate(outputs.added.traces) if telemetry.is_sampled(trace)]
        if not sampled:
            return False
        added = outputs.added
        rows = wire_arrays.unpack(added.rows, "added.rows")
        figures = {
            names.ROW: rows,
            names.INCARNATION: wire_arrays.unpack(added.incarnations, "added.incarnations"),
            names.PROMPT_TOKENS: wire_arrays.unpack(added.num_prompt_tokens, "added.num_prompt_tokens"),
            names.CACHED_TOKENS: wire_arrays.unpack(added.num_computed_tokens, "added.num_computed_tokens"),
        }
        num_blocks = wire_arrays.unpack(added.num_blocks, "added.num_blocks")
        for i in sampled:
            own = {name: int(column[i]) for name, column in figures.items()}
            own_names = {names.SEQUENCE_NAME: added.names[i], names.EPOCH: outputs.epoch}
            if self._begin(int(rows[i]), added.traces[i], own_names | own, outputs, times):
                step = outputs.step_id, outputs.scheduler_step
                self._counts.begin(int(rows[i]), int(num_blocks[i]), *step, times.end_ns)
        return True

    def _begin(
        self,
        row: int,
        trace: common_pb2.TraceContext,
        attributes: dict[str, int | str],
        outputs: worker_pb2.SchedulerOutputs,
        times: StepClock,
    ) -> bool:
        parent = telemetry.context_of(trace)
        if parent is None:
            return False
        self._close(row)
        span = self._tracing.span(names.SEQUENCE, parent=parent, attributes=attributes, start_ns=times.start_ns)
        if span.is_recording():
            self._sequences[row] = _SequenceSpan(span, trace, outputs.step_id, outputs.scheduler_step)
        return span.is_recording()

    def count(
        self,
        outputs: worker_pb2.SchedulerOutputs,
        result: worker_pb2.WorkerOutputs,
        rows: StepRows,
        times: StepClock,
    ) -> None:
        """Add a step to the figures of its rows."""
        counts = self._counts
        computed = rows.computed[counts.known(rows.computed)]
        counts.num_steps[computed] += 1  # once, even if a row appears twice
        counts.last_step_id[computed], counts.last_step[computed] = outputs.step_id, outputs.scheduler_step
        counts.end_ns[computed] = times.end_ns
        sampled = wire_arrays.unpack(result.rows, "rows")
        known = counts.known(sampled)
        np.add.at(counts.sampled_tokens, sampled[known], wire_arrays.unpack(result.num_tokens, "num_tokens")[known])
        if len(rows.changed):
            known = counts.known(rows.changed)
            new_blocks = wire_arrays.unpack(outputs.changed.num_new_blocks, "changed.num_new_blocks")
            counts.blocks[rows.changed[known]] += new_blocks[known]

    def leave(self, rows: Rows) -> list[common_pb2.TraceContext]:
        """Close the spans of removed rows. Returns the contexts of the spans that ended."""
        return [trace for row in rows.tolist() if (trace := self._close(row)) is not None]

    def traces_of(self, rows: Rows) -> list[common_pb2.TraceContext]:
        """Trace contexts of those of `rows` with an open span."""
        found = (self._sequences.get(row) for row in sorted(set(rows.tolist())))
        return [sequence.trace for sequence in found if sequence is not None]

    def end_all(self, why: str) -> None:
        """Close all spans at the end of the epoch or process."""
        for row in list(self._sequences):
            self._sequences[row].span.set_attribute(names.ENDED_BY, why)
            self._close(row)

    def _close(self, row: int) -> common_pb2.TraceContext | None:
        sequence = self._sequences.pop(row, None)
        if sequence is None:
            return None
        counts = self._counts
        sequence.span.set_attributes(
            {
                names.FIRST_STEP: sequence.first_step,
                names.LAST_STEP: int(counts.last_step[row]),
                names.FIRST_STEP_ID: sequence.first_step_id,
                names.LAST_STEP_ID: int(counts.last_step_id[row]),
                names.NUM_STEPS: int(counts.num_steps[row]),
                names.SAMPLED_TOKENS: int(counts.sampled_tokens[row]),
                names.BLOCKS_MAX: int(counts.blocks[row]),
            }
        )
        sequence.span.end(int(counts.end_ns[row]))
        return sequence.trace
