"""Assembly of the scheduler's metrics: the registry, counters, gauges and the statistics line."""

import asyncio
import logging
import time
from collections.abc import Callable

from scheduler_svc.observe.metrics import definitions as d
from scheduler_svc.observe.metrics.counting import RequestCounts, StepCounts
from scheduler_svc.observe.metrics.failed_steps import FailedSteps
from scheduler_svc.observe.metrics.reading import Readings, Watched
from scheduler_svc.observe.metrics.stats_line import StatsLine
from scheduler_svc.observe.recording.tape import Tape
from scheduler_svc.observe.step_log import StepLog, StepRecord
from svc_common.clock import monotonic_ns
from svc_common.metrics import DroppedSpans, OnLoop, Sums, new_registry, sums_of
from svc_common.telemetry import Telemetry

log = logging.getLogger(__name__)


class SchedulerMetrics:
    """Owner of the registry. Must be constructed inside the event loop, before the first step."""

    def __init__(
        self, watched: Watched, step_log: StepLog, tape: Tape, tracing: Telemetry, admin_address: Callable[[], str]
    ) -> None:
        readiness = watched.readiness
        self.registry = new_registry(d.METRICS, lambda: readiness.limits.model if readiness.limits else "")
        self._steps, self._requests = StepCounts(self.registry), RequestCounts(self.registry)
        readings = Readings(watched)
        self.registry.register(OnLoop(asyncio.get_running_loop(), d.READ, readings.read))
        self.registry.register(DroppedSpans(tracing))
        step_log.listen(_harmless(self._steps.step))
        step_log.listen(_harmless(FailedSteps(tape, admin_address, time.monotonic).step))
        watched.book.listen(self._requests)
        self._readings, self._log = readings, step_log

    def _sums(self) -> Sums:
        return sums_of([*self._steps.sums, *self._requests.sums])

    async def tell(self, interval_s: float) -> None:
        """Log the statistics line every `interval_s` seconds until cancelled; 0 = never."""
        if not interval_s:
            await asyncio.Event().wait()
        line = StatsLine(self._readings, self._sums, monotonic_ns)
        self._log.listen(line.step)
        await line.run(interval_s)


def _harmless(tell: Callable[[StepRecord], None]) -> Callable[[StepRecord], None]:
    """Wrap a listener so that its errors are logged and never fail a step."""

    def told(record: StepRecord) -> None:
        try:
            tell(record)
        except Exception:
            log.exception("step %d is not told", record.step)

    return told
