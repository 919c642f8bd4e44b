"""GET /metrics of a gateway: its own metrics and the cell's, under the names that `--metrics-names` chooses."""

import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric

from gateway_svc.cell import definitions as d
from gateway_svc.cell.cell_load import CellLoad, CellReading
from gateway_svc.engine.scheduler_link import LinkState
from gateway_svc.metrics import GatewayMetrics
from svc_common.errors import Unavailable
from svc_common.observability.metrics import Kind

_LABELS = ("model_name", "engine")
_ENGINE = "0"


class Exposition:
    """Writes the metrics. `state()`: of the link to the scheduler. A scheduler that does not answer leaves its values out."""

    def __init__(self, metrics: GatewayMetrics, cell: CellLoad, state: Callable[[], LinkState], names: str) -> None:
        self._metrics = metrics
        self._cell = cell
        self._state = state
        self._names = names
        self._reading: CellReading | None = None
        metrics.registry.register(self)

    async def text(self, accept: str) -> tuple[bytes, str]:
        """The metrics in the format that an Accept header asks for, and its content type."""
        try:
            self._reading = await self._cell.read()
        except Unavailable:
            self._reading = None
        return self._metrics.text(accept)

    def describe(self) -> Iterable[Metric]:
        """No names, so that the registry does not collect to learn them."""
        return []

    def collect(self) -> Iterator[Metric]:
        """The cell's values, and vLLM's names of this gateway's histograms."""
        reading, state = self._reading, self._state()
        if reading is not None and self._names != "vllm":
            yield from _quire(reading)
        if self._names != "quire" and state.limits is not None:
            if reading is not None:
                yield from _vllm(reading, state, state.limits.model)
            yield from _vllm_histograms(self._metrics)


def _quire(reading: CellReading) -> Iterator[Metric]:
    load = reading.load
    queues = load.queues
    yield d.REQUESTS.family({("waiting",): queues.waiting, ("running",): queues.running, ("swapped",): queues.swapped})
    yield d.WAITING_TOKENS.family({(): load.num_waiting_tokens})
    yield d.KV_USAGE.family({(): reading.kv_usage})
    states: dict[tuple[str, ...], float] = {(one.adapter, "waiting"): one.num_waiting for one in load.adapters}
    states |= {(one.adapter, "running"): one.num_running for one in load.adapters}
    yield d.ADAPTER_REQUESTS.family(states)
    yield d.QUEUED_WORK.family({(): load.queued_work_s} if load.HasField("queued_work_s") else {})
    yield d.AGE.family({(): reading.age_s})


def _vllm(reading: CellReading, state: LinkState, model: str) -> Iterator[Metric]:
    for name, value in d.VLLM_VALUES.items():
        make = CounterMetricFamily if value.kind is Kind.COUNTER else GaugeMetricFamily
        family = make(name, value.text, labels=_LABELS)
        family.add_metric((model, _ENGINE), value.read(reading))
        yield family
    yield _adapters(reading, state)
    yield _cache(reading, state)


def _adapters(reading: CellReading, state: LinkState) -> Metric:
    """vLLM's form: the value is the time, adapters are in labels. All that are loaded may run at once."""
    running = ",".join(a.adapter for a in reading.load.adapters if a.num_running)
    waiting = ",".join(a.adapter for a in reading.load.adapters if a.num_waiting)
    labels = ("max_lora", "running_lora_adapters", "waiting_lora_adapters")
    family = GaugeMetricFamily(d.VLLM_ADAPTERS, "Adapters with requests.", labels=labels)
    family.add_metric((str(len(state.adapters)), running, waiting), time.time())
    return family


def _cache(reading: CellReading, state: LinkState) -> Metric:
    """vLLM's form: sizes are in labels."""
    block_size = state.limits.block_size if state.limits is not None else 0
    sizes = {
        "block_size": block_size,
        "num_gpu_blocks": reading.load.gpu.total,
        "num_cpu_blocks": reading.load.cpu.total,
    }
    family = GaugeMetricFamily(d.VLLM_CACHE, "Sizes of the KV cache of all workers.", labels=("engine", *sizes))
    family.add_metric((_ENGINE, *map(str, sizes.values())), 1)
    return family


def _vllm_histograms(metrics: GatewayMetrics) -> Iterator[Metric]:
    ours = {metric.name: metric for metric in metrics.histograms()}
    for name, (source, labels) in d.VLLM_HISTOGRAMS.items():
        yield _renamed(name, ours[source], labels.items())


def _renamed(name: str, metric: Metric, wanted: Iterable[tuple[str, str]]) -> Metric:
    """A histogram under another name, summed over the kinds of requests."""
    buckets: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    sums: dict[str, float] = defaultdict(float)
    for sample in metric.samples:
        model = sample.labels["gen_ai_request_model"]
        if any(sample.labels[label] != value for label, value in wanted):
            continue
        if sample.name.endswith("_bucket"):
            buckets[model][sample.labels["le"]] += sample.value
        elif sample.name.endswith("_sum"):
            sums[model] += sample.value
    family = HistogramMetricFamily(name, metric.documentation, labels=_LABELS)
    for model, counts in buckets.items():
        family.add_metric((model, _ENGINE), list(counts.items()), sums[model])
    return family
