"""Dashboards, rules and what provisions them: fresh, readable, and about metrics that there are."""

import json
import re
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import yaml

from deploy.dashboards.__main__ import DASHBOARDS, stale, texts
from deploy.dashboards.grafana import Dashboard, Panel, Query
from gateway_svc import metric_definitions as of_gateway
from scheduler_svc.observe.metrics import definitions as of_scheduler
from svc_common.observability.metrics import Kind, MetricSpec
from tests.dashboards import promql
from tests.support.tree import ROOT
from worker_svc.shell import metric_definitions as of_worker

SPECS: dict[str, MetricSpec] = {s.name: s for part in (of_gateway, of_scheduler, of_worker) for s in part.METRICS}
HISTOGRAMS = {name for name, spec in SPECS.items() if spec.kind is Kind.HISTOGRAM}
OF_PROMETHEUS = {"up", "process_resident_memory_bytes", "process_cpu_seconds_total"}
EVERYWHERE = {"job", "instance", "le"}
UNITS = {"short", "none", "s", "bytes", "percentunit", "reqps"}
DEPLOY = ROOT / "deploy"


def _rules() -> list[dict[str, Any]]:
    read = yaml.safe_load((DEPLOY / "prometheus" / "rules.yml").read_text(encoding="utf-8"))
    return [rule for group in read["groups"] for rule in group["rules"]]


def _provisioned(kind: str) -> dict[str, Any]:
    return yaml.safe_load((DEPLOY / "grafana/provisioning" / kind / "quire.yaml").read_text(encoding="utf-8"))


def _queries() -> list[tuple[str, str]]:
    """(where, PromQL) of everything that asks Prometheus."""
    found = [(f"{d.name}: {p.title}", q.expr) for d in DASHBOARDS for p in d.panels for q in p.queries]
    found += [(rule["alert"], rule["expr"]) for rule in _rules()]
    jaeger = _provisioned("datasources")["datasources"][1]["jsonData"]["tracesToMetrics"]
    return found + [(query["name"], query["query"]) for query in jaeger["queries"]]


QUERIES = _queries()


def test_files_are_fresh() -> None:
    """`python -m deploy.dashboards --write` would change nothing, and Grafana finds only what it makes."""
    assert stale() == [], "run `python -m deploy.dashboards --write`"
    assert {path.stem for path in texts()} == {"overview", "scheduler", "cache", "workers", "gateway"}


@pytest.mark.parametrize("dashboard", DASHBOARDS, ids=lambda dashboard: dashboard.name)
def test_every_panel_can_be_read(dashboard: Dashboard) -> None:
    """A title, a unit that Grafana knows, and a sentence that says how to read it; none lies over another."""
    model = json.loads(json.dumps(dashboard.model()))
    assert model["uid"] == f"quire-{dashboard.name}" and model["description"]
    titles = [panel["title"] for panel in model["panels"]]
    assert len(set(titles)) == len(titles) >= 8
    cells = set()
    for panel in model["panels"]:
        assert len(panel["description"]) > 25 and panel["description"].endswith("."), panel["title"]
        unit = panel["fieldConfig"]["defaults"]["unit"]
        assert unit in UNITS or unit.startswith("suffix: "), unit
        assert panel["targets"] and all(target["datasource"]["uid"] == "prometheus" for target in panel["targets"])
        place = panel["gridPos"]
        own = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert place["x"] + place["w"] <= 24 and not own & cells, panel["title"]
        cells |= own


