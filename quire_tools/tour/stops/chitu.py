"""The stop `chitu`: four tasks in the order of each of Chitu's scorers, and of two scorers combined."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import RenderableType
from rich.text import Text

from quire.client.messages import RequestOptions
from quire_tools.tour import arrivals, pictures, step_facts
from quire_tools.tour.pictures import Step
from quire_tools.tour.scenario import Observation, observed, request, tiny_worker
from quire_tools.tour.screen import Check, Number, declared
from quire_tools.tour.stage import Stage, TourStack

TYPES = (
    "fcfs",
    "prefill_first",
    "request_preset",
    "stride",
    "deadline",
    "prefix_align",
    "prefill_first,request_preset",
    "prefill_first,prefix_align",
)
"""Values of `scheduler_type`."""
_TASKS = {"A": (120, 1), "B": (40, 2), "C": (80, 3), "D": (20, 1)}
"""Prompt tokens and priority, in order of arrival."""
_PAUSES_S = {"A": 0.02, "B": 0.1, "C": 0.02}
_OUTPUT_TOKENS = 4
_NS_PER_TOKEN, _EXPECTED_OUTPUT = 1_000_000, 1_024
_CLOCKS_NS = 1_000_000
"""Allowed difference between the clock readings of an arrival and of a plan."""
_OPTIONS: dict[str, Any] = {
    "policy": "chitu",
    "policy_set": ("max_prefill_tasks=1", f"max_decode_tasks={len(_TASKS)}"),
    "worker_args": tiny_worker(256, 64),
}


@dataclass(frozen=True, slots=True)
class ScoredTask:
    """What scorers know of a task.

    `arrived_ns`: Unix time, as `quire why` reports it; `num_tokens`: prompt and generated tokens.
    """

    arrived_ns: int
    prompt_tokens: int
    num_tokens: int
    priority: int
    in_prefill: bool


_SCORES: dict[str, Callable[[ScoredTask, int], int]] = {
    "fcfs": lambda task, now: -task.arrived_ns,
    "prefill_first": lambda task, now: int(task.in_prefill),
    "request_preset": lambda task, now: task.priority,
    "stride": lambda task, now: task.priority * (now - task.arrived_ns),
    "deadline": lambda task, now: -(task.arrived_ns + _NS_PER_TOKEN * (task.prompt_tokens + _EXPECTED_OUTPUT)),
    "prefix_align": lambda task, now: -task.num_tokens,
}
"""Reference formulas of the scorers, larger = sooner; the scheduler's choices are compared with them."""


@dataclass(frozen=True, slots=True)
class ScorerRun:
    """The four tasks under one scheduler type. `prefix`: of their request ids; the rest is the task's letter."""

    type: str
    prefix: str
    seen: Observation

    def letters(self, step: Step) -> str:
        """Letters of the tasks in a step."""
        return "".join(name.removeprefix(self.prefix) for name in step_facts.ids(step))

    @property
    def order(self) -> str:
        """Letters of the tasks in the order in which their prompts ran."""
        return "".join(self.letters(step) for step in self.seen.steps if step_facts.is_prefill(step))

    @property
    def is_pure(self) -> bool:
        """True if no step mixes prefill and decode."""
        return all(len({group["prefill"] for group in step["scheduled"]}) == 1 for step in self.seen.steps)

    def arrived_ns(self, letter: str) -> int:
        """Arrival of a task."""
        return int(self.seen.episodes[f"{self.prefix}{letter}"][0]["from_ns"])

    def task(self, letter: str, before: Sequence[Step]) -> ScoredTask:
        """A task after these steps."""
        num_prompt, priority = _TASKS[letter]
        made = step_facts.num_sampled(before, f"{self.prefix}{letter}")
        return ScoredTask(self.arrived_ns(letter), num_prompt, num_prompt + made, priority, in_prefill=made == 0)


def _observe(stage: Stage) -> list[ScorerRun]:
    """Run all scheduler types on one stack."""
    with stage.stack(**_OPTIONS) as stack:
        return [_run(stack, str(number), name) for number, name in enumerate(TYPES)]


