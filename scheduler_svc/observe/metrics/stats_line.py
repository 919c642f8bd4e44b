"""One log line every few seconds: the current state, and what was done since the last line.

Its numbers are those of /metrics: current gauges and differences of counters. No line is logged while nothing
happens.
"""

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence

from block_manager.pool import PoolCounts
from scheduler_svc.observe.metrics import definitions as d
from scheduler_svc.observe.metrics.reading import Readings
from scheduler_svc.observe.step_observer import StepObserver
from scheduler_svc.observe.step_record import StepRecord
from svc_common.clock import NS_PER_S
from svc_common.observability.log_format import STATS_LOGGER
from svc_common.observability.metrics import MetricSpec, Sums
from svc_common.percentiles import percentiles

log = logging.getLogger(STATS_LOGGER)

NS_PER_MS = NS_PER_S // 1_000


class StatsLine(StepObserver):
    """Observes step durations. `sums()`: all counters' values. `clock`: monotonic ns."""

    def __init__(self, readings: Readings, sums: Callable[[], Sums], clock: Callable[[], int]) -> None:
        self._readings = readings
        self._sums = sums
        self._clock = clock
        self._durations_ns: list[int] = []
        self._since_ns = clock()
        self._before = sums()
        self._queues = (0, 0, 0)

    def on_end(self, record: StepRecord) -> None:
        """Add the duration of a completed step."""
        if not record.error:
            self._durations_ns.append(record.duration_ns)

    async def run(self, interval_s: float) -> None:
        """Log a line every `interval_s` seconds until cancelled; 0 = never."""
        if not interval_s:
            await asyncio.Event().wait()
        while True:
            await asyncio.sleep(interval_s)
            try:
                line = self.next()
            except Exception:
                log.exception("no statistics this time")
                continue
            if line:
                log.info("%s", line)

    def next(self) -> str:
        """The line for the time since the last call; empty if nothing happened."""
        now_ns, sums, queues = self._clock(), self._sums(), self._readings.queues
        since = Since(self._before, sums, (now_ns - self._since_ns) / NS_PER_S)
        durations_ns, self._durations_ns = self._durations_ns, []
        is_news = sums != self._before or queues != self._queues
        self._since_ns, self._before, self._queues = now_ns, sums, queues
        if not is_news:
            return ""
        waiting, running, swapped = queues
        gpu, cpu = self._readings.pools
        return "; ".join(
            [
                f"{running} running, {waiting} waiting, {swapped} swapped",
                f"blocks {_usage(gpu)} gpu, {_usage(cpu)} cpu",
                f"prompt {since.per_s(d.STEP_TOKENS, 'prefill'):.1f} tokens/s, output {since.per_s(d.OUTPUT_TOKENS):.1f} tokens/s",
                f"prefix hits {_percent(since.of(d.HIT_TOKENS), since.of(d.QUERIED_TOKENS))}",
                f"{since.of(d.PREEMPTIONS):.0f} preempted",
                f"{since.of(d.STEPS):.0f} steps, {since.of(d.PROMPT_STEPS):.0f} with prompts, "
                f"{since.of(d.STEP_TOKENS):.0f} tokens, {_times(durations_ns)}",
                *([f"{failed:.0f} FAILED"] if (failed := since.of(d.FAILED_STEPS)) else []),
            ]
        )


class Since:
    """Differences of counters between two moments, `seconds` apart."""

    def __init__(self, before: Sums, now: Sums, seconds: float) -> None:
        self._before, self._now = before, now
        self._seconds = max(seconds, 1e-9)

    def of(self, spec: MetricSpec, *labels: str) -> float:
        """Increase of a counter, summed over the series with labels that begin with `labels`."""
        return _sum(self._now, spec, labels) - _sum(self._before, spec, labels)

    def per_s(self, spec: MetricSpec, *labels: str) -> float:
        """Increase per second."""
        return self.of(spec, *labels) / self._seconds


def _sum(sums: Mapping[str, Mapping[tuple[str, ...], float]], spec: MetricSpec, labels: tuple[str, ...]) -> float:
    series = sums.get(spec.name, {})
    return sum(value for given, value in series.items() if given[: len(labels)] == labels)


def _usage(pool: PoolCounts) -> str:
    return f"{_percent(pool.total - pool.free, pool.total)} of {pool.total}"


def _percent(part: float, whole: float) -> str:
    return f"{100 * part / whole:.1f} %" if whole else "-"


def _times(durations_ns: Sequence[int]) -> str:
    if not durations_ns:
        return "p50 -, p99 -"
    return ", ".join(f"{name} {value / NS_PER_MS:.2f} ms" for name, value in percentiles(durations_ns).items())
