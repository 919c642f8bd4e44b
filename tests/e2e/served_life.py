"""What a running scheduler did, for tests: its step log as `quire steps` tells it, and what only its recording shows."""

import re
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from scheduler_svc.core.plan import EndedSequence, StepOutcome, StepPlan
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.observe.recording.file_format import Recording
from scheduler_svc.observe.recording.replay import Replayer
from scheduler_svc.observe.run_observer import EndCause, RunObserver
from scheduler_svc.observe.step_record import StepOrigin
from scheduler_svc.worker_values import WorkerResult
from tests.support.stack.commands import quire_here, steps

Step = dict[str, Any]


@dataclass
class Replayed(RunObserver):
    """Of a replay. `reasons`: how often each was told, by name. `thresholds`: Chitu's, after each plan, and
    after each eviction of the plan.

    `depth`: most plans in flight at a time. `left_waiting`: requests that were cancelled before anything of them was scheduled;
    `left_running`: after.
    """

    reasons: Counter[str] = field(default_factory=Counter)
    thresholds: list[tuple[int, list[int]]] = field(default_factory=list)
    depth: int = 0
    left_waiting: list[str] = field(default_factory=list)
    left_running: list[str] = field(default_factory=list)
    _core: Scheduler | None = None
    _in_flight: set[int] = field(default_factory=set)
    _started: set[str] = field(default_factory=set)

    def on_start(self, core: Scheduler, clock: Callable[[], float]) -> None:
        self._core = core

    def on_plan(self, plan: StepPlan, origin: StepOrigin) -> None:
        assert self._core is not None
        self.reasons.update(event.reason.name for event in plan.events)
        view = self._core.view()
        if "threshold" in view:
            self.thresholds.append((view["threshold"], [lowered for _, lowered in view["evicted"]]))
        self._started |= {entry.request_id for entry in plan.scheduled}
        if not plan.is_empty:
            self._in_flight.add(plan.step)
            self.depth = max(self.depth, len(self._in_flight))

    def on_result(self, plan: StepPlan, result: WorkerResult, outcome: StepOutcome) -> None:
        self._in_flight.discard(plan.step)

    def on_ended(self, ended: list[EndedSequence], cause: EndCause) -> None:
        for name in dict.fromkeys(end.request_id for end in ended):
            (self.left_running if name in self._started else self.left_waiting).append(name)

    def on_worker_lost(self, worker: int | None) -> None:
        self._in_flight.clear()


@dataclass(frozen=True)
class Life:
    """`steps`: the whole log, with block tables. `replayed`: the recording of the same steps."""

    steps: list[Step]
    replayed: Replayed

    @property
    def preemptions(self) -> list[tuple[str, str]]:
        """(request id, "recompute" | "swap") in their order."""
        return [(name, mode) for step in self.steps for name, mode in step["preempted"]]

    @property
    def sequences(self) -> Iterable[tuple[Step, str]]:
        """Each sequence of each step."""
        return ((step, name) for step in self.steps for group in step["scheduled"] for name in group["seqs"])


def life_of(admin: str, folder: Path) -> Life:
    """Of the scheduler behind `admin`; its recording, kept in `folder`, is replayed to the last decision (R201)."""
    path = folder / "life.rec"
    quire_here("record", "--out", str(path), "--admin", admin, check=True)
    replayer = Replayer(replayed := Replayed())
    list(replayer.run(Recording(path).segments()))
    assert replayer.report.identical, replayer.report.first_difference
    return Life(steps(admin, "--tables"), replayed)


def request_of(name: str) -> str:
    """Its request's id, of a sequence or of one of several samples."""
    return re.split("[/~]", name)[0]
