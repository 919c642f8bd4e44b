"""The scheduler's internal state after each step, reconstructed by replaying its recording."""

import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from quire.operators.admin import AdminClient
from quire.operators.recordings import Fetch, written
from quire_tools.replay.quiet_watcher import QuietWatcher
from scheduler_svc.core.plan import StepPlan
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.observe.recording.file_format import Recording
from scheduler_svc.observe.recording.replay import Replayer
from svc_common.errors import Internal


@dataclass(slots=True)
class _Views(QuietWatcher):
    """A replay watcher that keeps the core's view after each plan. `by_step`: of non-empty steps."""

    by_step: dict[int, Mapping[str, Any]] = field(default_factory=dict)
    _core: Scheduler | None = None

    def began(self, core: Scheduler) -> None:
        """Use this core from now on."""
        self._core = core

    def planned(self, plan: StepPlan, at: float) -> None:
        """Keep the core's view."""
        assert self._core is not None
        if not plan.is_empty:
            self.by_step[plan.step] = self._core.view()


def views(admin: AdminClient) -> dict[int, Mapping[str, Any]]:
    """Views of the core's parts right after each schedule(), by step.

    Raises Internal if the replay differs from the recording.
    """
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
