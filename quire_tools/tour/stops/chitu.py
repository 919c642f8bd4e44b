"""The stop `chitu`: four tasks in the order of each of Chitu's scorers, and of two scorers combined."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from rich.table import Table
from rich.text import Text

from quire.client.messages import RequestOptions
from quire.client.sampling_params import SamplingParams
from quire_tools.tour import arrivals, pictures, step_facts
from quire_tools.tour.pictures import Step
from quire_tools.tour.screen import Check, Number, Screen, Stop
from quire_tools.tour.stage import Stage, TourRequest, TourStack

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
TASKS = {"A": (120, 1), "B": (40, 2), "C": (80, 3), "D": (20, 1)}
"""Prompt tokens and priority, in order of arrival."""
PLUG = "plug"
"""Arrives first and ends after its prompt; the others arrive while it runs."""
_PAUSES_S = {"A": 0.02, "B": 0.1, "C": 0.02}
_OUTPUT_TOKENS = 4
_NS_PER_TOKEN, _EXPECTED_OUTPUT = 1_000_000, 1_024
_CLOCKS_NS = 1_000_000
"""Allowed difference between the clock readings of an arrival and of a plan."""
_OPTIONS: dict[str, Any] = {
    "policy": "chitu",
    "policy_set": ("max_prefill_tasks=1", f"max_decode_tasks={len(TASKS)}"),
    "worker_args": ("--dtype", "float32", "--max-model-len", "256", "--num-gpu-blocks-override", "64"),
}


@dataclass(frozen=True, slots=True)
class Task:
    """What scorers know of a task.

    `arrived_ns`: Unix time, as `quire why` reports it; `num_tokens`: prompt and generated tokens.
    """

    arrived_ns: int
    prompt_tokens: int
    num_tokens: int
    priority: int
    in_prefill: bool


SCORES: dict[str, Callable[[Task, int], int]] = {
    "fcfs": lambda task, now: -task.arrived_ns,
    "prefill_first": lambda task, now: int(task.in_prefill),
    "request_preset": lambda task, now: task.priority,
    "stride": lambda task, now: task.priority * (now - task.arrived_ns),
    "deadline": lambda task, now: -(task.arrived_ns + _NS_PER_TOKEN * (task.prompt_tokens + _EXPECTED_OUTPUT)),
    "prefix_align": lambda task, now: -task.num_tokens,
}
"""Reference formulas of the scorers, larger = sooner; the scheduler's choices are compared with them."""


@dataclass(frozen=True, slots=True)
class Run:
    """The four tasks under one scheduler type. `arrived_ns`: by letter; `prefix`: of their ids."""

    type: str
    prefix: str
    steps: Sequence[Step]
    arrived_ns: dict[str, int]

    def letters(self, step: Step) -> str:
        """Letters of the tasks in a step."""
        return "".join(name.removeprefix(self.prefix) for name in step_facts.ids(step))

    @property
    def order(self) -> str:
        """Letters of the tasks in the order in which their prompts ran."""
        return "".join(self.letters(step) for step in self.steps if step_facts.is_prefill(step))

    @property
    def is_pure(self) -> bool:
        """True if no step mixes prefill and decode."""
        return all(len({group["prefill"] for group in step["scheduled"]}) == 1 for step in self.steps)


def show(stage: Stage) -> Screen:
    """Run all scheduler types on one stack."""
    with stage.stack(**_OPTIONS) as stack:
        runs = [_run(stack, number, name) for number, name in enumerate(TYPES)]
    return Screen(
        "Chitu's scorers: the same four tasks in eight orders",
        ("R161", "R168", "R169", "R170"),
        [
            "The type of the best-scored task is the type of the whole step; here a step has one prompt, or all that decode. "
            "scheduler_type is changed while the stack runs.",
            _task_table(runs[0]),
            Text(),
            _order_table(runs),
            pictures.legend(
                (" ", f"on {pictures.PREFILL_STYLE}", "a prompt"), (" ", f"on {pictures.DECODE_STYLE}", "decodes")
            ),
            "The order of the prompts under each, and whether the best-scored ran in every step:",
        ],
        _checks(runs),
        [Number(run.type, run.order, "R168") for run in runs],
    )


# --- driving -------------------------------------------------------------------------------------------------------


