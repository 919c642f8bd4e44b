"""The stop `overlap`: what a worker waits for between two steps; timelines without and with grants, and with overlap."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import Any

from rich.console import RenderableType
from rich.text import Text

from quire_tools.tour import pictures, step_facts, timelines
from quire_tools.tour.pictures import Step
from quire_tools.tour.scenario import Scenario, request, tiny_worker
from quire_tools.tour.screen import Check, Number, declared
from quire_tools.tour.stage import Stage, TourStack
from quire_tools.tour.timelines import TimelineSpan

_NUM_REQUESTS, _OUTPUT_TOKENS = 6, 60
_REQUESTS = [request(f"r{number}", 24, _OUTPUT_TOKENS, temperature=0.8, seed=number) for number in range(_NUM_REQUESTS)]
_NUM_DRAWN = 4
_RUNS = {"planned": ("--no-overlap", "--no-grants"), "grants": ("--no-overlap",), "overlap": ("--overlap",)}
"""Options of the scheduler, by the name of a run."""
_OPTIONS: dict[str, Any] = {"policy": "vllm-v1-async", "worker_args": tiny_worker(256, 128)}


@dataclass(frozen=True, slots=True)
class OverlapRun:
    """The steps of one stack in which every request decodes, and the tokens."""

    name: str
    steps: Sequence[Step]
    tokens: Sequence[Sequence[Sequence[int]]]

    @property
    def num_ahead(self) -> int:
        """Steps planned before the previous step's result was processed."""
        return timelines.num_planned_ahead(self.steps)

    @property
    def num_repeated(self) -> int:
        """Steps that the worker began by a grant."""
        return sum("is_repeat" in step for step in self.steps)

    @property
    def num_ready(self) -> int:
        """Steps that reached the worker before it completed the previous step."""
        return sum(
            timelines.queued(after).start_ns < timelines.run(before).end_ns for before, after in pairwise(self.steps)
        )

    @property
    def most_in_flight(self) -> int:
        """Most steps in flight at a time."""
        return timelines.most_at_once(timelines.in_flight(step) for step in self.steps)

    @property
    def quickest(self) -> Sequence[Step]:
        """The shortest sequence of `_NUM_DRAWN` steps, since other processes may have delayed the others."""
        windows = [self.steps[at : at + _NUM_DRAWN] for at in range(1, len(self.steps) - _NUM_DRAWN)] or [self.steps]
        return min(windows, key=lambda window: _end_ns(window) - _start_ns(window))

    @property
    def numbers(self) -> list[Number]:
        """Its numbers. The worker's idle share depends on the machine."""
        runs = [timelines.run(step) for step in self.steps]
        return [
            Number(f"{self.name}: decoding steps", len(self.steps)),
            Number(f"{self.name}: worker's idle share", timelines.idle_share(runs)),
            Number(f"{self.name}: median gap, µs", median(timelines.gaps(runs)) / 1e3),
            Number(f"{self.name}: repeated by a grant", self.num_repeated),
            Number(f"{self.name}: planned ahead", self.num_ahead),
        ]


def _observe(stage: Stage) -> list[OverlapRun]:
    """The same requests in each run."""
    return [_run(stage, name) for name in _RUNS]


def _run(stage: Stage, name: str) -> OverlapRun:
    seen = Scenario(_REQUESTS, TourStack.together, {**_OPTIONS, "scheduler_args": _RUNS[name]}).observe(stage)
    full = [step for step in seen.steps if set(step_facts.ids(step)) == set(seen.names)]
    return OverlapRun(name, [step for step in full if not step_facts.is_prefill(step)], seen.tokens)


def _picture(runs: Sequence[OverlapRun]) -> Iterator[RenderableType]:
    """All timelines on the same scale, that of the longest one."""
    length_ns = max(_end_ns(run.quickest) - _start_ns(run.quickest) for run in runs)
    for run in runs:
        steps = run.quickest
        first, last = steps[0]["step"], steps[-1]["step"]
        options = " ".join(_RUNS[run.name])
        yield Text(f"{run.name} ({options}): steps {first} to {last}, the quickest in sequence", style="bold")
        start_ns = _start_ns(steps)
        yield timelines.lanes(_rows(steps), start_ns, start_ns + length_ns, width=86)
        yield Text()
    yield pictures.legend(
        (timelines.SCHEDULES, "bold magenta", "schedule()"),
        ("7", "black on green", "the worker runs a step (its last digit)"),
        (timelines.WAITS, "yellow", "a plan is queued at the worker"),
    )


def _rows(steps: Sequence[Step]) -> dict[str, list[TimelineSpan]]:
    runs = [timelines.run(step) for step in steps]
    digits = [str(step["step"])[-1] for step in steps]
    return {
        "scheduler": [timelines.planned(step) for step in steps],
        "queued": [timelines.queued(step) for step in steps],
        "worker": [TimelineSpan(run.start_ns, run.end_ns, digit) for run, digit in zip(runs, digits, strict=True)],
    }


def _start_ns(steps: Sequence[Step]) -> int:
    return int(min(min(step["times"]["planned_ns"], step["times"]["started_ns"]) for step in steps))


def _end_ns(steps: Sequence[Step]) -> int:
    return int(max(step["times"]["finished_ns"] for step in steps))


def _checks(runs: Sequence[OverlapRun]) -> list[Check]:
    planned, grants, overlap = runs
    pairs, depths = len(overlap.steps) - 1, [run.most_in_flight for run in runs]
    return [
        Check(
            "planned: a step is planned after the result before it",
            len(planned.steps) > _NUM_DRAWN and planned.num_ahead + planned.num_ready + planned.num_repeated == 0,
            f"{planned.num_ahead} of {len(planned.steps) - 1} earlier",
        ),
        Check(
            "grants: most steps are begun without a plan",
            2 * grants.num_repeated > len(grants.steps) > _NUM_DRAWN,
            f"{grants.num_repeated} of {len(grants.steps)}",
        ),
        Check(
            "overlap: the next is planned while one runs",
            2 * overlap.num_ahead > pairs > _NUM_DRAWN,
            f"{overlap.num_ahead} of {pairs}",
        ),
        Check(
            "overlap: the plan is queued when the worker is done",
            overlap.num_ready > planned.num_ready,
            f"{overlap.num_ready} of {pairs}",
        ),
        Check("two steps are in flight with overlap only", depths == [1, 1, 2], ", ".join(map(str, depths))),
        Check(
            "the tokens are the same",
            planned.tokens == grants.tokens == overlap.tokens,
            f"{_NUM_REQUESTS} x {_OUTPUT_TOKENS}",
        ),
    ]


STOP = declared(
    "overlap",
    "What a worker waits for between two steps: plans, nothing by a grant, or nothing with overlap.",
    "docs/performance.md",
    title="Grants and overlap: what a worker waits for between two steps",
    text=f"{_NUM_REQUESTS} requests decode together, policy vllm-v1-async. The worker waits for each plan, unless one granted it "
    "the next steps; with overlap the next plan is already queued, with placeholders for tokens that are not sampled yet.",
    observe=_observe,
    picture=_picture,
    checks=_checks,
    numbers=lambda runs: [number for run in runs for number in run.numbers],
)