def _run(stack: TourStack, prefix: str, name: str) -> ScorerRun:
    """The request `plug` arrives first and ends after its prompt; the tasks arrive while it runs."""
    stack.admin.set_policy([f"scheduler_type={name}"])
    plug = request(f"{prefix}plug", 8, 1, options=RequestOptions(priority=9))
    tasks = [
        request(f"{prefix}{letter}", num_tokens, _OUTPUT_TOKENS, options=RequestOptions(priority=priority))
        for letter, (num_tokens, priority) in _TASKS.items()
    ]
    pauses_s = {f"{prefix}{letter}": pause_s for letter, pause_s in _PAUSES_S.items()}
    outputs = arrivals.one_by_one(stack, [plug, *tasks], pauses_s=pauses_s)
    return ScorerRun(name, prefix, observed(stack, outputs[1:], why=True))


def _picture(runs: Sequence[ScorerRun]) -> Iterator[RenderableType]:
    arrived = [runs[0].arrived_ns(letter) for letter in _TASKS]
    yield pictures.table(
        ("task", *_TASKS),
        [
            ("arrived, ms", *(f"{(at_ns - min(arrived)) / 1e6:.0f}" for at_ns in arrived)),
            ("tokens of its prompt", *(str(num_tokens) for num_tokens, _ in _TASKS.values())),
            ("priority", *(str(priority) for _, priority in _TASKS.values())),
        ],
        right=True,
    )
    yield Text()
    yield pictures.table(("scheduler_type", "tasks of each step"), [(run.type, _steps(run)) for run in runs])
    prefill, decode = pictures.PREFILL_STYLE, pictures.DECODE_STYLE
    yield pictures.legend((" ", f"on {prefill}", "a prompt"), (" ", f"on {decode}", "decodes"))
    yield "The order of the prompts under each, and whether the best-scored ran in every step:"


def _steps(run: ScorerRun) -> Text:
    line = Text()
    for step in run.seen.steps:
        style = pictures.PREFILL_STYLE if step_facts.is_prefill(step) else pictures.DECODE_STYLE
        line.append(run.letters(step), style=f"black on {style}").append(" ")
    return line


def _checks(runs: Sequence[ScorerRun]) -> list[Check]:
    orders = {run.order for run in runs}
    num_steps = sum(len(run.seen.steps) for run in runs)
    return [
        Check("no step has prompts and decodes", all(run.is_pure for run in runs), f"{num_steps} steps"),
        *(_best_first(run) for run in runs),
        Check("scorers differ", len(orders) >= 3, f"{len(orders)} orders of prompts: {' '.join(sorted(orders))}"),
    ]


def _best_first(run: ScorerRun) -> Check:
    """Check that in each step the task with the best score runs, by its type's own formula; alone if it is a prompt."""
    steps = run.seen.steps
    wrong = [step["step"] for place, step in enumerate(steps) if not _is_best(run, steps[:place], step)]
    seen = f"in {len(steps)} steps" if not wrong else f"not in steps {', '.join(map(str, wrong))}"
    return Check(f"{run.type}: the best first", bool(steps) and not wrong, seen)


def _is_best(run: ScorerRun, before: Sequence[Step], step: Step) -> bool:
    """True if no omitted task has a better score by more than the clocks' difference."""
    tasks = {letter: run.task(letter, before) for letter in _TASKS}
    live = {letter: task for letter, task in tasks.items() if task.num_tokens - task.prompt_tokens < _OUTPUT_TOKENS}
    chosen = run.letters(step)
    if step_facts.is_prefill(step) and len(chosen) != 1:
        return False
    first, rest = chosen[0], [letter for letter in live if letter not in chosen]
    now = step["times"]["planned_ns"]
    return first in live and all(_not_behind(run.type, live[first], live[other], now) for other in rest)


def _not_behind(scheduler_type: str, one: ScoredTask, other: ScoredTask, now: int) -> bool:
    for word in scheduler_type.split(","):
        ahead = _SCORES[word](one, now) - _SCORES[word](other, now)
        slack = _CLOCKS_NS * max(one.priority, other.priority) if word in ("fcfs", "stride", "deadline") else 0
        if abs(ahead) > slack:
            return ahead > 0
    return True


STOP = declared(
    "chitu",
    "Chitu's scorers: which task is first, and of which type a step is.",
    "docs/policies.md#chitu",
    title="Chitu's scorers: the same four tasks in eight orders",
    text="The type of the best-scored task is the type of the whole step; here a step has one prompt, or all that decode. "
    "scheduler_type is changed while the stack runs.",
    observe=_observe,
    picture=_picture,
    checks=_checks,
    numbers=lambda runs: [Number(run.type, run.order) for run in runs],
)