@pytest.mark.parametrize(("where", "query"), QUERIES, ids=[where for where, _ in QUERIES])
def test_queries_ask_for_metrics_that_there_are(where: str, query: str) -> None:
    """Names are registered, labels in braces and groupings are theirs, quantiles are of histograms, rates of what only grows."""
    read = promql.metrics(query)
    assert read, query
    families = {promql.family(series, HISTOGRAMS) for series in read}
    assert families - OF_PROMETHEUS <= SPECS.keys(), families - OF_PROMETHEUS - SPECS.keys()
    for series, label in promql.selectors(query):
        spec = SPECS.get(promql.family(series, HISTOGRAMS))
        assert label in EVERYWHERE or (spec is not None and label in spec.labels), f"{series} has no label {label}"
    known = EVERYWHERE.union(*(SPECS[name].labels for name in families & SPECS.keys()))
    assert promql.groupings(query) <= known
    for series in re.findall(r"(?:rate|increase)\((\w+)", query):
        name = promql.family(series, HISTOGRAMS)
        assert series in OF_PROMETHEUS or SPECS[name].kind is Kind.COUNTER or name != series, f"{series} may fall"
    assert query.count("histogram_quantile") == query.count("sum by (le) (rate(") or "increase" in query


def test_the_checks_of_queries_see_mistakes() -> None:
    """A name, a label, a grouping, a rate of a gauge."""
    for wrong in (
        "sum(quire_scheduler_request)",
        'quire_kv_blocks{kind="used"}',
        "sum by (reason) (quire_kv_blocks)",
        "rate(quire_worker_rows[1m])",
        "1 + 1",
    ):
        with pytest.raises(AssertionError):
            test_queries_ask_for_metrics_that_there_are("wrong", wrong)


def test_all_metrics_are_on_some_dashboard(record_property: Callable[[str, object], None]) -> None:
    """What is measured is shown somewhere; those that are not are named here with the reason."""
    num_panels = sum(len(dashboard.panels) for dashboard in DASHBOARDS)
    record_property("size", f"{num_panels} panels, {len(QUERIES)} queries read, none asked; asked: `make test-long`")
    shown = {promql.family(series, HISTOGRAMS) for _, query in QUERIES for series in promql.metrics(query)}
    elsewhere = {
        "quire_gateway_scheduler_requests",  # quire_scheduler_requests, as the gateway sees it
        "quire_gateway_scheduler_serving",  # quire_scheduler_serving, as the gateway sees it
    }
    assert SPECS.keys() - shown <= elsewhere, SPECS.keys() - shown - elsewhere


def test_labels_name_series() -> None:
    """A legend that names a label is of a query that has it."""
    for dashboard in DASHBOARDS:
        for query in (query for panel in dashboard.panels for query in panel.queries):
            labels = set(re.findall(r"\{\{(\w+)\}\}", query.legend))
            assert labels <= promql.groupings(query.expr) | {"instance"}, query


def test_a_row_that_is_full_is_followed_by_another() -> None:
    """Panels flow from left to right."""
    panels = [Panel(title=str(i), text="", unit="s", queries=(Query("up"),), width=12) for i in range(3)]
    places = [panel["gridPos"] for panel in Dashboard("x", "x", "x", tuple(panels)).model()["panels"]]
    assert [(place["x"], place["y"]) for place in places] == [(0, 0), (12, 0), (0, 8)]


def test_alerts_say_how_to_go_on() -> None:
    """Few; each has a severity, a summary and what to look at."""
    rules = _rules()
    assert 4 <= len(rules) <= 12
    for rule in rules:
        assert rule["alert"].startswith("Quire") and rule["labels"]["severity"] in ("warning", "critical")
        assert rule["annotations"].keys() == {"summary", "description"}


