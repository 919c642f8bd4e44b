"""The stop `chitu-threshold`: Chitu's limit on blocks for prompts, halved at each eviction and restored at once."""

import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from rich.console import RenderableType
from rich.text import Text

from quire.operators.admin import AdminClient
from quire.operators.recordings import Fetch, written
from quire_tools.tour import arrivals, pictures, step_facts
from quire_tools.tour.pictures import Step
from quire_tools.tour.plots import Plot, Series
from quire_tools.tour.scenario import Observation, observed, request, tiny_worker
from quire_tools.tour.screen import Check, Number, declared
from quire_tools.tour.stage import Stage
from scheduler_svc.core.plan import StepPlan
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.observe.recording.file_format import Recording
from scheduler_svc.observe.recording.replay import Replayer
from scheduler_svc.observe.run_observer import RunObserver
from scheduler_svc.observe.step_record import StepOrigin
from svc_common.errors import Internal

_NAMES = "ABCDEFGH"
_PROMPT_TOKENS, _NUM_BLOCKS = 32, 27
OUTPUT_TOKENS = {name: 30 + 3 * place for place, name in enumerate(_NAMES)}
_OPTIONS: dict[str, Any] = {
    "policy": "chitu",
    "policy_set": ("max_reqs=7",),
    "worker_args": tiny_worker(256, _NUM_BLOCKS),
}


@dataclass(slots=True)
class _Views(RunObserver):
    """Keeps the core's view after each plan. `by_step`: of non-empty steps."""

    by_step: dict[int, Mapping[str, Any]] = field(default_factory=dict)
    _core: Scheduler | None = None

    def on_start(self, core: Scheduler, clock: Callable[[], float]) -> None:
        """Use this core from now on."""
        self._core = core

    def on_plan(self, plan: StepPlan, origin: StepOrigin) -> None:
        """Keep the core's view."""
        assert self._core is not None
        if not plan.is_empty:
            self.by_step[plan.step] = self._core.view()


