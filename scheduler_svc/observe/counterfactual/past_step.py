"""Replanning of one recorded step with other values, the basis of counterfactuals."""

import itertools
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Self

from scheduler_svc.core.plan import StepPlan
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.observe.recording import changes, snapshot
from scheduler_svc.observe.recording.events import PlanEvent
from scheduler_svc.observe.recording.replay import Replayer
from scheduler_svc.observe.recording.segment_buffer import RecordingSegment
from svc_common.errors import OutOfRange, QuireError


class PastStep:
    """A core as of just before a step, for any number of tries. The recording itself is never changed."""

    def __init__(self, core: Scheduler, now: float) -> None:
        """`core`: its current state; `now`: the clock reading that its next step was planned with."""
        self._now = now
        self._core = snapshot.take(core, {})

    @classmethod
    def at(cls, segments: Iterable[RecordingSegment], step: int) -> Self:
        """Replay the segments up to `step`. Raises OutOfRange if they do not have it or cannot be replayed up to it."""
        [(_, found)] = cls.at_each(segments, [step])
        if isinstance(found, QuireError):
            raise found
        return found

    @classmethod
    def at_each(
        cls, segments: Iterable[RecordingSegment], steps: Iterable[int]
    ) -> Iterator[tuple[int, Self | QuireError]]:
        """`at` for several steps in one replay, in ascending order; yields the error for steps that are not available."""
        replayer, rest = Replayer(), None
        for step in sorted(set(steps)):
            if rest is None:
                rest = replayer.run(_shortest(list(segments), step), until_step=step)
            else:
                rest = replayer.go_on(rest, until_step=step)
            planned = next(rest, None)
            core, difference = replayer.core, replayer.report.first_difference
            if core is None or not isinstance(planned, PlanEvent) or difference is not None or core.step >= step:
                why = f"; the replay differs from step {difference.step} on" if difference is not None else ""
                yield step, OutOfRange(f"the recording does not hold step {step}{why}", reason="NO_SUCH_STEP")
            else:
                yield step, cls(core, planned.at)
            rest = itertools.chain([] if planned is None else [planned], rest)

    def __call__(self, values: Mapping[str, Any]) -> list[StepPlan]:
        """The plans of that step with these values, one per lane with work. Raises ConfigError for contradictory values."""
        return self.plan(self.core(), values)

    def plan(self, core: Scheduler, values: Mapping[str, Any]) -> list[StepPlan]:
        """Plan the step on the caller's `core`, which is advanced by it."""
        changes.apply(core, values)
        return core.schedule(self._now)

    def core(self) -> Scheduler:
        """A new copy of the core before the step."""
        return snapshot.restore(self._core)


def _shortest(segments: list[RecordingSegment], step: int) -> list[RecordingSegment]:
    """The segments from the one with the step on, since its snapshot covers all before."""
    start = max((i for i, segment in enumerate(segments) if segment.first_step <= step), default=0)
    return segments[start:]
