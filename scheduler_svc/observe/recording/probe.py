"""What would have been decided in one step if some value had been another: the question behind every reason that names one."""

import itertools
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Self

from scheduler_svc.core.plan import StepPlan
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.observe.recording import changes, snapshot
from scheduler_svc.observe.recording.events import Planned
from scheduler_svc.observe.recording.replay import Replayer
from scheduler_svc.observe.recording.ring import Segment
from svc_common.errors import OutOfRange, QuireError


class StepProbe:
    """A core as it stood just before a step, to be asked again and again. The recorded life itself is never changed."""

    def __init__(self, core: Scheduler, now: float) -> None:
        """The core as it stands, and the clock reading that its next step was planned with."""
        self._now = now
        self._core = snapshot.take(core, {})

    @classmethod
    def at(cls, segments: Iterable[Segment], step: int) -> Self:
        """Lives through the segments up to `step`. OutOfRange where they do not hold it, or cannot be replayed up to it."""
        [(_, found)] = cls.at_each(segments, [step])
        if isinstance(found, QuireError):
            raise found
        return found

    @classmethod
    def at_each(cls, segments: Iterable[Segment], steps: Iterable[int]) -> Iterator[tuple[int, Self | QuireError]]:
        """The same for several steps, ascending, in one life through the segments; or why there is none for a step."""
        replayer, rest = Replayer(), None
        for step in sorted(set(steps)):
            if rest is None:
                rest = replayer.run(_shortest(list(segments), step), until_step=step)
            else:
                rest = replayer.go_on(rest, until_step=step)
            planned = next(rest, None)
            core, difference = replayer.core, replayer.report.first_difference
            if core is None or not isinstance(planned, Planned) or difference is not None or core.step >= step:
                why = f"; the replay differs from step {difference.step} on" if difference is not None else ""
                yield step, OutOfRange(f"the recording does not hold step {step}{why}", reason="NO_SUCH_STEP")
            else:
                yield step, cls(core, planned.at)
            rest = itertools.chain([] if planned is None else [planned], rest)

    def __call__(self, values: Mapping[str, Any]) -> list[StepPlan]:
        """The plans made in that step with these values, one for each lane that takes one. ConfigError where they cannot hold."""
        return self.plan(self.core(), values)

    def plan(self, core: Scheduler, values: Mapping[str, Any]) -> list[StepPlan]:
        """The same with a core of one's own, which has lived through the step then."""
        changes.apply(core, values)
        return core.schedule(self._now)

    def core(self) -> Scheduler:
        """The core as it stood, one's own to do with as one likes."""
        return snapshot.restore(self._core)


def probe(segments: Iterable[Segment], step: int, values: Mapping[str, Any]) -> list[StepPlan]:
    """One question to a `StepProbe`; make one yourself for more about the same step."""
    return StepProbe.at(segments, step)(values)


def _shortest(segments: list[Segment], step: int) -> list[Segment]:
    """From the segment that holds the step on: its snapshot stands for all before it."""
    start = max((i for i, segment in enumerate(segments) if segment.first_step <= step), default=0)
    return segments[start:]
