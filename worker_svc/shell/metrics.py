"""Metrics of one worker, updated on the event loop as results are sent. See metric_definitions."""

from collections.abc import Callable

from prometheus_client import CollectorRegistry

from protos.worker.v1 import worker_pb2
from svc_common import wire_arrays
from svc_common.clock import NS_PER_S
from svc_common.errors import InvalidArgument
from svc_common.reasons import known_reason
from worker_svc.shell import metric_definitions as d

_ROW_BYTES = wire_arrays.I32.itemsize
_PAIR_BYTES = 2 * _ROW_BYTES


class StepMeter:
    """Counts each step once, in order, when its result is known. `is_ready()`: True if steps can run."""

    def __init__(self, registry: CollectorRegistry, is_ready: Callable[[], bool]) -> None:
        d.READY.gauge(registry).set_function(is_ready)
        seconds, tokens, moved = (
            d.STEP_SECONDS.histogram(registry),
            d.TOKENS.counter(registry),
            d.MOVED.counter(registry),
        )
        self._steps = d.STEPS.counter(registry)
        self._parts = [(f"{part}_ns", seconds.labels(part)) for part in d.PARTS]
        self._mask_seconds = d.MASK_SECONDS.histogram(registry)
        self._rows = d.ROWS.gauge(registry)
        self._computed, self._sampled = tokens.labels("computed"), tokens.labels("sampled")
        self._moves = [(f"blocks_to_{kind}", moved.labels(kind)) for kind in ("swap_in", "swap_out", "copy")]
        self._not_finite = d.NOT_FINITE_ROWS.counter(registry)
        self._failed = d.FAILED_STEPS.counter(registry)

    def begin_epoch(self) -> None:
        """Reset the number of rows for a new epoch."""
        self._rows.set(0)

    def step(self, outputs: worker_pb2.SchedulerOutputs, result: worker_pb2.WorkerOutputs) -> None:
        """Count a step that ran or failed."""
        failed = result.HasField("error")
        if not failed or result.error.status != InvalidArgument.status:
            self._rows.inc((len(outputs.added.rows) - len(outputs.removed_rows)) // _ROW_BYTES)
        if failed:
            self._failed.labels(known_reason(result.error.reason)).inc()
            return
        self._steps.inc()
        timings = result.timings
        for name, seconds in self._parts:
            seconds.observe(getattr(timings, name) / NS_PER_S)
        if timings.mask_ns:
            self._mask_seconds.observe(timings.mask_ns / NS_PER_S)
        self._computed.inc(result.num_computed_tokens)
        self._sampled.inc(len(result.token_ids) // _ROW_BYTES)
        for name, counter in self._moves:
            if pairs := getattr(outputs, name):
                counter.inc(len(pairs) // _PAIR_BYTES)
        if result.flags.count(0) < len(result.flags):
            self._not_finite.inc(sum(bool(flag & worker_pb2.ROW_FLAG_NOT_FINITE) for flag in result.flags))
