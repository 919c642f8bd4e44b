"""Draws the dashboards from a real Prometheus' answers into docs/pictures/dashboard-*.png: `python -m tests.dashboards`."""

import sys
import tempfile
from pathlib import Path

from deploy.dashboards.__main__ import DASHBOARDS, FOLDER
from tests.dashboards import asking
from tests.dashboards.drawing import When, draw
from tests.dashboards.prometheus import HOW_TO_GET_IT, binary
from tests.dashboards.scene import Scene, loaded
from tests.support.tree import ROOT

PICTURES = ROOT / "docs" / "pictures"
PHASES = [(200, 10.0), (500, 25.0), (150, 8.0)]


def main() -> int:
    """Status 1 where there is no Prometheus."""
    if binary() is None:
        sys.stderr.write(f"{HOW_TO_GET_IT}\n")
        return 1
    PICTURES.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder, loaded(Path(folder), PHASES) as scene:
        when = When(scene.end_s - scene.start_s, _busiest_s(scene))
        for dashboard in DASHBOARDS:
            found = [(panel, asking.ask(scene, panel)) for panel in asking.panels(FOLDER / f"{dashboard.name}.json")]
            path = PICTURES / f"dashboard-{dashboard.name}.png"
            draw(dashboard.model()["title"], found, when, path)
            sys.stdout.write(f"{path.relative_to(ROOT)}: {len(found)} panels, {path.stat().st_size // 1024} KiB\n")
    return 0


def _busiest_s(scene: Scene) -> float:
    """Since its start, when most requests were there."""
    [total] = scene.prometheus.range("sum(quire_scheduler_requests)", scene.start_s, scene.end_s, asking.STEP_S)
    at_s, _ = max(total["values"], key=lambda pair: float(pair[1]))
    return float(at_s) - scene.start_s


if __name__ == "__main__":
    sys.exit(main())
