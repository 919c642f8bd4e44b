"""The stack serves, and shows what it did: both doors, one trace over three services, metrics, dashboards."""

import re
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

from quire.client.sampling_params import SamplingParams
from tests.compose.checks.conftest import Figures
from tests.compose.checks.requests import client, get, targets, wait_for_targets
from tests.compose.stack import GRAFANA, HTTP, JAEGER, LAB, PROMETHEUS, Stack, until

PROMPT = "def main():"
PARAMS = SamplingParams(max_tokens=24, temperature=0.0)


def test_a_plain_up_is_the_cpu_stack(cpu: Stack) -> None:
    """No profile was named: .env does."""
    expected = ["collector", "gateway", "grafana", "jaeger", "prometheus", "scheduler", "worker"]
    assert cpu.services() == expected
    assert all(cpu.is_healthy(service) for service in expected)


def test_both_doors_give_the_same_completion(cpu: Stack) -> None:
    """gRPC by Quire's client, HTTP by OpenAI's."""
    with client() as quire:
        by_grpc = quire.generate(PROMPT, PARAMS, timeout_s=60)
    with openai.OpenAI(base_url=f"{HTTP}/v1", api_key="none", max_retries=0) as door:
        by_http = door.completions.create(model="tiny", prompt=PROMPT, max_tokens=24, temperature=0)
    assert by_grpc.text
    assert by_http.choices[0].text == by_grpc.text


def test_a_request_is_one_trace_over_three_services(cpu: Stack) -> None:
    """Found by Jaeger's query API: one root, every parent there, spans of gateway, scheduler and worker."""
    with client() as quire:
        quire.generate(PROMPT, PARAMS, request_id="compose-trace", timeout_s=60)
    services = {"quire-gateway", "quire-scheduler", "quire-worker"}

    def found() -> dict[str, Any] | None:
        traces = get(f"{JAEGER}/api/traces", service="quire-gateway", limit="100").json()["data"]
        mine = (trace for trace in traces if _has_request(trace, "compose-trace"))
        return next((trace for trace in mine if services <= _services(trace)), None)

    trace = until(found, "one trace of the request with spans of three services", timeout_s=40)
    known = {span["spanID"] for span in trace["spans"]}
    parents = [reference["spanID"] for span in trace["spans"] for reference in span["references"]]
    assert len(trace["spans"]) == len(parents) + 1
    assert set(parents) <= known
    assert services <= set(get(f"{JAEGER}/api/services").json()["data"])


def _has_request(trace: dict[str, Any], request_id: str) -> bool:
    tags = (tag for span in trace["spans"] for tag in span["tags"])
    return any(tag["key"] == "quire.request_id" and tag["value"] == request_id for tag in tags)


def _services(trace: dict[str, Any]) -> set[str]:
    return {process["serviceName"] for process in trace["processes"].values()}


def test_stand_ins_say_what_they_are(cpu: Stack) -> None:
    """They cannot be mistaken for the real ones."""
    for service, url in (("jaeger", JAEGER), ("grafana", GRAFANA)):
        title = f"STAND-IN for {service.capitalize()} (test)"
        assert f"<title>{title}</title>" in get(url).text
        assert title in cpu.compose("logs", service)
    assert "STAND-IN for the OpenTelemetry collector (test)" in cpu.compose("logs", "collector")


def test_prometheus_reaches_every_service(cpu: Stack) -> None:
    """A real Prometheus, with deploy/prometheus: all targets up, rules without errors."""

    wait_for_targets()
    jobs = {target["labels"]["job"] for target in targets()}
    assert jobs == {"gateway", "scheduler", "worker", "collector"}
    groups = get(f"{PROMETHEUS}/api/v1/rules").json()["data"]["groups"]
    rules = [rule for group in groups for rule in group["rules"]]
    assert rules
    assert all(rule["health"] != "err" for rule in rules)


def test_prometheus_takes_every_query_of_every_dashboard(cpu: Stack) -> None:
    """What Grafana is provisioned with: its data source is there, and no panel asks nonsense."""
    assert [source["url"] for source in get(f"{GRAFANA}/api/datasources").json() if source["type"] == "prometheus"]
    found = get(f"{GRAFANA}/api/search").json()
    assert found
    dashboards = [get(f"{GRAFANA}/api/dashboards/uid/{entry['uid']}").json()["dashboard"] for entry in found]
    queries = sorted({query for dashboard in dashboards for query in _queries(dashboard)})
    assert queries
    for query in queries:
        answer = httpx.get(f"{PROMETHEUS}/api/v1/query", params={"query": query}, timeout=10)
        assert answer.status_code == 200, (query, answer.text)


def _queries(part: Any) -> Iterator[str]:
    """Every `expr` below `part`, with Grafana's variables filled in."""
    if isinstance(part, dict):
        if isinstance(part.get("expr"), str):
            filled = re.sub(r"\$\{?__(rate_interval|interval|range)\}?", "1m", part["expr"])
            yield re.sub(r"\$(\w+|\{\w+(:\w+)?\})", ".*", filled)
        yield from (query for value in part.values() for query in _queries(value))
    if isinstance(part, list):
        yield from (query for value in part for query in _queries(value))


def test_the_lab_is_served(cpu: Stack) -> None:
    """On the gateway's admin listener, and nothing from elsewhere is needed to show it."""
    text = get(LAB).text
    assert "<html" in text
    assert not re.search(r"""(src|href)=["']https?://""", text)


@pytest.mark.parametrize(("service", "torch"), [("gateway", False), ("scheduler", False), ("worker", True)])
def test_only_the_worker_has_torch(cpu: Stack, figures: Figures, service: str, torch: bool) -> None:
    """In the running containers."""
    for module in ("torch", "transformers"):
        done = cpu.python(service, f"import {module}; print({module}.__version__)")
        assert (done.returncode == 0) is torch, done.stderr
        assert torch or f"No module named '{module}'" in done.stderr
    if torch:
        figures.note("torch", cpu.python(service, "import torch; print(torch.__version__)").stdout.strip())
