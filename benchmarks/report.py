"""Files in benchmarks/results/, with the machine, versions and commit behind their figures."""

import json
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from quire_tools.bench import provenance as bench_provenance
from svc_common.percentiles import percentiles

RESULTS = Path(__file__).resolve().parent / "results"


def provenance() -> dict[str, Any]:
    """Machine, versions and commit, without which a figure means nothing."""
    return {**bench_provenance.provenance(), "commit": commit()}


def commit() -> str:
    """Name of the commit of this tree, with "-dirty" where it has changes."""
    git = ["git", "-C", str(RESULTS), "describe", "--always", "--dirty", "--abbrev=12"]
    try:
        return subprocess.run(git, capture_output=True, text=True, check=True, timeout=10).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return "unknown"


def spread(values: Sequence[float], digits: int = 4) -> dict[str, float]:
    """Median, p99 and maximum, rounded; empty without values."""
    found = {**percentiles(values), "max": max(values)} if values else {}
    return {name: round(float(value), digits) for name, value in found.items()}


def save(name: str, content: Mapping[str, Any], out: Path | None = None) -> Path:
    """Write `content` with its provenance as JSON, to benchmarks/results/NAME.json or to `out`."""
    path = out or RESULTS / f"{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({**provenance(), **content}, indent=2) + "\n", encoding="utf-8")
    return path
