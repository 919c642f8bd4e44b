"""What GET /metrics says, read by Prometheus' own parser."""

import asyncio
import re
import urllib.request
from collections.abc import Iterable, Mapping, Sequence

from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families

from svc_common.observability.metrics import MODEL_NAME, Kind, MetricSpec

_NAME = re.compile(r"[a-z][a-z0-9]*(_[a-z0-9]+)*")
_OTHER_UNITS = ("milliseconds", "ms", "minutes", "kilobytes", "megabytes", "percent")


class Scrape:
    """One answer. `value("name", label="x")`: of one series, 0.0 where there is none."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.families: list[Metric] = list(text_string_to_metric_families(text))
        self._values = {
            (sample.name, frozenset(_own(sample.labels).items())): sample.value
            for family in self.families
            for sample in family.samples
        }

    def value(self, name: str, **labels: str) -> float:
        return self._values.get((name, frozenset(labels.items())), 0.0)

    def labels_of(self, name: str) -> list[dict[str, str]]:
        """Labels of each series of that name, with the model's."""
        return [sample.labels for family in self.families for sample in family.samples if sample.name == name]

    def total(self, name: str) -> float:
        """Of all series of that name."""
        return sum(value for (found, _), value in self._values.items() if found == name)

    def labels(self, name: str, label: str) -> set[str]:
        """Values that a label has."""
        return {dict(labels)[label] for found, labels in self._values if found == name and label in dict(labels)}


def _own(labels: Mapping[str, str]) -> dict[str, str]:
    """Without the model's name, which is the same for all of a service."""
    return {name: value for name, value in labels.items() if name != MODEL_NAME}


async def scrape(address: str) -> Scrape:
    """Of the service whose metrics are at HOST:PORT."""
    return Scrape(await asyncio.to_thread(_get, f"http://{address}/metrics"))


def _get(url: str) -> str:
    with urllib.request.urlopen(url, timeout=20) as answer:
        assert answer.headers["content-type"].startswith("text/plain")
        text: str = answer.read().decode()
    return text


def check_names(families: Iterable[Metric], specs: Sequence[MetricSpec]) -> None:
    """The registry has what is defined and no more, named by Prometheus' rules; labels are those that the page explains."""
    ours = {family.name: family for family in families if not family.name.startswith(("process_", "vllm:"))}
    assert ours.keys() == {spec.name.removesuffix("_total") for spec in specs}
    for spec in specs:
        family = ours[spec.name.removesuffix("_total")]
        assert family.type == spec.kind.value and family.documentation == spec.text
        assert _NAME.fullmatch(spec.name), spec.name
        assert spec.name.endswith("_total") == (spec.kind is Kind.COUNTER), spec.name
        assert not spec.name.removesuffix("_total").endswith(tuple(f"_{unit}" for unit in _OTHER_UNITS)), spec.name
        assert (spec.unit == "seconds") == spec.name.endswith("_seconds"), spec.name
        assert bool(spec.buckets) == (spec.kind is Kind.HISTOGRAM) and list(spec.buckets) == sorted(spec.buckets)
        for sample in family.samples:
            labels = {*spec.labels, *([MODEL_NAME] if spec.of_model else [])}
            assert set(sample.labels) - {"le"} == labels, (sample.name, sample.labels)
