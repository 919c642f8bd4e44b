"""The stop `skew`: Chitu's skew scheduler: the batches of two cache slots are in flight at the same time."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from rich.text import Text

from quire.client.sampling_params import SamplingParams
from quire_tools.tour import arrivals, pictures, step_facts, timelines
from quire_tools.tour.pictures import Step
from quire_tools.tour.screen import Check, Number, Screen, Stop
from quire_tools.tour.stage import Stage, TourRequest
from quire_tools.tour.timelines import TimelineSpan

_NAMES = "ABCDEFGH"
OUTPUT_TOKENS = {name: 6 + 3 * place for place, name in enumerate(_NAMES)}
_PROMPT_TOKENS = 24
_MAX_REQS, _NUM_SLOTS = 5, 2
SIZES = (3, 2)
"""Places of each slot; the first slots get the remainder."""
_NUM_DRAWN = 8
_OPTIONS: dict[str, Any] = {
    "policy": "chitu-skew",
    "policy_set": (f"pp_size={_NUM_SLOTS}", f"max_reqs={_MAX_REQS}"),
    "worker_args": ("--dtype", "float32", "--max-model-len", "256", "--num-gpu-blocks-override", "64"),
}


@dataclass(frozen=True, slots=True)
class Course:
    """All steps of the requests; `reasons`: the waiting reasons of each."""

    steps: Sequence[Step]
    reasons: Mapping[str, Sequence[str]]
    names: str = _NAMES

    @property
    def slots(self) -> dict[str, set[int]]:
        """Slots that each request ran in."""
        return {
            name: {step["lane"] for step in self.steps if pictures.share(step, name) is not None} for name in self.names
        }

    def of_slot(self, slot: int) -> list[Step]:
        """Steps of one slot."""
        return [step for step in self.steps if step["lane"] == slot]

    def residents(self, slot: int) -> list[list[str]]:
        """Requests in the slot at each of its steps."""
        return [step_facts.ids(step) for step in self.of_slot(slot)]

    @property
    def both(self) -> list[Step]:
        """Steps while both slots had requests: up to the last step of the slot that finishes first."""
        last = min(self.of_slot(slot)[-1]["step"] for slot in range(_NUM_SLOTS))
        return [step for step in self.steps if step["step"] <= last]


def show(stage: Stage) -> Screen:
    """Eight tasks in slots of three and two places."""
    with stage.stack(**_OPTIONS, scheduler_args=("--overlap",)) as stack:
        arrivals.one_by_one(stack, [_request(name) for name in _NAMES])
        steps = step_facts.about(stack.steps(), _NAMES)
        reasons = {name: [episode["reason"] for episode in stack.why(name)["episodes"]] for name in _NAMES}
    course = Course(steps, reasons)
    return Screen(
        "Chitu's skew scheduler: one batch is planned while the other runs",
        ("R147", "R179", "R183", "R184", "R186"),
        [
            f"{len(_NAMES)} tasks, {_NUM_SLOTS} slots with {SIZES[0]} and {SIZES[1]} places. A step runs the residents of one "
            "slot; a slot of decodes takes no prompt until it has drained.",
            *(part for slot in range(_NUM_SLOTS) for part in _slot_picture(course, slot)),
            pictures.legend(*pictures.TIMETABLE_LEGEND),
            Text(
                f"{_NUM_DRAWN} steps in time: a number from the planning of a step until its result is taken",
                style="bold",
            ),
            _lanes(course),
        ],
        checks(course),
        _numbers(course),
    )


def _request(name: str) -> TourRequest:
    prompt = [100 + 40 * ord(name) % 2_000 + place for place in range(_PROMPT_TOKENS)]
    return TourRequest(name, prompt, SamplingParams(temperature=0.0, max_tokens=OUTPUT_TOKENS[name], ignore_eos=True))


# --- what is shown -------------------------------------------------------------------------------------------------


def _slot_picture(course: Course, slot: int) -> tuple[Text, Text]:
    names = [name for name, slots in course.slots.items() if slots == {slot}]
    heading = Text(f"slot {slot}, {SIZES[slot]} places: its own steps", style="bold")
    return heading, pictures.timetable(step_facts.fitting(course.of_slot(slot), 90), names)


def _lanes(course: Course) -> Text:
    """Timeline from the middle of the time in which both slots are busy."""
    middle = max(0, len(course.both) // 2 - _NUM_DRAWN // 2)
    drawn = course.both[middle : middle + _NUM_DRAWN]
    rows: dict[str, list[TimelineSpan]] = {f"slot {slot}": [] for slot in range(_NUM_SLOTS)}
    for step in drawn:
        way = timelines.under_way(step)
        rows[f"slot {step['lane']}"].append(TimelineSpan(way.start_ns, way.end_ns, str(step["step"])[-1]))
    rows["worker runs"] = [timelines.run(step) for step in drawn]
    start_ns = min(step["times"]["planned_ns"] for step in drawn)
    return timelines.lanes(rows, start_ns, max(step["times"]["finished_ns"] for step in drawn), width=86)


def _numbers(course: Course) -> list[Number]:
    return [
        Number("steps of slot 0", len(course.of_slot(0)), "R183"),
        Number("most residents of slot 0", max(map(len, course.residents(0))), "R184"),
        Number("most steps under way at once", _most_under_way(course.steps), "R179"),
        Number("steps of slot 1", len(course.of_slot(1)), "R183"),
        Number("most residents of slot 1", max(map(len, course.residents(1))), "R184"),
        Number("planned while the other ran", len(_overlapping(course.both)), "R147"),
    ]


def _most_under_way(steps: Sequence[Step]) -> int:
    return timelines.most_at_once(timelines.under_way(step) for step in steps)


def _overlapping(steps: Sequence[Step]) -> list[Step]:
    """Steps planned before the previous one's result was processed."""
    return [after for before, after in pairwise(steps) if after["times"]["planned_ns"] < before["times"]["finished_ns"]]


