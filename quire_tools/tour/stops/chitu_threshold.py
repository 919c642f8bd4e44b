"""The stop `chitu-threshold`: Chitu's limit on blocks for prompts, halved at each eviction and restored at once."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from rich.text import Text

from quire.client.sampling_params import SamplingParams
from quire_tools.tour import arrivals, pictures, replays, step_facts
from quire_tools.tour.pictures import Step
from quire_tools.tour.plots import Plot, Series
from quire_tools.tour.screen import Check, Number, Screen, Stop
from quire_tools.tour.stage import Stage, TourRequest, TourStack

_NAMES = "ABCDEFGH"
PROMPT_TOKENS = 32
OUTPUT_TOKENS = {name: 30 + 3 * place for place, name in enumerate(_NAMES)}
_MAX_REQS = 7
_OPTIONS: dict[str, Any] = {
    "policy": "chitu",
    "policy_set": (f"max_reqs={_MAX_REQS}",),
    "worker_args": ("--dtype", "float32", "--max-model-len", "256", "--num-gpu-blocks-override", "27"),
}


@dataclass(frozen=True, slots=True)
class Course:
    """All steps of the requests. `thresholds`: right after each was planned, from the recording; `total`:
    blocks in the pool."""

    steps: Sequence[Step]
    thresholds: Sequence[int]
    total: int
    episodes: Mapping[str, Sequence[dict[str, Any]]]

    @property
    def used(self) -> list[int]:
        """Blocks in use right after each step was planned."""
        return [self.total - step["free"][0] for step in self.steps]

    @property
    def recoveries(self) -> list[int]:
        """Steps before which the threshold was restored."""
        rises = zip(pairwise(self.thresholds), self.steps[1:], strict=True)
        return [step["step"] for (before, after), step in rises if after > before]


def show(stage: Stage) -> Screen:
    """Eight tasks that need more blocks together than there are."""
    with stage.stack(**_OPTIONS) as stack:
        arrivals.one_by_one(stack, [_request(name) for name in _NAMES])
        course = _course(stack)
    plot = Plot(
        course.steps,
        Series("blocks in use", course.used, "green", "#2f9e44"),
        Series("threshold: prompts stay below it", course.thresholds, "bold red", "#c92a2a"),
        course.total,
        "blocks",
    )
    return Screen(
        "Chitu's adaptive threshold: congestion control on prompts",
        ("R170", "R173", "R174", "R175", "R181"),
        [
            f"{len(_NAMES)} prompts of {PROMPT_TOKENS} tokens with {min(OUTPUT_TOKENS.values())} to {max(OUTPUT_TOKENS.values())} "
            f"tokens to come, {course.total} blocks of 16. Decodes that run out evict the last in order, and each eviction halves "
            "how many blocks prompts may fill.",
            plot.text(),
            pictures.timetable(step_facts.fitting(course.steps, 88), list(_NAMES), step_facts.mark_with_leavings),
            Text("x evicted, computed again later", style="dim"),
        ],
        _checks(course),
        _numbers(course),
        drawings=[plot.svg("The adaptive threshold of the policy chitu, step by step")],
    )


def _course(stack: TourStack) -> Course:
    steps = step_facts.about(stack.steps(), _NAMES)
    seen = replays.views(stack.admin)
    episodes = {name: stack.why(name)["episodes"] for name in _NAMES}
    return Course(steps, [seen[step["step"]]["threshold"] for step in steps], stack.blocks()["gpu"]["total"], episodes)


def _request(name: str) -> TourRequest:
    prompt = [100 + 40 * ord(name) % 2_000 + place for place in range(PROMPT_TOKENS)]
    return TourRequest(name, prompt, SamplingParams(temperature=0.0, max_tokens=OUTPUT_TOKENS[name], ignore_eos=True))


def _numbers(course: Course) -> list[Number]:
    return [
        Number("steps", len(course.steps)),
        Number("evictions", len(step_facts.leavings(course.steps)), "R173"),
        Number("lowest threshold, blocks", min(course.thresholds), "R174"),
        Number("times it came back to the total", len(course.recoveries), "R175"),
        Number("most blocks in use", max(course.used), "R170"),
        Number("threshold after the last eviction", _last_halved(course), "R174"),
    ]


def _last_halved(course: Course) -> int:
    marks = zip(course.steps, course.thresholds, strict=True)
    return next((limit for step, limit in reversed(list(marks)) if step["preempted"]), course.total)


# --- checks --------------------------------------------------------------------------------------------------------


def _checks(course: Course) -> list[Check]:
    expected = list(thresholds_of(course.steps, course.total))
    num_evictions = len(step_facts.leavings(course.steps))
    back = course.recoveries
    return [
        Check(
            "each eviction halves it, an end brings it back at once",
            num_evictions > 0 and expected == list(course.thresholds),
            f"{num_evictions} evictions, {min(course.thresholds)} of {course.total} at least",
        ),
        Check(
            "it comes back to the total in one go",
            bool(back) and all(after in (before, course.total) or after < before for before, after in _pairs(course)),
            f"{len(back)} times" + (f", before steps {', '.join(map(str, back[:6]))}" if back else ""),
        ),
        Check("prompts stay below it, decodes do not have to", *_prompts_below(course)),
        Check("no step of prompts evicts", *_strict(course)),
        Check("who is evicted is the last in order", *_last_evicted(course)),
        Check("prompts had to wait for it", *_waited(course)),
    ]


def _pairs(course: Course) -> Iterator[tuple[int, int]]:
    return pairwise(course.thresholds)


def thresholds_of(steps: Sequence[Step], total: int) -> Iterator[int]:
    """The threshold right after each step was planned, recomputed from the steps with Chitu's rule."""
    threshold, made = total, dict.fromkeys(_NAMES, 0)
    for step in steps:
        for _ in step["preempted"]:
            threshold = max(1, threshold // 2)
        yield threshold
        for name in _NAMES:
            made[name] += len(step["sampled"].get(f"{name}/0", ()))
        if any(made[name] == OUTPUT_TOKENS[name] for name in step_facts.ids(step)):
            threshold = total


def _prompts_below(course: Course) -> tuple[bool, str]:
    """Check that blocks in use after scheduling a prompt are at most the threshold."""
    marks = list(zip(course.steps, course.used, course.thresholds, strict=True))
    over = [step["step"] for step, used, limit in marks if step_facts.is_prefill(step) and used > limit]
    above = sum(used > limit for step, used, limit in marks if not step_facts.is_prefill(step))
    return not over, f"{len(over)} steps of prompts above, {above} of decodes"


def _strict(course: Course) -> tuple[bool, str]:
    """Check that no step of prompts preempts."""
    prompts = [step for step in course.steps if step_facts.is_prefill(step)]
    return bool(prompts) and not any(step["preempted"] for step in prompts), f"{len(prompts)} steps of prompts"


def _last_evicted(course: Course) -> tuple[bool, str]:
    """Check that the last arrived task is evicted; under prefill_first, tasks of one type are in order of arrival."""
    wrong, count = [], 0
    for step in course.steps:
        staying = max(step_facts.ids(step), default="")
        count += len(step["preempted"])
        gone = step_facts.left(step)
        if gone and (gone != sorted(gone, reverse=True) or min(gone) < staying):
            wrong.append(step["step"])
    return count > 0 and not wrong, f"{count} of {count}" if not wrong else f"not in steps {wrong}"


def _waited(course: Course) -> tuple[bool, str]:
    told = {
        name: episode["numbers"]
        for name, episodes in course.episodes.items()
        for episode in episodes
        if episode["reason"] == "THRESHOLD"
    }
    example = next((f"{name}: need={of['need']} free={of['free']}" for name, of in told.items()), "nobody did")
    return bool(told), f"THRESHOLD {example}"


STOP = Stop(
    "chitu-threshold",
    "Chitu's adaptive threshold over time: halved by evictions, back when a task ends.",
    ("R170", "R174", "R175"),
    show,
)
