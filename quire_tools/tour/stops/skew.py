"""The stop `skew`: Chitu's skew scheduler: the batches of two cache slots are in flight at the same time."""

from collections.abc import Iterator, Sequence
from itertools import pairwise

from rich.console import RenderableType
from rich.text import Text

from quire_tools.tour import arrivals, pictures, step_facts, timelines
from quire_tools.tour.pictures import Step
from quire_tools.tour.scenario import Observation, Scenario, request, tiny_worker
from quire_tools.tour.screen import Check, Number, declared
from quire_tools.tour.timelines import TimelineSpan

_NAMES = "ABCDEFGH"
_SIZES = (3, 2)
"""Places of each slot; the first slots get the remainder."""
_SLOTS = range(len(_SIZES))
_NUM_DRAWN = 8
_SCENARIO = Scenario(
    [request(name, 24, 6 + 3 * place) for place, name in enumerate(_NAMES)],
    arrivals.one_by_one,
    {
        "policy": "chitu-skew",
        "policy_set": (f"pp_size={len(_SIZES)}", f"max_reqs={sum(_SIZES)}"),
        "worker_args": tiny_worker(256, 64),
        "scheduler_args": ("--overlap",),
    },
    why=True,
)


def _residents(seen: Observation, slot: int) -> list[list[str]]:
    """Requests in the slot at each of its steps."""
    return [step_facts.ids(step) for step in seen.of_lane(slot)]


def _both(seen: Observation) -> list[Step]:
    """Steps while both slots had requests: up to the last step of the slot that finishes first."""
    last = min(seen.of_lane(slot)[-1]["step"] for slot in _SLOTS)
    return [step for step in seen.steps if step["step"] <= last]


def _most_in_flight(steps: Sequence[Step]) -> int:
    return timelines.most_at_once(timelines.in_flight(step) for step in steps)


def _picture(seen: Observation) -> Iterator[RenderableType]:
    for slot in _SLOTS:
        yield Text(f"slot {slot}, {_SIZES[slot]} places: its own steps", style="bold")
        names = [name for name in seen.names if seen.lanes_of(name) == [slot]]
        yield pictures.timetable(step_facts.fitting(seen.of_lane(slot), 90), names)
    yield pictures.legend(*pictures.TIMETABLE_LEGEND)
    yield Text(
        f"{_NUM_DRAWN} steps in time: a digit from a step's planning until its result is processed", style="bold"
    )
    yield _lanes(_both(seen))


def _lanes(steps: Sequence[Step]) -> Text:
    """Timeline from the middle of the steps."""
    middle = max(0, len(steps) // 2 - _NUM_DRAWN // 2)
    drawn = steps[middle : middle + _NUM_DRAWN]
    rows: dict[str, list[TimelineSpan]] = {f"slot {slot}": [] for slot in _SLOTS}
    for step in drawn:
        way = timelines.in_flight(step)
        rows[f"slot {step['lane']}"].append(TimelineSpan(way.start_ns, way.end_ns, str(step["step"])[-1]))
    rows["worker runs"] = [timelines.run(step) for step in drawn]
    start_ns = min(step["times"]["planned_ns"] for step in drawn)
    return timelines.lanes(rows, start_ns, max(step["times"]["finished_ns"] for step in drawn), width=86)


def _numbers(seen: Observation) -> list[Number]:
    most = [max(map(len, _residents(seen, slot))) for slot in _SLOTS]
    return [
        Number("steps of slot 0", len(seen.of_lane(0))),
        Number("most residents of slot 0", most[0]),
        Number("most steps in flight at once", _most_in_flight(seen.steps)),
        Number("steps of slot 1", len(seen.of_lane(1))),
        Number("most residents of slot 1", most[1]),
        Number("planned while the other ran", timelines.num_planned_ahead(_both(seen))),
    ]


def checks(seen: Observation) -> list[Check]:
    """Checks of skew scheduling."""
    both = _both(seen)
    most, num_ahead = _most_in_flight(seen.steps), timelines.num_planned_ahead(both)
    alone = [_most_in_flight(seen.of_lane(slot)) for slot in _SLOTS]
    turns = [(before["lane"], after["lane"]) for before, after in pairwise(both)]
    full = [max(map(len, _residents(seen, slot))) for slot in _SLOTS]
    slots = {name: seen.lanes_of(name) for name in seen.names}
    return [
        Check(
            "two batches are in flight, one of each slot", most == len(_SIZES) and max(alone) == 1, f"at most {most}"
        ),
        Check(
            "the next is planned while the one before runs",
            2 * num_ahead > len(both),
            f"{num_ahead} of {len(both)} steps",
        ),
        Check("the slots take turns", all(one != other for one, other in turns), f"in {len(turns)} steps"),
        Check(
            "a task stays in its slot",
            all(len(of) == 1 for of in slots.values()),
            " ".join(f"{name}:{','.join(map(str, of))}" for name, of in slots.items()),
        ),
        Check(
            "a slot has no more residents than places",
            all(count <= size for count, size in zip(full, _SIZES, strict=True)) and max(full) > 1,
            f"at most {full[0]} of {_SIZES[0]} and {full[1]} of {_SIZES[1]}",
        ),
        Check("a slot that decodes takes no prompt", *_drains(seen)),
    ]


def _drains(seen: Observation) -> tuple[bool, str]:
    """Check that a task enters a slot only when none of its residents is decoding, and that some task waited for that."""
    pairs = [pair for slot in _SLOTS for pair in pairwise(map(set, _residents(seen, slot)))]
    early = sum(bool(before & after and after - before) for before, after in pairs)
    waited = [name for name in seen.episodes if seen.told(name, "SLOT_TYPE")]
    return not early and bool(waited), f"{early} did; SLOT_TYPE given to {' '.join(waited) or 'none'}"


STOP = declared(
    "skew",
    "Chitu's skew scheduler: two slots, two batches in flight.",
    "docs/policies.md#chitu",
    title="Chitu's skew scheduler: one batch is planned while the other runs",
    text=f"{len(_NAMES)} tasks, {len(_SIZES)} slots with {_SIZES[0]} and {_SIZES[1]} places. A step runs the residents of one "
    "slot; a slot of decodes takes no prompt until it has drained.",
    observe=_SCENARIO.observe,
    picture=_picture,
    checks=checks,
    numbers=_numbers,
)
