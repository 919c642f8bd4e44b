"""The stop `batching`: the same requests under static batching and under continuous batching."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from statistics import fmean

from rich.console import RenderableType
from rich.text import Text

from quire_tools.tour import pictures
from quire_tools.tour.pictures import Step, share
from quire_tools.tour.scenario import Scenario, request
from quire_tools.tour.screen import Check, Number, declared
from quire_tools.tour.stage import Stage, TourStack

_LENGTHS = {"A": 6, "B": 30, "C": 9, "D": 14, "E": 5, "F": 12, "G": 8, "H": 18}
_PLACES = 4
_POLICIES: Mapping[str, tuple[str, ...]] = {"static": (), "quire": ("restraint=null",)}
"""With their settings: with restraint, a busy machine would compute a prompt in several steps."""
Steps = Sequence[Step]


def _observe(stage: Stage) -> dict[str, Steps]:
    """Steps by policy; without overlap, so that a place that becomes free is visible in the next step."""
    requests = [request(name, 8, length) for name, length in _LENGTHS.items()]
    options = {"max_num_seqs": _PLACES, "scheduler_args": ("--no-overlap",)}
    return {
        policy: Scenario(requests, TourStack.at_once, {"policy": policy, "policy_set": keys, **options})
        .observe(stage)
        .steps
        for policy, keys in _POLICIES.items()
    }


def _ran(steps: Steps, name: str) -> list[int]:
    """Steps that a request runs in, counted from the first one."""
    return [place for place, step in enumerate(steps, 1) if share(step, name)]


def _last_steps(steps: Steps) -> list[int]:
    return [max(_ran(steps, name)) for name in _LENGTHS]


def _num_empty(step: Step) -> int:
    """Empty places of a step; the gate request, if still running, takes a place too."""
    return _PLACES - len(step["scheduled"])


def _picture(runs: Mapping[str, Steps]) -> Iterator[RenderableType]:
    yield pictures.side_by_side(*((f"{policy}: requests by step", _timetable(steps)) for policy, steps in runs.items()))
    yield pictures.legend(*pictures.TIMETABLE_LEGEND, ("123", "red", "empty places"))


def _timetable(steps: Steps) -> Text:
    """Timetable of the requests, with a last row that counts the empty places of each step."""
    picture = pictures.timetable(steps, list(_LENGTHS)).append("\n  ")
    return picture.append("".join(str(_num_empty(step) or " ") for step in steps), style="red")


def _used(steps: Steps) -> int:
    """Batch places used, summed over all steps."""
    return sum(len(_ran(steps, name)) for name in _LENGTHS)


def _wasted(steps: Steps) -> int:
    """Batch places empty while requests ran, summed over all steps."""
    return sum(map(_num_empty, steps))


def _numbers(runs: Mapping[str, Steps]) -> list[Number]:
    return [
        Number(f"{policy}: {what}", value)
        for policy, steps in runs.items()
        for what, value in (
            ("steps in all", len(steps)),
            ("places used", _used(steps)),
            ("places wasted", _wasted(steps)),
            ("mean last step", fmean(_last_steps(steps))),
        )
    ]


def _checks(runs: Mapping[str, Steps]) -> list[Check]:
    static, quire = runs["static"], runs["quire"]
    joined, gaps = _joined(static), _gaps(quire)
    wasted, used = [[count(steps) for steps in (static, quire)] for count in (_wasted, _used)]
    most = [max(sum(share(step, name) is not None for name in _LENGTHS) for step in steps) for steps in (static, quire)]
    return [
        Check("no request joins a static batch in progress", not joined, f"{joined} joined one"),
        Check(
            "a place that becomes free is taken in the next step",
            set(gaps) == {1},
            f"{len(gaps)} places, taken after {', '.join(map(str, sorted(set(gaps))))} steps",
        ),
        Check(
            "no more run at a time than there are places",
            max(most) <= _PLACES,
            f"at most {most[0]} and {most[1]} of {_PLACES}",
        ),
        Check(
            "continuous batching wastes less and ends sooner",
            wasted[1] < wasted[0] and len(quire) < len(static),
            f"{wasted[1]} against {wasted[0]} places, {len(quire)} against {len(static)} steps",
        ),
        Check(
            "both do the same work",
            used[0] == used[1] == sum(_LENGTHS.values()),
            f"{used[0]} and {used[1]} of {sum(_LENGTHS.values())} tokens",
        ),
    ]


def _joined(steps: Steps) -> int:
    """Number of requests that began in a step in which others continued."""
    num_joined = 0
    for before, step in pairwise(steps):
        here = [name for name in _LENGTHS if share(step, name)]
        new = [name for name in here if not share(before, name)]
        num_joined += len(new) if len(new) < len(here) else 0
    return num_joined


def _gaps(steps: Steps) -> list[int]:
    """For each request that waited for a place: steps from the end of a finished request, earliest first, to its start."""
    begins = sorted(min(_ran(steps, name)) for name in _LENGTHS)[_PLACES:]
    return [begin - end for begin, end in zip(begins, sorted(_last_steps(steps)), strict=False)]


STOP = declared(
    "batching",
    "Static batches against continuous batching, step by step.",
    "docs/policies.md",
    title="Static batches against continuous batching",
    text=f"{len(_LENGTHS)} requests for 5 to 30 tokens share {_PLACES} places. A static batch runs until its slowest request has "
    "ended and admits no other; continuous batching forms the batch anew at every step.",
    observe=_observe,
    picture=_picture,
    checks=_checks,
    numbers=_numbers,
)
