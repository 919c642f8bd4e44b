"""The stop `overlap`: the next step is planned while one runs; two timelines, with and without overlap."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import Any

from rich.text import Text

from quire.client.outputs import RequestOutput
from quire.client.sampling_params import SamplingParams
from quire_tools.tour import pictures, step_facts, timelines
from quire_tools.tour.pictures import Step
from quire_tools.tour.screen import Check, Number, Screen, Stop
from quire_tools.tour.stage import Stage, TourRequest
from quire_tools.tour.timelines import TimelineSpan

NUM_REQUESTS, OUTPUT_TOKENS = 6, 60
NAMES = tuple(f"r{number}" for number in range(NUM_REQUESTS))
_PROMPT_TOKENS = 24
_NUM_DRAWN = 4
_WIDTH = 86
WITHOUT, WITH = "--no-overlap", "--overlap"
_OPTIONS: Mapping[str, Any] = {
    "policy": "vllm-v1-async",
    "worker_args": ("--dtype", "float32", "--max-model-len", "256", "--num-gpu-blocks-override", "128"),
}


@dataclass(frozen=True, slots=True)
class Run:
    """The decode steps of one stack that all requests take part in, and the outputs."""

    option: str
    steps: Sequence[Step]
    outputs: Sequence[RequestOutput]

    @property
    def name(self) -> str:
        """The option as words."""
        return self.option.lstrip("-").replace("-", " ")

    @property
    def tokens(self) -> list[list[int]]:
        """Token ids of each request."""
        return [list(output.outputs[0].token_ids) for output in self.outputs]

    @property
    def idle_share(self) -> float:
        """Share of the time in which the worker is idle."""
        return timelines.idle_share([timelines.run(step) for step in self.steps])

    @property
    def median_gap_us(self) -> float:
        """Median gap between two steps at the worker."""
        return median(timelines.gaps([timelines.run(step) for step in self.steps])) / 1e3

    @property
    def num_planned_ahead(self) -> int:
        """Steps planned before the previous step's result was processed."""
        return sum(
            after["times"]["planned_ns"] < before["times"]["finished_ns"] for before, after in pairwise(self.steps)
        )

    @property
    def num_ready(self) -> int:
        """Steps that reached the worker before it completed the previous step."""
        return sum(
            timelines.queued(after).start_ns < timelines.run(before).end_ns for before, after in pairwise(self.steps)
        )


def show(stage: Stage) -> Screen:
    """The same requests twice."""
    without, with_overlap = (_run(stage, option) for option in (WITHOUT, WITH))
    return Screen(
        "Overlap: the scheduler plans step k+1 while the worker runs step k",
        ("R144", "R146", "R147", "R149", "R159"),
        [
            f"{NUM_REQUESTS} requests decode together, policy vllm-v1-async. Without overlap the worker waits for each plan; with "
            "it the next plan lies ready, with placeholders for tokens that are not known yet.",
            *_pictures([without, with_overlap]),
            pictures.legend(
                (timelines.SCHEDULES, "bold magenta", "schedule()"),
                ("7", "black on green", "the worker runs a step (its last digit)"),
                (timelines.WAITS, "yellow", "a plan lies ready at the worker"),
            ),
        ],
        _checks(without, with_overlap),
        _numbers(without, with_overlap),
    )


def _run(stage: Stage, option: str) -> Run:
    with stage.stack(**_OPTIONS, scheduler_args=(option,)) as stack:
        outputs = stack.together([_request(number, name) for number, name in enumerate(NAMES)])
        return Run(option, decoding(stack.steps()), outputs)


def _request(number: int, name: str) -> TourRequest:
    prompt = [100 + 50 * number + place for place in range(_PROMPT_TOKENS)]
    return TourRequest(
        name, prompt, SamplingParams(temperature=0.8, seed=number, max_tokens=OUTPUT_TOKENS, ignore_eos=True)
    )


def decoding(steps: Sequence[Step]) -> list[Step]:
    """The steps in which every request decodes and none computes a prompt; they are consecutive."""
    return [step for step in steps if set(step_facts.ids(step)) == set(NAMES) and not step_facts.is_prefill(step)]


