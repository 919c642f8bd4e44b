"""The stop `batching`: the same requests under static batching and under continuous batching."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean
from typing import Any

from rich.text import Text

from quire.client.sampling_params import SamplingParams
from quire_tools.tour import pictures
from quire_tools.tour.screen import Check, Number, Screen, Stop
from quire_tools.tour.stage import Stage, TourRequest

_LENGTHS = {"A": 6, "B": 30, "C": 9, "D": 14, "E": 5, "F": 12, "G": 8, "H": 18}
_PLACES = 4
_PROMPT_TOKENS = 8


@dataclass(frozen=True, slots=True)
class Course:
    """The steps of one stack, from the first to the last in which one of the requests runs."""

    steps: Sequence[dict[str, Any]]

    def places_of(self, name: str) -> list[int]:
        """Steps that a request runs in, counted from the first of the course."""
        return [place for place, step in enumerate(self.steps, 1) if pictures.share(step, name)]

    @property
    def last_steps(self) -> dict[str, int]:
        """The step of each request's last token, counted from the first of the course."""
        return {name: max(self.places_of(name)) for name in _LENGTHS}

    @property
    def used(self) -> int:
        """Batch places used, summed over all steps."""
        return sum(pictures.share(step, name) is not None for step in self.steps for name in _LENGTHS)

    @property
    def wasted(self) -> int:
        """Batch places empty while requests ran, summed over all steps."""
        return sum(_num_empty(step) for step in self.steps)

    @property
    def most_places(self) -> int:
        """Most requests in one step."""
        return max(sum(pictures.share(step, name) is not None for name in _LENGTHS) for step in self.steps)


def _course(stage: Stage, policy: str) -> Course:
    """Without overlap, so that a place that becomes free is visible in the next step."""
    with stage.stack(policy=policy, max_num_seqs=_PLACES, scheduler_args=("--no-overlap",)) as stack:
        stack.at_once([TourRequest(name, _prompt(name), _params(length)) for name, length in _LENGTHS.items()])
        return course_of(stack.steps())


def _prompt(name: str) -> list[int]:
    """A different prompt for each request, so that none is cached."""
    return [100 + 10 * ord(name) + place for place in range(_PROMPT_TOKENS)]


def _params(length: int) -> SamplingParams:
    return SamplingParams(max_tokens=length, ignore_eos=True, temperature=0.0)


def course_of(steps: Sequence[dict[str, Any]]) -> Course:
    """The course of these steps."""
    ours = [step for step in steps if any(pictures.share(step, name) for name in _LENGTHS)]
    return Course(ours)


def show(stage: Stage) -> Screen:
    """Eight requests of different lengths in four places, under `static` and under `quire`."""
    static, continuous = _course(stage, "static"), _course(stage, "quire")
    return Screen(
        "Static batches against continuous batching",
        ("R1", "R5"),
        [
            f"{len(_LENGTHS)} requests for 5 to 30 tokens share {_PLACES} places. A static batch runs until its slowest request is "
            "over and nobody joins it; continuous batching forms the batch anew at every step.",
            pictures.side_by_side(
                ("static: who runs in which step", _timetable(static)),
                ("quire: who runs in which step", _timetable(continuous)),
            ),
            pictures.legend(*pictures.TIMETABLE_LEGEND, ("123", "red", "empty places")),
        ],
        _checks(static, continuous),
        _numbers(static, continuous),
    )


def _num_empty(step: dict[str, Any]) -> int:
    """Empty places of a step; the gate request, if still running, takes a place too."""
    return _PLACES - len(step["scheduled"])


def _timetable(course: Course) -> Text:
    """Timetable of the requests, with a last row that counts the empty places of each step."""
    picture = pictures.timetable(course.steps, list(_LENGTHS)).append("\n  ")
    for step in course.steps:
        picture.append(str(_num_empty(step) or " "), style="red")
    return picture


def _numbers(static: Course, continuous: Course) -> list[Number]:
    return [
        number
        for name, course in (("static", static), ("quire", continuous))
        for number in (
            Number(f"{name}: steps in all", len(course.steps), "R1"),
            Number(f"{name}: places used", course.used, "R1"),
            Number(f"{name}: places wasted", course.wasted, "R1"),
            Number(f"{name}: mean last step", fmean(course.last_steps.values()), "R1"),
        )
    ]


def _checks(static: Course, continuous: Course) -> list[Check]:
    late, gaps = _joined_under_way(static.steps), _gaps(continuous)
    return [
        Check("nobody joins a static batch under way", not late, f"{len(late)} joined one"),
        Check(
            "a place that is left is taken in the very next step",
            bool(gaps) and max(gaps) == 1,
            f"{len(gaps)} places, taken after {_listed(gaps)} steps",
        ),
        Check(
            "no more run at a time than there are places",
            max(static.most_places, continuous.most_places) <= _PLACES,
            f"at most {static.most_places} and {continuous.most_places} of {_PLACES}",
        ),
        Check(
            "continuous batching wastes less and ends sooner",
            continuous.wasted < static.wasted and len(continuous.steps) < len(static.steps),
            f"{continuous.wasted} against {static.wasted} places, {len(continuous.steps)} against {len(static.steps)} steps",
        ),
        Check(
            "both do the same work",
            static.used == continuous.used == sum(_LENGTHS.values()),
            f"{static.used} and {continuous.used} of {sum(_LENGTHS.values())} tokens",
        ),
    ]


def _joined_under_way(steps: Sequence[dict[str, Any]]) -> list[str]:
    """Requests that began in a step in which others continued."""
    return [
        name
        for before, step in pairwise(steps)
        for name in _LENGTHS
        if _begins(before, step, name) and any(_goes_on(before, step, other) for other in _LENGTHS)
    ]


def _gaps(course: Course) -> list[int]:
    """For each request that waited for a place: steps from the end of a finished request, earliest first, to its start."""
    begins = sorted(min(course.places_of(name)) for name in _LENGTHS)[_PLACES:]
    return [begin - end for begin, end in zip(begins, sorted(course.last_steps.values()), strict=False)]


def _begins(before: dict[str, Any], step: dict[str, Any], name: str) -> bool:
    return pictures.share(step, name) is not None and pictures.share(before, name) is None


def _goes_on(before: dict[str, Any], step: dict[str, Any], name: str) -> bool:
    return pictures.share(step, name) is not None and pictures.share(before, name) is not None


def _listed(gaps: Sequence[int]) -> str:
    return ", ".join(str(gap) for gap in sorted(set(gaps)))


STOP = Stop("batching", "Static batches against continuous batching, step by step.", ("R1", "R5"), show)