# --- checks --------------------------------------------------------------------------------------------------------


def checks(course: Course) -> list[Check]:
    """Checks of skew scheduling."""
    most, num_overlapping = _most_under_way(course.steps), len(_overlapping(course.both))
    alone = [_most_under_way(course.of_slot(slot)) for slot in range(_NUM_SLOTS)]
    turns = [(before["lane"], after["lane"]) for before, after in pairwise(course.both)]
    full = [max(map(len, course.residents(slot))) for slot in range(_NUM_SLOTS)]
    return [
        Check("two batches are under way, one of each slot", most == _NUM_SLOTS and max(alone) == 1, f"at most {most}"),
        Check(
            "the next is planned while the one before runs",
            2 * num_overlapping > len(course.both),
            f"{num_overlapping} of {len(course.both)} steps",
        ),
        Check("the slots take turns", all(one != other for one, other in turns), f"in {len(turns)} steps"),
        Check(
            "a task stays in its slot",
            all(len(slots) == 1 for slots in course.slots.values()),
            " ".join(f"{name}:{','.join(map(str, sorted(slots)))}" for name, slots in course.slots.items()),
        ),
        Check(
            "a slot has no more residents than places",
            all(count <= size for count, size in zip(full, SIZES, strict=True)) and max(full) > 1,
            f"at most {full[0]} of {SIZES[0]} and {full[1]} of {SIZES[1]}",
        ),
        Check("a slot that decodes takes no prompt", *_drains(course)),
    ]


def _drains(course: Course) -> tuple[bool, str]:
    """Check that a task enters a slot only when none of its residents is decoding, and that some task waited for that."""
    early = []
    for slot in range(_NUM_SLOTS):
        for before, after in pairwise(course.residents(slot)):
            stayed = [name for name in before if name in after]
            if stayed and set(after) - set(before):
                early.append(after)
    kept_out = [name for name, told in course.reasons.items() if "SLOT_TYPE" in told]
    return not early and bool(kept_out), f"{len(early)} did; SLOT_TYPE told to {' '.join(kept_out) or 'nobody'}"


STOP = Stop(
    "skew",
    "Chitu's skew scheduler: two slots, two batches under way.",
    ("R147", "R179", "R183", "R184"),
    show,
)
