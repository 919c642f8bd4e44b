"""STAND-IN for Grafana (test): reads what Grafana is provisioned with and lists it. It draws nothing.

GET /api/health, /api/datasources, /api/search (dashboards, from the folders of the providers), /api/dashboards/uid/UID.
"""

import json
import signal
import threading
from pathlib import Path
from typing import Any

import pages
import yaml

TITLE = "STAND-IN for Grafana (test)"
_PROVISIONING = Path("/etc/grafana/provisioning")


def _provisioned(kind: str, key: str) -> list[dict[str, Any]]:
    """Entries of all files of a kind."""
    files = sorted((_PROVISIONING / kind).glob("*.y*ml"))
    return [entry for file in files for entry in yaml.safe_load(file.read_text(encoding="utf-8")).get(key) or []]


def _dashboards() -> dict[str, dict[str, Any]]:
    folders = [Path(entry["options"]["path"]) for entry in _provisioned("dashboards", "providers")]
    files = [file for folder in folders for file in sorted(folder.glob("**/*.json"))]
    found = [json.loads(file.read_text(encoding="utf-8")) for file in files]
    return {dashboard["uid"]: dashboard for dashboard in found}


class Shown:
    """What is provisioned, as Grafana's API tells it."""

    def __init__(self) -> None:
        self._sources = _provisioned("datasources", "datasources")
        self._dashboards = _dashboards()

    def answer(self, path: str, _: dict[str, str]) -> pages.Answer | None:
        """To GET `path`."""
        found = [{"uid": uid, "title": dashboard["title"]} for uid, dashboard in self._dashboards.items()]
        fixed = {
            "/api/health": {"database": "ok", "version": TITLE},
            "/api/datasources": self._sources,
            "/api/search": found,
        }
        if path in fixed:
            return pages.as_json(fixed[path])
        if path.startswith("/api/dashboards/uid/"):
            dashboard = self._dashboards.get(path.rpartition("/")[2])
            return pages.as_json({"dashboard": dashboard}) if dashboard else None
        return pages.page(TITLE, [entry["title"] for entry in found]) if path == "/" else None


def main() -> None:
    """Listens where Grafana does, until asked to stop."""
    pages.serve("0.0.0.0:3000", Shown().answer)
    print(TITLE, flush=True)
    stopped = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stopped.set())
    stopped.wait()


if __name__ == "__main__":
    main()
