"""Metrics as they are defined: name, kind, unit, labels, and what is counted when, in one place. docs/metrics.md is made from that.

Prometheus' client counts and writes; every service has one registry, made in its composition root. What a service's event loop owns
is read there when somebody asks (`OnLoop`), so that nothing is kept twice. Names follow Prometheus' rules: base units, `_total` for
what only grows, labels of few values each.
"""

import asyncio
import enum
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from opentelemetry.trace import Span, format_span_id, format_trace_id
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector, disable_created_metrics
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric

from svc_common.telemetry import Telemetry

READ_TIMEOUT_S = 5.0
MODEL_NAME = "model_name"
Values = Mapping[tuple[str, ...], float]
"""Of one metric: label values, in the order of its labels, to its value."""
Sums = Mapping[str, Values]
"""Counters as they stand, by name."""


class Kind(enum.StrEnum):
    """Prometheus' kinds."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MetricSpec:
    """One metric. `text`: what it is, in a sentence; `formula`: what is counted when, or what it is the value of.

    `unit`: of its values, "seconds", "tokens", ...; "1" = a number without one. `labels`: the values of each, for people.
    `of_model`: it has the label `model_name` too. `buckets`: upper bounds, of histograms. `serves`: the requirements that ask for
    it, else what it is for. `query`: some PromQL.
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
        """One that is counted."""
        return Counter(self.name, self.text, tuple(self.labels), registry=registry)

    def gauge(self, registry: CollectorRegistry) -> Gauge:
        """One that is set, or that has a function."""
        return Gauge(self.name, self.text, tuple(self.labels), registry=registry)

    def histogram(self, registry: CollectorRegistry) -> Histogram:
        """One that observes."""
        return Histogram(self.name, self.text, tuple(self.labels), buckets=self.buckets, registry=registry)

    def family(self, values: Values) -> Metric:
        """What is read at this moment, of a counter or a gauge."""
        make = CounterMetricFamily if self.kind is Kind.COUNTER else GaugeMetricFamily
        family = make(self.name, self.text, labels=tuple(self.labels))
        for labels, value in values.items():
            family.add_metric(labels, value)
        return family


def seconds_from(least: float, count: int) -> tuple[float, ...]:
    """Upper bounds of so many buckets, each about 1.5 times the one before: `least` times 1, 1.6, 2.4, 4, 6, 10, 16, ..."""
    steps = (1.0, 1.6, 2.4, 4.0, 6.0)
    return tuple(float(f"{least * steps[i % 5] * 10 ** (i // 5):.3g}") for i in range(count))


class _ModelRegistry(CollectorRegistry):
    """Adds the label `model_name` to the metrics that are about the model, as they are read: the one that is served then."""

    def __init__(self, specs: Iterable[MetricSpec], model: Callable[[], str]) -> None:
        super().__init__()
        self._of_model = frozenset(spec.name.removesuffix("_total") for spec in specs if spec.of_model)
        self._model = model

    def collect(self) -> Iterator[Metric]:
        """See CollectorRegistry."""
        label = {MODEL_NAME: self._model()}
        for metric in super().collect():
            if metric.name in self._of_model:
                metric.samples = [sample._replace(labels={**sample.labels, **label}) for sample in metric.samples]
            yield metric


def new_registry(specs: Iterable[MetricSpec] = (), model: Callable[[], str] = lambda: "") -> CollectorRegistry:
    """An empty one with what the operating system says of the process. `model()`: name of the served model, for those of `specs`
    that are about it.

    The library's `_created` series are off: they double what is scraped, and Prometheus sees resets by itself.
    """
    disable_created_metrics()  # type: ignore[no-untyped-call]
    registry = _ModelRegistry(specs, model)
    ProcessCollector(registry=registry)
    return registry


def exemplar_of(span: Span) -> dict[str, str] | None:
    """What an observation says of its trace, in OpenMetrics; None where the span is not recorded."""
    if not span.is_recording():
        return None
    context = span.get_span_context()
    return {"trace_id": format_trace_id(context.trace_id), "span_id": format_span_id(context.span_id)}


def sums_of(metrics: Iterable[Counter]) -> Sums:
    """These counters as they stand."""
    families = [family for metric in metrics for family in metric.collect()]
    return {
        f"{family.name}_total": {tuple(sample.labels.values()): sample.value for sample in family.samples}
        for family in families
    }


class OnLoop:
    """Collector of metrics whose values belong to an event loop: they are read there, whoever asks, from another thread.

    `read()` may give way between two parts of its work. From `collect` TimeoutError where the loop does not answer within 5 s,
    RuntimeError where it has ended.
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
        """Names and kinds."""
        return [spec.family({}) for spec in self._specs]

    def collect(self) -> Iterable[Metric]:
        """With values, as of now."""
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
    text="Spans that were made and never reached the collector.",
    formula="Spans that the exporter's queue had no room for, or whose export failed. 0 without a collector that traces go to.",
    serves="traces: a dead collector costs nothing but spans",
    query="rate(quire_telemetry_dropped_spans_total[5m]) > 0",
)


class DroppedSpans:
    """Collector of the number of spans that the tracer of this process dropped."""

    def __init__(self, tracing: Telemetry) -> None:
        self._tracing = tracing

    def describe(self) -> Iterable[Metric]:
        """Its name."""
        return [DROPPED_SPANS.family({})]

    def collect(self) -> Iterable[Metric]:
        """As of now."""
        return [DROPPED_SPANS.family({(): self._tracing.num_dropped_spans})]
