"""Writes deploy/grafana/dashboards/*.json: `python -m deploy.dashboards --write`.

Without --write, lists the files that are out of date.
"""

import argparse
import json
import sys
from pathlib import Path

from deploy.dashboards.cache import CACHE
from deploy.dashboards.gateway import GATEWAY
from deploy.dashboards.grafana import Dashboard
from deploy.dashboards.overview import OVERVIEW
from deploy.dashboards.scheduler import SCHEDULER
from deploy.dashboards.workers import WORKERS

FOLDER = Path(__file__).parents[1] / "grafana" / "dashboards"
DASHBOARDS: tuple[Dashboard, ...] = (OVERVIEW, SCHEDULER, CACHE, WORKERS, GATEWAY)


def texts() -> dict[Path, str]:
    """Expected contents of the files."""
    return {FOLDER / f"{d.name}.json": json.dumps(d.model(), indent=2) + "\n" for d in DASHBOARDS}


def stale() -> list[str]:
    """Names of files that are out of date or missing, or that belong to no dashboard."""
    wanted, found = texts(), set(FOLDER.glob("*.json"))
    wrong = [path for path, text in wanted.items() if path not in found or path.read_text(encoding="utf-8") != text]
    return sorted(path.name for path in [*wrong, *(found - wanted.keys())])


def main() -> int:
    """Write the files, or return status 1 if some are out of date."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help="write the files")
    if not parser.parse_args().write:
        names = stale()
        sys.stdout.write("".join(f"out of date: {name}\n" for name in names))
        return 1 if names else 0
    for path, text in texts().items():
        path.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
