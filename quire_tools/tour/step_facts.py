"""Facts about requests in a list of steps: scheduled, preempted, computed twice."""

from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from quire_tools.tour.pictures import Cell, Step, mark_cell, share

PREEMPTED, PREEMPTED_STYLE = "x", "bold red"
PREEMPTED_LEGEND = (PREEMPTED, PREEMPTED_STYLE, "preempted")


class PreemptionFact(NamedTuple):
    """A preemption of a request: the step, and the mode ("recompute" or "swap")."""

    name: str
    step: int
    mode: str


def about(steps: Iterable[Step], names: Collection[str]) -> list[Step]:
    """The steps in which one of these requests runs or is preempted."""
    return [step for step in steps if any(name in names for name in (*ids(step), *preempted(step)))]


def ids(step: Step) -> list[str]:
    """Requests that run in a step, in order; one with several samples appears once."""
    return list(dict.fromkeys(group["id"] for group in step["scheduled"]))


def preempted(step: Step) -> list[str]:
    """Requests preempted in a step, in order."""
    return [name for name, _ in step["preempted"]]


def is_prefill(step: Step) -> bool:
    """True if a prompt is computed in the step."""
    return any(group["prefill"] for group in step["scheduled"])


def preemptions(steps: Iterable[Step]) -> list[PreemptionFact]:
    """All preemptions, in order."""
    return [PreemptionFact(name, step["step"], mode) for step in steps for name, mode in step["preempted"]]


def shares(steps: Iterable[Step], name: str) -> Iterator[tuple[int, dict[str, Any]]]:
    """(step number, the request's `scheduled` entry) of each step with the request, in order."""
    for step in steps:
        group = share(step, name)
        if group is not None:
            yield step["step"], dict(group)


def next_share(steps: Iterable[Step], name: str, after: int) -> tuple[int, dict[str, Any]] | None:
    """The first entry after step `after`; None if there is none."""
    return next((found for found in shares(steps, name) if found[0] > after), None)


def num_computed(steps: Iterable[Step], name: str, before: int) -> int:
    """Tokens with computed KV when step `before` was planned; for a request of one sequence."""
    last = [group for number, group in shares(steps, name) if number < before]
    return int(last[-1]["computed_before"] + last[-1]["tokens"]) if last else 0


def num_sampled(steps: Iterable[Step], name: str, before: int | None = None) -> int:
    """Tokens sampled for the request's first sequence in steps before `before`."""
    return sum(len(step["sampled"].get(f"{name}/0", ())) for step in steps if before is None or step["step"] < before)


def by_number(steps: Iterable[Step]) -> dict[int, Step]:
    """Steps by their numbers."""
    return {step["step"]: step for step in steps}


def mark_preemptions(step: Step, name: str) -> Cell:
    """A timetable cell that also shows preemptions."""
    return (PREEMPTED, PREEMPTED_STYLE) if name in preempted(step) else mark_cell(step, name)


def fitting(steps: Sequence[Step], width: int) -> list[Step]:
    """The first `width` steps, for a timetable that must fit."""
    return list(steps[:width])