def _run(stack: TourStack, number: int, name: str) -> Run:
    stack.admin.set_policy([f"scheduler_type={name}"])
    prefix = f"{number}"
    plug = TourRequest(f"{prefix}{PLUG}", [7] * 8, _params(1), RequestOptions(priority=9))
    arrivals.one_by_one(
        stack,
        [plug, *(_request(prefix, letter) for letter in TASKS)],
        pauses_s={f"{prefix}{letter}": pause_s for letter, pause_s in _PAUSES_S.items()},
    )
    names = [f"{prefix}{letter}" for letter in TASKS]
    arrived_ns = {letter: stack.why(f"{prefix}{letter}")["episodes"][0]["from_ns"] for letter in TASKS}
    return Run(name, prefix, step_facts.about(stack.steps(), names), arrived_ns)


def _request(prefix: str, letter: str) -> TourRequest:
    num_tokens, priority = TASKS[letter]
    prompt = [100 + 200 * ord(letter) % 2_000 + place for place in range(num_tokens)]
    return TourRequest(f"{prefix}{letter}", prompt, _params(_OUTPUT_TOKENS), RequestOptions(priority=priority))


def _params(num_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)


# --- what is shown -------------------------------------------------------------------------------------------------


def _task_table(run: Run) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    table.add_column("task")
    for name in TASKS:
        table.add_column(name, justify="right")
    first = min(run.arrived_ns.values())
    table.add_row("arrived, ms", *(f"{(run.arrived_ns[name] - first) / 1e6:.0f}" for name in TASKS))
    table.add_row("tokens of its prompt", *(str(num_tokens) for num_tokens, _ in TASKS.values()))
    table.add_row("priority", *(str(priority) for _, priority in TASKS.values()))
    return table


def _order_table(runs: Sequence[Run]) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    for name in ("scheduler_type", "steps, each with who is in it"):
        table.add_column(name, no_wrap=True)
    for run in runs:
        line = Text()
        for step in run.steps:
            style = pictures.PREFILL_STYLE if step_facts.is_prefill(step) else pictures.DECODE_STYLE
            line.append(run.letters(step), style=f"black on {style}").append(" ")
        table.add_row(run.type, line)
    return table


# --- checks --------------------------------------------------------------------------------------------------------


def _checks(runs: Sequence[Run]) -> list[Check]:
    orders = {run.order for run in runs}
    return [
        Check(
            "no step has prompts and decodes",
            all(run.is_pure for run in runs),
            f"{sum(len(run.steps) for run in runs)} steps",
        ),
        *(_best_first(run) for run in runs),
        Check("scorers differ", len(orders) >= 3, f"{len(orders)} orders of prompts: {' '.join(sorted(orders))}"),
    ]


def _best_first(run: Run) -> Check:
    """Check that in each step the task with the best score runs, by its type's own formula; alone if it is a prompt."""
    wrong = [step["step"] for place, step in enumerate(run.steps) if not _is_best(run, run.steps[:place], step)]
    seen = f"in {len(run.steps)} steps" if not wrong else f"not in steps {', '.join(map(str, wrong))}"
    return Check(f"{run.type}: the best first", bool(run.steps) and not wrong, seen)


def _is_best(run: Run, before: Sequence[Step], step: Step) -> bool:
    """True if no omitted task has a better score by more than the clocks' difference."""
    tasks = {letter: _task(run, before, letter) for letter in TASKS}
    live = {letter: task for letter, task in tasks.items() if task.num_tokens - task.prompt_tokens < _OUTPUT_TOKENS}
    chosen = run.letters(step)
    if step_facts.is_prefill(step) and len(chosen) != 1:
        return False
    first, rest = chosen[0], [letter for letter in live if letter not in chosen]
    now = step["times"]["planned_ns"]
    return first in live and all(_not_behind(run, live[first], live[other], now) for other in rest)


def _task(run: Run, before: Sequence[Step], letter: str) -> Task:
    num_prompt, priority = TASKS[letter]
    made = step_facts.num_sampled(before, f"{run.prefix}{letter}")
    return Task(run.arrived_ns[letter], num_prompt, num_prompt + made, priority, in_prefill=made == 0)


def _not_behind(run: Run, one: Task, other: Task, now: int) -> bool:
    for word in run.type.split(","):
        ahead = SCORES[word](one, now) - SCORES[word](other, now)
        slack = _CLOCKS_NS * max(one.priority, other.priority) if word in ("fcfs", "stride", "deadline") else 0
        if ahead < -slack:
            return False
        if ahead > slack:
            return True
    return True


STOP = Stop("chitu", "Chitu's scorers: who comes first, and of which type a step is.", ("R168", "R169", "R170"), show)
