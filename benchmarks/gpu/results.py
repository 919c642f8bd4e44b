"""Results of a stage as JSON."""

import json
from pathlib import Path
from typing import Any

import torch
import triton

from benchmarks.gpu.clock import Bench, Figure

_UNITS = {"memory": (1e12, "TB/s"), "gemm": (1e12, "TFLOP/s"), "to host": (1e9, "GB/s"), "to device": (1e9, "GB/s")}


def write(bench: Bench, path: Path) -> None:
    """Write all results so far."""
    unfinished = path.with_suffix(".part")
    unfinished.write_text(json.dumps(as_dict(bench)), encoding="utf-8")
    unfinished.replace(path)


def as_dict(bench: Bench) -> dict[str, Any]:
    """All results, ready for JSON."""
    return {
        "device": "a rehearsal" if bench.tiny else torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "ceilings": {name: _ceiling(name, rates) for name, rates in bench.ceilings.items() if name in _UNITS},
        "figures": [_row(bench, figure) for figure in bench.figures],
        "skipped": bench.skipped,
    }


def _ceiling(name: str, rates: list[float]) -> dict[str, Any]:
    unit, label = _UNITS[name]
    return {"first": round(rates[0] / unit, 3), "last": round(rates[-1] / unit, 3), "unit": label}


def _row(bench: Bench, figure: Figure) -> dict[str, Any]:
    unit, label = _UNITS.get(figure.ceiling, (0.0, ""))
    return {
        "name": figure.name,
        "shape": figure.shape,
        "us": round(figure.seconds * 1e6, 2),
        "rate": round(figure.rate / unit, 4) if unit else None,
        "unit": label,
        "ceiling": figure.ceiling,
        "share": round(bench.share(figure), 4),
        "goal": figure.goal,
        "anchor": figure.anchor,
    }
