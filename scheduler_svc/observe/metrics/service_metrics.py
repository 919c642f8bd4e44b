"""Assembly of the scheduler's metrics: the registry, counters, gauges and the statistics line."""

import asyncio

from scheduler_svc.observe.metrics import definitions as d
from scheduler_svc.observe.metrics.counting import RequestCounts, StepCounts
from scheduler_svc.observe.metrics.reading import Readings, Watched
from scheduler_svc.observe.metrics.stats_line import StatsLine
from svc_common.clock import monotonic_ns
from svc_common.observability.metrics import DroppedSpans, OnLoop, Sums, new_registry, sums_of
from svc_common.observability.telemetry import Telemetry


class SchedulerMetrics:
    """Owner of the registry. Must be constructed inside the event loop, before the first step.

    `steps` and `stats_line` are observers of steps.
    """

    def __init__(self, watched: Watched, tracing: Telemetry) -> None:
        readiness = watched.readiness
        self.registry = new_registry(d.METRICS, lambda: readiness.limits.model if readiness.limits else "")
        self.steps, self._requests = StepCounts(self.registry), RequestCounts(self.registry)
        readings = Readings(watched)
        self.registry.register(OnLoop(asyncio.get_running_loop(), d.READ, readings.read))
        self.registry.register(DroppedSpans(tracing))
        watched.book.listen(self._requests)
        self.stats_line = StatsLine(readings, self.sums, monotonic_ns)

    def sums(self) -> Sums:
        """Values of the counters, by name."""
        return sums_of([*self.steps.sums, *self._requests.sums])
