"""Machine and versions that belong to a measurement."""

import importlib.metadata
import os
import platform
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

_PACKAGES = ("quire", "grpcio", "protobuf", "torch", "triton", "transformers", "numpy", "httpx")


def provenance() -> dict[str, Any]:
    """Time, machine and versions."""
    return {
        "when": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": {
            "cpu": cpu_name(),
            "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
            "load_average_1min": round(os.getloadavg()[0], 2),
            "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        },
        "versions": {"python": platform.python_version(), **_versions()},
    }


def cpu_name() -> str:
    """CPU name as reported by the system."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown")


def _versions() -> dict[str, str]:
    installed = {}
    for name in _PACKAGES:
        try:
            installed[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return installed
