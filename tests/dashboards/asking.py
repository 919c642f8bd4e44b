"""Every panel of every dashboard file, asked of Prometheus as Grafana would."""

import json
import math
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.dashboards.scene import Scene

STEP_S = 0.5
_RATE_INTERVAL = "4s"


@dataclass(slots=True)
class Answer:
    """Series of one target of a panel: labels to (times, values); `legend` as the file has it."""

    expr: str
    legend: str
    series: list[tuple[dict[str, str], list[float], list[float]]] = field(default_factory=list)

    @property
    def has_values(self) -> bool:
        """Any number at all."""
        return any(not math.isnan(value) for _, _, values in self.series for value in values)

    def name(self, labels: dict[str, str]) -> str:
        """What Grafana would call a series."""
        if self.legend == "__auto":
            return ", ".join(labels.values()) or self.expr
        return re.sub(r"\{\{(\w+)\}\}", lambda found: labels.get(found[1], ""), self.legend)


def panels(file: Path) -> list[dict[str, Any]]:
    """Of a dashboard, as the file has them."""
    return list(json.loads(file.read_text(encoding="utf-8"))["panels"])


def ask(scene: Scene, panel: dict[str, Any]) -> list[Answer]:
    """One answer for each target, over the whole scene. AssertionError for what Prometheus does not take."""
    return [_ask(scene, target) for target in panel["targets"]]


def _ask(scene: Scene, target: dict[str, Any]) -> Answer:
    expr = target["expr"].replace("$__rate_interval", _RATE_INTERVAL)
    assert "$" not in expr, expr
    answer = Answer(expr, target["legendFormat"])
    for series in scene.prometheus.range(expr, scene.start_s, scene.end_s, STEP_S):
        times = [float(time) - scene.start_s for time, _ in series["values"]]
        answer.series.append((series["metric"], times, [float(text) for _, text in series["values"]]))
    return answer
