"""Metric definitions: name, kind, unit, labels and formula in one place. docs/metrics.md is generated from them.

Prometheus' client counts and writes; each service has one registry, made in its composition root. Values
owned by a service's event loop are read there on each scrape (`OnLoop`), so that nothing is stored twice.
Names follow Prometheus' rules: base units, `_total` for counters, labels with few values each.
"""

import asyncio
import enum
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from opentelemetry.trace import Span, format_span_id, format_trace_id
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector, disable_created_metrics
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric

from svc_common.observability.telemetry import Telemetry

READ_TIMEOUT_S = 5.0
MODEL_NAME = "model_name"
Values = Mapping[tuple[str, ...], float]
"""Values of one metric, keyed by label values in the order of its labels."""
Sums = Mapping[str, Values]
"""Current counter values, by metric name."""


class Kind(enum.StrEnum):
    """Prometheus' metric kinds."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MetricSpec:
    """One metric. `text`: a sentence that says what it is; `formula`: what is counted when, or what its value is.

    `unit`: "seconds", "tokens", ...; "1" = a number without one. `labels`: the values of each label, for
    people. `of_model`: it also has the label `model_name`. `buckets`: upper bounds, for histograms. `serves`:
    the requirements that ask for it, or its purpose. `query`: sample PromQL.
    """

    name: str
    kind: Kind
    unit: str
    text: str
    formula: str
    serves: str
    query: str
    labels: Mapping[str, str] = field(default_factory=dict)
    buckets: tuple[float, ...] = ()
    of_model: bool = False

    def counter(self, registry: CollectorRegistry) -> Counter:
        """Make it as a counter."""
        return Counter(self.name, self.text, tuple(self.labels), registry=registry)

    def gauge(self, registry: CollectorRegistry) -> Gauge:
        """Make it as a gauge, set directly or by a function."""
        return Gauge(self.name, self.text, tuple(self.labels), registry=registry)

    def histogram(self, registry: CollectorRegistry) -> Histogram:
        """Make it as a histogram."""
        return Histogram(self.name, self.text, tuple(self.labels), buckets=self.buckets, registry=registry)

    def family(self, values: Values) -> Metric:
        """Make a counter or gauge family with values read just now."""
        make = CounterMetricFamily if self.kind is Kind.COUNTER else GaugeMetricFamily
        family = make(self.name, self.text, labels=tuple(self.labels))
        for labels, value in values.items():
            family.add_metric(labels, value)
        return family


def seconds_from(least: float, count: int) -> tuple[float, ...]:
    """Bucket bounds, each about 1.5 times the one before: `least` times 1, 1.6, 2.4, 4, 6, 10, 16, ..."""
    steps = (1.0, 1.6, 2.4, 4.0, 6.0)
    return tuple(float(f"{least * steps[i % 5] * 10 ** (i // 5):.3g}") for i in range(count))


class _ModelRegistry(CollectorRegistry):
    """Registry that adds the label `model_name`, the model served at scrape time, to metrics about the model."""

    def __init__(self, specs: Iterable[MetricSpec], model: Callable[[], str]) -> None:
        super().__init__()
        self._of_model = frozenset(spec.name.removesuffix("_total") for spec in specs if spec.of_model)
        self._model = model

    def collect(self) -> Iterator[Metric]:
        """Collect all metrics."""
        label = {MODEL_NAME: self._model()}
        for metric in super().collect():
            if metric.name in self._of_model:
                metric.samples = [sample._replace(labels={**sample.labels, **label}) for sample in metric.samples]
            yield metric


def new_registry(specs: Iterable[MetricSpec] = (), model: Callable[[], str] = lambda: "") -> CollectorRegistry:
    """Return an empty registry with the process metrics of the operating system.

    `model()`: name of the served model, the label of those of `specs` that are about it. The library's
    `_created` series are off: they double what is scraped, and Prometheus detects resets by itself.
    """
    disable_created_metrics()  # type: ignore[no-untyped-call]
    registry = _ModelRegistry(specs, model)
    ProcessCollector(registry=registry)
    return registry


def exemplar_of(span: Span) -> dict[str, str] | None:
    """Exemplar labels (trace and span id) for OpenMetrics; None if the span is not recorded."""
    if not span.is_recording():
        return None
    context = span.get_span_context()
    return {"trace_id": format_trace_id(context.trace_id), "span_id": format_span_id(context.span_id)}


def sums_of(metrics: Iterable[Counter]) -> Sums:
    """Return the current values of these counters."""
    families = [family for metric in metrics for family in metric.collect()]
    return {
        f"{family.name}_total": {tuple(sample.labels.values()): sample.value for sample in family.samples}
        for family in families
    }


class OnLoop:
    """Collector that reads metrics on the event loop that owns them; called from other threads.

    `read()` may yield to the loop between two parts of its work. `collect` raises TimeoutError if the loop
    does not answer within 5 s, and RuntimeError if it has ended.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        specs: Sequence[MetricSpec],
        read: Callable[[], Coroutine[None, None, Mapping[MetricSpec, Values]]],
    ) -> None:
        self._loop = loop
        self._specs = specs
        self._read = read

    def describe(self) -> Iterable[Metric]:
        """Metrics without values."""
        return [spec.family({}) for spec in self._specs]

    def collect(self) -> Iterable[Metric]:
        """Metrics with their current values."""
        values = self._values()
        return [spec.family(values.get(spec, {})) for spec in self._specs]

    def _values(self) -> Mapping[MetricSpec, Values]:
        reading = self._read()
        try:
            asked = asyncio.run_coroutine_threadsafe(reading, self._loop)
        except RuntimeError:
            reading.close()
            raise
        try:
            return asked.result(READ_TIMEOUT_S)
        finally:
            asked.cancel()


DROPPED_SPANS = MetricSpec(
    name="quire_telemetry_dropped_spans_total",
    kind=Kind.COUNTER,
    unit="spans",
    text="Spans that did not reach the collector.",
    formula="Spans dropped because the exporter's queue was full, and spans of failed exports. 0 when traces go to no collector.",
    serves="traces: a failed collector",
    query="rate(quire_telemetry_dropped_spans_total[5m]) > 0",
)


class DroppedSpans:
    """Collector of the number of spans dropped by this process's tracer."""

    def __init__(self, tracing: Telemetry) -> None:
        self._tracing = tracing

    def describe(self) -> Iterable[Metric]:
        """The metric without a value."""
        return [DROPPED_SPANS.family({})]

    def collect(self) -> Iterable[Metric]:
        """The metric with its current value."""
        return [DROPPED_SPANS.family({(): self._tracing.num_dropped_spans})]