def test_grafana_and_prometheus_find_them_in_the_containers() -> None:
    """Folders are those that docker-compose.yml mounts, data sources and targets are its services, at the ports that they serve."""
    compose = (ROOT / "docker-compose.yml").read_text(encoding="utf-8")
    services = yaml.safe_load(re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", compose))["services"]
    [provider] = _provisioned("dashboards")["providers"]
    mounts = dict(volume.split(":")[:2] for volume in services["grafana"]["volumes"])
    assert mounts["./deploy/grafana/dashboards"] == provider["options"]["path"]
    assert mounts["./deploy/grafana/provisioning"] == "/etc/grafana/provisioning"
    sources = {source["uid"]: source for source in _provisioned("datasources")["datasources"]}
    assert {uid: source["url"] for uid, source in sources.items()} == {
        "prometheus": "http://prometheus:9090",
        "jaeger": "http://jaeger:16686",
    }
    assert sources["jaeger"]["jsonData"]["tracesToMetrics"]["datasourceUid"] == "prometheus"
    exemplars = sources["prometheus"]["jsonData"]["exemplarTraceIdDestinations"]
    assert exemplars == [{"name": "trace_id", "datasourceUid": "jaeger"}]
    assert "--enable-feature=exemplar-storage" in services["prometheus"]["command"]
    config = yaml.safe_load((DEPLOY / "prometheus" / "prometheus.yml").read_text(encoding="utf-8"))
    jobs = {job["job_name"]: job for job in config["scrape_configs"]}
    assert {name: job["static_configs"][0]["targets"] for name, job in jobs.items() if name != "worker"} == {
        "gateway": ["gateway:8001"],
        "scheduler": ["scheduler:8002"],
        "collector": ["collector:8888"],
    }
    assert jobs["worker"]["dns_sd_configs"][0]["port"] == 8003


COLOURS: dict[tuple[str, str], dict[float, str]] = {
    ("overview", "State"): {0: "red", 1: "green"},
    ("overview", "Workers"): {0: "red", 1: "green", 8: "green"},
    ("overview", "Waiting"): {0: "green", 9: "green", 10: "yellow", 330: "red"},
    ("overview", "Device blocks in use"): {0.5: "green", 0.95: "yellow", 1: "red"},
    ("overview", "Errors"): {0: "green", 0.1: "yellow", 2: "red"},
    ("gateway", "Connected"): {0: "red", 1: "green"},
    ("gateway", "Tokens held for slow readers"): {0: "green", 200_000: "yellow", 3_000_000: "red"},
    ("workers", "Ready"): {0: "red", 1: "green"},
    ("workers", "Connected"): {0: "red", 1: "green"},
    ("scheduler", "Queue fill"): {0.1: "green", 0.9: "yellow", 1: "red"},
    ("cache", "Blocks in use"): {0.1: "green", 0.9: "yellow", 1: "red"},
    ("workers", "Non-finite output"): {0: "green", 0.1: "red"},
}
"""Of each panel that is coloured by its value: some values, from good to bad or from bad to good."""


def _colour(dashboard: str, title: str, value: float) -> str:
    """What Grafana shows that value of a panel in: the last threshold that it reaches."""
    [model] = [d.model() for d in DASHBOARDS if d.name == dashboard]
    [panel] = [panel for panel in model["panels"] if panel["title"] == title]
    steps = panel["fieldConfig"]["defaults"]["thresholds"]["steps"]
    return [step["color"] for step in steps if step["value"] is None or value >= step["value"]][-1]


@pytest.mark.parametrize(
    ("dashboard", "title", "values"),
    [(*of, values) for of, values in COLOURS.items()],
)
def test_what_is_worse_is_redder(dashboard: str, title: str, values: dict[float, str]) -> None:
    """Every panel with thresholds, from good to bad."""
    assert {value: _colour(dashboard, title, value) for value in values} == values


def test_all_thresholds_are_checked() -> None:
    """The test above has each panel that is coloured by its value."""
    coloured = {(d.name, p.title) for d in DASHBOARDS for p in d.panels if (p.yellow, p.red) != (None, None)}
    assert coloured == COLOURS.keys()


@pytest.mark.parametrize(
    "spec", [of_gateway.TTFT, of_gateway.DURATION, of_scheduler.QUEUE_TIME], ids=lambda spec: spec.name
)
def test_times_that_grow_with_the_queue_are_counted_to_minutes(spec: MetricSpec) -> None:
    """Under load a request waits longer than ten seconds; a quantile is never beyond the last bucket."""
    assert spec.buckets[-1] >= 600 and list(spec.buckets) == sorted(set(spec.buckets))
    assert all(after <= 2.5 * before or after <= 0.005 for before, after in pairwise(spec.buckets)), (
        "no gap hides an order"
    )
