"""Changes of recorded values from some step on: `--set KEY=VALUE[@STEP]`."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from scheduler_svc.core.composition import live_change
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.core.spec.policy_spec import knob_names
from scheduler_svc.policy.keys import Assignment, bad, check_limit, checked, from_texts, limit_names


@dataclass(frozen=True, slots=True)
class Change:
    """`values` apply from just before step `step` is planned; None: from the start."""

    step: int | None
    values: Mapping[str, Any]


def from_sets(texts: Iterable[str], option: str = "--set") -> list[Change]:
    """Parse `["max_num_seqs=8@120", ...]` to changes by step, those without one first. Raises ConfigError for malformed texts."""
    by_step: dict[int | None, dict[str, Any]] = {}
    for text in texts:
        assignment, step = _parsed(text, option)
        by_step.setdefault(step, {})[assignment.key] = assignment.value
    order = sorted(by_step, key=lambda step: -1 if step is None else step)
    return [Change(step, by_step[step]) for step in order]


def _parsed(text: str, option: str) -> tuple[Assignment, int | None]:
    what, at, step = text.rpartition("@")
    if not at:
        what, step = text, ""
    elif not step.isascii() or not step.isdigit() or not int(step):
        raise bad(f"{option} {text}", f"{step!r} is no step; write KEY=VALUE@STEP, steps count from 1")
    [assignment] = from_texts([what], option)
    taken = checked(replace(assignment, origin=f"{option} {text}"))
    if taken.key in limit_names():
        check_limit(taken)
    return taken, int(step) if step else None


def apply(core: Scheduler, values: Mapping[str, Any]) -> None:
    """Apply the values to a core. Raises ConfigError for values that cannot be changed or contradict each other."""
    limits = {key: value for key, value in values.items() if key in limit_names()}
    knobs = {key: value for key, value in values.items() if key in knob_names()}
    for key in values:
        if key not in limits and key not in knobs:
            raise bad(key, "cannot be changed by itself; give the keys that it stands for", field=key)
    spec = core.spec.with_knobs(**knobs)
    live_change.reconfigure(core, spec, replace(core.limits, **limits))
