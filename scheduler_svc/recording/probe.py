"""What would have been decided in one step if some value had been another: the question behind every reason that names one."""

from collections.abc import Iterable, Mapping
from typing import Any

from scheduler_svc.core.plan import StepPlan
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.recording import changes, snapshot
from scheduler_svc.recording.events import Planned
from scheduler_svc.recording.replay import Replayer
from scheduler_svc.recording.ring import Segment
from svc_common.errors import OutOfRange


class StepProbe:
    """A core as it stood just before a step, to be asked again and again. The recorded life itself is never changed."""

    def __init__(self, segments: Iterable[Segment], step: int) -> None:
        """Lives through the segments up to `step`. OutOfRange where they do not hold it, or cannot be replayed up to it."""
        replayer = Replayer()
        rest = replayer.run(_shortest(list(segments), step), until_step=step)
        planned = next((event for event in rest if isinstance(event, Planned)), None)
        core, difference = replayer.core, replayer.report.first_difference
        if core is None or planned is None or difference is not None or core.step >= step:
            why = f"; the replay differs from step {difference.step} on" if difference is not None else ""
            raise OutOfRange(f"the recording does not hold step {step}{why}", reason="NO_SUCH_STEP")
        self._now = planned.at
        self._core = snapshot.take(core, {})

    def __call__(self, values: Mapping[str, Any]) -> list[StepPlan]:
        """The plans made in that step with these values, one for each lane that takes one. ConfigError where they cannot hold."""
        core = self.core()
        changes.apply(core, values)
        return core.schedule(self._now)

    def core(self) -> Scheduler:
        """The core as it stood, one's own to do with as one likes."""
        return snapshot.restore(self._core)


def probe(segments: Iterable[Segment], step: int, values: Mapping[str, Any]) -> list[StepPlan]:
    """One question to a `StepProbe`; make one yourself for more about the same step."""
    return StepProbe(segments, step)(values)


def _shortest(segments: list[Segment], step: int) -> list[Segment]:
    """The segment that holds the step alone where that is enough: its snapshot stands for all before it."""
    start = max((i for i, segment in enumerate(segments) if segment.first_step <= step), default=0)
    return segments[start : start + 1]