def _views(admin: AdminClient) -> dict[int, Mapping[str, Any]]:
    """Views of the core's parts right after each schedule(), by step.

    Raises Internal if the replay differs from the recording.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "tour.rec"
        with written(path) as writer:
            fetch = Fetch(admin, writer, lambda progress: None)
            fetch.held()
            fetch.finish()
        replayer = Replayer(views := _Views())
        list(replayer.run(Recording(path).segments()))
    if not replayer.report.identical:
        raise Internal(f"the recording was replayed otherwise: {replayer.report.first_difference}")
    return views.by_step


@dataclass(frozen=True, slots=True)
class ThresholdRun:
    """Eight tasks that need more blocks together than there are.

    `thresholds`: right after each step was planned, from the recording.
    """

    seen: Observation
    thresholds: Sequence[int]

    @property
    def total(self) -> int:
        """Blocks in the pool."""
        return self.seen.pool["total"]

    @property
    def used(self) -> list[int]:
        """Blocks in use right after each step was planned."""
        return [self.total - step["free"][0] for step in self.seen.steps]

    @property
    def restored(self) -> list[int]:
        """Steps before which the threshold was restored."""
        rises = zip(pairwise(self.thresholds), self.seen.steps[1:], strict=True)
        return [step["step"] for (before, after), step in rises if after > before]

    @property
    def plot(self) -> Plot:
        """Blocks and threshold over the steps."""
        used = Series("blocks in use", self.used, "green", "#2f9e44")
        limit = Series("threshold: prompts stay below it", self.thresholds, "bold red", "#c92a2a")
        return Plot(self.seen.steps, used, limit, self.total, "blocks")


def _observe(stage: Stage) -> ThresholdRun:
    with stage.stack(**_OPTIONS) as stack:
        requests = [request(name, _PROMPT_TOKENS, num_output) for name, num_output in OUTPUT_TOKENS.items()]
        seen = observed(stack, arrivals.one_by_one(stack, requests), why=True)
        views = _views(stack.admin)
    return ThresholdRun(seen, [views[step["step"]]["threshold"] for step in seen.steps])


def _picture(run: ThresholdRun) -> Iterator[RenderableType]:
    yield run.plot.text()
    yield pictures.timetable(step_facts.fitting(run.seen.steps, 88), list(_NAMES), step_facts.mark_preemptions)
    yield Text("x evicted, computed again later", style="dim")


def _numbers(run: ThresholdRun) -> list[Number]:
    marks = zip(run.seen.steps, run.thresholds, strict=True)
    last = next((limit for step, limit in reversed(list(marks)) if step["preempted"]), run.total)
    return [
        Number("steps", len(run.seen.steps)),
        Number("evictions", len(step_facts.preemptions(run.seen.steps))),
        Number("lowest threshold, blocks", min(run.thresholds)),
        Number("times restored to the total", len(run.restored)),
        Number("most blocks in use", max(run.used)),
        Number("threshold after the last eviction", last),
    ]


# --- checks --------------------------------------------------------------------------------------------------------


def _checks(run: ThresholdRun) -> list[Check]:
    steps, restored = run.seen.steps, run.restored
    num_evictions = len(step_facts.preemptions(steps))
    prompts = [step for step in steps if step_facts.is_prefill(step)]
    steady = all(after in (before, run.total) or after < before for before, after in pairwise(run.thresholds))
    return [
        Check(
            "each eviction halves it, an ended task restores it",
            num_evictions > 0 and list(thresholds_of(steps, run.total)) == list(run.thresholds),
            f"{num_evictions} evictions, {min(run.thresholds)} of {run.total} at least",
        ),
        Check(
            "it is restored to the total in one step",
            bool(restored) and steady,
            f"{len(restored)} times" + (f", before steps {', '.join(map(str, restored[:6]))}" if restored else ""),
        ),
        Check("prompts stay below it, decodes may exceed it", *_prompts_below(run)),
        Check(
            "no step of prompts evicts",
            bool(prompts) and not any(step["preempted"] for step in prompts),
            f"{len(prompts)} steps of prompts",
        ),
        Check("the last task in order is evicted", *_last_evicted(steps)),
        Check("prompts waited for it", *_waited(run.seen)),
    ]


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


def _prompts_below(run: ThresholdRun) -> tuple[bool, str]:
    """Check that blocks in use after scheduling a prompt are at most the threshold."""
    marks = zip(run.seen.steps, run.used, run.thresholds, strict=True)
    over = [step_facts.is_prefill(step) for step, used, limit in marks if used > limit]
    return not any(over), f"{sum(over)} steps of prompts above, {len(over) - sum(over)} of decodes"


def _last_evicted(steps: Sequence[Step]) -> tuple[bool, str]:
    """Check that the last arrived task is evicted; under prefill_first, tasks of one type are in order of arrival."""
    wrong, count = [], 0
    for step in steps:
        staying = max(step_facts.ids(step), default="")
        gone = step_facts.preempted(step)
        count += len(gone)
        if gone and (gone != sorted(gone, reverse=True) or min(gone) < staying):
            wrong.append(step["step"])
    return count > 0 and not wrong, f"{count} of {count}" if not wrong else f"not in steps {wrong}"


def _waited(seen: Observation) -> tuple[bool, str]:
    waits = [(name, numbers) for name in seen.names for numbers in seen.told(name, "THRESHOLD")[-1:]]
    example = next((f"{name}: need={of['need']} free={of['free']}" for name, of in waits), "no request")
    return bool(waits), f"THRESHOLD {example}"


STOP = declared(
    "chitu-threshold",
    "Chitu's adaptive threshold over time: halved by evictions, restored when a task ends.",
    "docs/policies.md#chitu",
    title="Chitu's adaptive threshold: congestion control on prompts",
    text=f"{len(_NAMES)} prompts of {_PROMPT_TOKENS} tokens with {min(OUTPUT_TOKENS.values())} to {max(OUTPUT_TOKENS.values())} "
    f"output tokens, {_NUM_BLOCKS - 1} blocks of 16. Decodes that run out of blocks evict the last task in order, and each "
    "eviction halves the number of blocks that prompts may fill.",
    observe=_observe,
    picture=_picture,
    checks=_checks,
    numbers=_numbers,
    drawings=lambda run: [run.plot.svg("The adaptive threshold of the policy chitu, step by step")],
)
