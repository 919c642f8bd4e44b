"""Metrics lead to traces: times of requests whose trace is recorded name it, in OpenMetrics; and each metric names its model."""

import asyncio
import urllib.request

import pytest
from prometheus_client.metrics_core import Metric
from prometheus_client.openmetrics.parser import text_string_to_metric_families

from quire.local_stack.otlp_receiver import OtlpReceiver
from svc_common.observability import trace_names as names
from tests.support.scraping import Scrape
from tests.support.services.harness import run_async, stack
from tests.traces.serving import exporting, gateway, post

_TIMES = (
    "gen_ai_server_request_duration_seconds",
    "gen_ai_server_time_to_first_token_seconds",
    "gen_ai_server_time_per_output_token_seconds",
    "quire_queue_time_seconds",
)


def _get(address: str, accept: str) -> tuple[str, str]:
    """The answer and its content type."""
    request = urllib.request.Request(f"http://{address}/metrics", headers={"Accept": accept})
    with urllib.request.urlopen(request, timeout=20) as answer:
        return answer.read().decode(), answer.headers["content-type"]


def _traces(families: dict[str, Metric], name: str) -> set[str]:
    samples = [sample for sample in families[name].samples if sample.exemplar]
    return {sample.exemplar.labels["trace_id"] for sample in samples}


@pytest.mark.parametrize("is_traced", [True, False], ids=["traced", "not traced"])
def test_openmetrics_has_exemplars_of_traced_requests(
    otlp: OtlpReceiver, monkeypatch: pytest.MonkeyPatch, is_traced: bool
) -> None:
    """Of each time of a request, at the gateway and the scheduler; Prometheus' own form has none, and is the default."""
    answers: list[tuple[str, str]] = []
    plain: list[tuple[str, str]] = []

    @run_async
    async def scenario() -> None:
        async with stack() as s, gateway(s.address) as doors:
            await post(doors, "measured", "completions", prompt="a", max_tokens=3, ignore_eos=True)
            for at in (doors[1], s.metrics_address):
                answers.append(await asyncio.to_thread(_get, at, "application/openmetrics-text; version=1.0.0"))
                plain.append(await asyncio.to_thread(_get, at, "*/*"))

    with exporting(otlp, monkeypatch, **({} if is_traced else {"OTEL_SDK_DISABLED": "true"})):
        scenario()
    families: dict[str, Metric] = {}
    for text, kind in answers:
        assert kind.startswith("application/openmetrics-text")
        families |= {family.name: family for family in text_string_to_metric_families(text)}
    roots = [span for span in otlp.spans() if span.attributes.get(names.REQUEST_ID) == "measured"]
    expected = {span.trace_id for span in roots}
    assert len(expected) == is_traced
    for name in _TIMES:
        assert _traces(families, name) == expected, name
    for text, kind in plain:
        assert kind.startswith("text/plain") and "trace_id" not in text
    of_model = Scrape(plain[1][0]).labels_of("quire_output_tokens_total")
    assert of_model == [{"model_name": "simulated"}]
    assert Scrape(plain[1][0]).labels_of("quire_scheduler_serving") == [{}]
