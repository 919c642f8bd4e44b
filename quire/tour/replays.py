"""What only the scheduler's own recording shows: its inner state after each step, by a replay of what it recorded."""

import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from quire.operators.admin import AdminClient
from quire.operators.recordings import Fetch, written
from scheduler_svc.core.plan import EndedSequence, StepOutcome, StepPlan
from scheduler_svc.core.request import Request
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.observe.recording.events import Aborted, Failed, Returned, StoppedAt
from scheduler_svc.observe.recording.file_format import Recording
from scheduler_svc.observe.recording.replay import Replayer
from svc_common.errors import Internal


@dataclass(slots=True)
class _Views:
    """A watcher of a replay that keeps what the core shows after each plan. `by_step`: of steps that are no empty ones."""

    by_step: dict[int, Mapping[str, Any]] = field(default_factory=dict)
    _core: Scheduler | None = None

    # See scheduler_svc.observe.recording.replay.Watcher.

    def began(self, core: Scheduler) -> None:
        """It goes on with this core."""
        self._core = core

    def arrived(self, request: Request, at: float) -> None:
        """Of no interest."""

    def planned(self, plan: StepPlan, at: float) -> None:
        """What there is to see now."""
        assert self._core is not None
        if not plan.is_empty:
            self.by_step[plan.step] = self._core.view()

    def returned(self, event: Returned | Failed, outcome: StepOutcome) -> None:
        """Of no interest."""

    def ended(self, event: Aborted | StoppedAt, ended: list[EndedSequence]) -> None:
        """Of no interest."""

    def lost_worker(self, lane: int | None) -> None:
        """Of no interest."""


def views(admin: AdminClient) -> dict[int, Mapping[str, Any]]:
    """What the core's parts showed right after each step's schedule(), by step. Internal where the replay decides otherwise."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "tour.rec"
        with written(path) as writer:
            fetch = Fetch(admin, writer, lambda progress: None)
            fetch.held()
            fetch.finish()
        replayer = Replayer(watched := _Views())
        list(replayer.run(Recording(path).segments()))
    if not replayer.report.identical:
        raise Internal(f"the recording was replayed otherwise: {replayer.report.first_difference}")
    return watched.by_step