# --- what is shown -------------------------------------------------------------------------------------------------


def _pictures(runs: Sequence[Run]) -> list[Text]:
    """Both timelines on the same scale, that of the longer one."""
    drawn = [_drawn(run) for run in runs]
    length_ns = max(_end_ns(steps) - _start_ns(steps) for steps in drawn)
    return [part for run, steps in zip(runs, drawn, strict=True) for part in _picture(run, steps, length_ns)]


def _drawn(run: Run) -> Sequence[Step]:
    """The shortest run of `_NUM_DRAWN` consecutive steps, since other processes may have delayed the others."""
    starts = range(1, len(run.steps) - _NUM_DRAWN)
    windows = [run.steps[at : at + _NUM_DRAWN] for at in starts] or [run.steps]
    return min(windows, key=lambda window: _end_ns(window) - _start_ns(window))


def _start_ns(steps: Sequence[Step]) -> int:
    return int(min(step["times"]["planned_ns"] for step in steps))


def _end_ns(steps: Sequence[Step]) -> int:
    return int(max(step["times"]["finished_ns"] for step in steps))


def _picture(run: Run, steps: Sequence[Step], length_ns: int) -> list[Text]:
    rows: dict[str, list[TimelineSpan]] = {
        "scheduler": [timelines.planned(step) for step in steps],
        "waits": [],
        "worker": [],
    }
    for step in steps:
        busy = timelines.run(step)
        rows["worker"].append(TimelineSpan(busy.start_ns, busy.end_ns, str(step["step"])[-1]))
        rows["waits"].append(timelines.queued(step))
    start_ns = _start_ns(steps)
    heading = Text(
        f"{run.option}: steps {steps[0]['step']} to {steps[-1]['step']}, the quickest in a row", style="bold"
    )
    return [heading, timelines.lanes(rows, start_ns, start_ns + length_ns, width=_WIDTH), Text()]


def _numbers(without: Run, with_overlap: Run) -> list[Number]:
    return [
        number
        for run in (without, with_overlap)
        for number in (
            Number(f"{run.name}: decoding steps", len(run.steps), "R144"),
            Number(f"{run.name}: worker's idle share", run.idle_share, "R146"),
            Number(f"{run.name}: median gap, µs", run.median_gap_us, "R146"),
            Number(f"{run.name}: planned ahead", run.num_planned_ahead, "R147"),
        )
    ]


# --- checks --------------------------------------------------------------------------------------------------------


def _checks(without: Run, with_overlap: Run) -> list[Check]:
    pairs = len(with_overlap.steps) - 1
    return [
        Check(
            "without: each is planned when the result before is there",
            len(without.steps) > _NUM_DRAWN and without.num_planned_ahead == 0 and without.num_ready == 0,
            f"{without.num_planned_ahead} of {len(without.steps) - 1} earlier",
        ),
        Check(
            "with: the next is planned while one runs",
            2 * with_overlap.num_planned_ahead > pairs > _NUM_DRAWN,
            f"{with_overlap.num_planned_ahead} of {pairs}",
        ),
        Check(
            "with: the plan lies ready when the worker is done",
            with_overlap.num_ready > without.num_ready,
            f"{with_overlap.num_ready} of {pairs}",
        ),
        Check("never more than two under way", *_depth(without, with_overlap)),
        Check("the tokens are the same", with_overlap.tokens == without.tokens, f"{NUM_REQUESTS} x {OUTPUT_TOKENS}"),
    ]


def _depth(without: Run, with_overlap: Run) -> tuple[bool, str]:
    """Check that steps in flight are as many as the policy plans ahead: 1 without overlap, 2 with it."""
    alone, two = (
        timelines.most_at_once(timelines.under_way(step) for step in run.steps) for run in (without, with_overlap)
    )
    return (alone, two) == (1, 2), f"{alone} without, {two} with"


STOP = Stop(
    "overlap",
    "Planning the next step while one runs: two lanes in time.",
    ("R144", "R146", "R147", "R159"),
    show,
)
