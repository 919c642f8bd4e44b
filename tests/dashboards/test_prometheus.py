"""Dashboards against a real Prometheus: every query is taken, and shows what happened."""

from collections.abc import Callable
from pathlib import Path

import pytest

from deploy.dashboards.__main__ import DASHBOARDS, FOLDER
from tests.dashboards import asking
from tests.dashboards.prometheus import HOW_TO_GET_IT, binary
from tests.dashboards.scene import loaded

Record = Callable[[str, object], None]
# What this load does not do: nothing fails, nothing is refused.
NOT_HERE = {"Failed steps", "Refused"}


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.skipif(binary() is None, reason=HOW_TO_GET_IT)
def test_every_panel_of_every_dashboard_has_data(tmp_path: Path, record_property: Record) -> None:
    """Queries of the files that Grafana gets, over a stack with preemptions, swaps, prefix hits, samples and an error."""
    may_be_empty = {(d.name, p.title) for d in DASHBOARDS for p in d.panels if p.may_be_empty}
    num_queries, empty, values = 0, set(), {}
    with loaded(tmp_path, [(130, 24.0)]) as scene:
        for file in sorted(FOLDER.glob("*.json")):
            for panel in asking.panels(file):
                answers = asking.ask(scene, panel)
                num_queries += len(answers)
                if not all(answer.has_values for answer in answers):
                    empty.add((file.stem, panel["title"]))
                values[file.stem, panel["title"]] = [max(v) for a in answers for _, _, v in a.series]
        rules = scene.prometheus.rules()
    record_property("size", f"{len(values)} panels, {num_queries} queries, {scene.end_s - scene.start_s:.0f} s of load")
    assert empty <= may_be_empty, empty - may_be_empty
    assert {title for _, title in empty} <= NOT_HERE
    assert len(values) >= 50 and {name for name, _ in values} == {d.name for d in DASHBOARDS}
    for name, title in (
        ("overview", "Tokens"),
        ("scheduler", "Preemptions"),
        ("scheduler", "Why requests wait"),
        ("cache", "Prefix hits"),
        ("cache", "Swaps"),
        ("cache", "Copies on write"),
        ("workers", "Parts of a step"),
        ("gateway", "Errors"),
    ):
        assert max(values[name, title]) > 0, f"{name}: {title} shows nothing of what happened"
    assert all(max(values[name, "State"]) == 1 for name in ("overview",))
    assert rules and all(rule["health"] == "ok" for rule in rules)
    assert [rule["name"] for rule in rules if rule["state"] == "firing" and rule["name"] != "QuireQueueFills"] == []
