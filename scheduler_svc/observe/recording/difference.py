"""Comparison of two runs' plans."""

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

from scheduler_svc.observe.plan_record import FRESH, PREFILL, RESUMED, SAMPLES, PlanRecord

_FLAG_NAMES = {FRESH: "fresh", RESUMED: "resumed", SAMPLES: "samples", PREFILL: "is_prefill"}
_PLAIN = tuple(f.name for f in fields(PlanRecord) if f.name != "shape")


@dataclass(frozen=True, slots=True)
class Difference:
    """The first difference between two runs."""

    step: int
    field: str
    recorded: Any
    got: Any


def first_difference(recorded: PlanRecord, got: PlanRecord) -> Difference | None:
    """The most significant difference between two plans; None if they are equal."""
    if recorded.shape is not got.shape and not recorded.shape.is_like(got.shape):
        found = _shape_difference(recorded, got)
        if found is not None:
            return found
    for name in _PLAIN:
        a, b = getattr(recorded, name), getattr(got, name)
        if a != b and (a or b):  # a recorded () is read as []
            return Difference(recorded.step, name, a, b)
    return None


def _shape_difference(recorded: PlanRecord, got: PlanRecord) -> Difference | None:
    a, b, step = recorded.shape, got.shape, recorded.step
    if a.names != b.names:
        return Difference(step, "scheduled", list(a.names), list(b.names))
    for name, values in _COLUMNS.items():
        of_a, of_b = values(recorded), values(got)
        pairs = [(n, x, y) for n, x, y in zip(a.names, of_a, of_b, strict=True) if x != y]
        if pairs:
            return Difference(step, name, {n: x for n, x, _ in pairs}, {n: y for n, _, y in pairs})
    return None


def _flags(plan: PlanRecord) -> list[str]:
    flags = plan.shape.flags or bytes([SAMPLES]) * len(plan.shape.names)
    return [" ".join(name for bit, name in _FLAG_NAMES.items() if flag & bit) for flag in flags]


_COLUMNS: dict[str, Callable[[PlanRecord], list[Any]]] = {
    "num_tokens": lambda plan: plan.shape.num_tokens,
    "computed_before": lambda plan: plan.computed_before,
    "flags": _flags,
}
