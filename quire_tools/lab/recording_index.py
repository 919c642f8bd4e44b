"""One full replay of a recording: all steps as columns, every request's timeline, and segments to restart from."""

from collections.abc import Iterator
from dataclasses import dataclass

from gateway_svc.lab.source import Overview
from quire_tools.reasons_now import ReasonsNow
from scheduler_svc.core.plan import StepPlan
from scheduler_svc.observe.recording.file_format import Recording
from scheduler_svc.observe.recording.replay import Replayer, ReplayReport
from scheduler_svc.observe.recording.segment_buffer import RecordingSegment
from scheduler_svc.observe.run_observer import RunObserver
from scheduler_svc.observe.step_record import StepOrigin, StepRecord
from scheduler_svc.observe.timelines import Timelines

_NS_PER_MS = 1e6
_ALL = 2**62


@dataclass(frozen=True, slots=True)
class ReplayStart:
    """A segment to replay from: its index in the file, its first step, and the reasons of each request at that point."""

    segment: int
    first_step: int
    reasons: ReasonsNow


class RecordingIndex(RunObserver):
    """Observer of the replay of a whole recording. `report`: whether every decision was as recorded."""

    def __init__(self, recording: Recording) -> None:
        self.overview = Overview()
        self.starts: list[ReplayStart] = []
        self.timelines = Timelines(lambda request_id: True, num_logged=_ALL)
        self._reasons = ReasonsNow()
        self._place: dict[int, int] = {}
        self.report = self._live(recording)

    def _live(self, recording: Recording) -> ReplayReport:
        replayer = Replayer(self)
        replayer.run(self._noted(recording.segments()))
        replayer.close()
        return replayer.report

    def _noted(self, segments: Iterator[RecordingSegment]) -> Iterator[RecordingSegment]:
        for place, segment in enumerate(segments):
            self.starts.append(ReplayStart(place, segment.first_step, self._reasons.copy()))
            yield segment

    # --- what happens ------------------------------------------------------------------------------------------------

    def on_plan(self, plan: StepPlan, origin: StepOrigin) -> None:
        """Append the step."""
        self.timelines.observe(plan.events)
        self._reasons.observe(plan)
        if plan.is_empty:
            return
        columns = self.overview
        self._place[plan.step] = len(columns.step)
        columns.step.append(plan.step)
        columns.lane.append(plan.lane)
        columns.at_ms.append(origin.planned_ns / _NS_PER_MS)
        columns.finished_ms.append(0.0)
        columns.duration_ms.append(0.0)
        prefill = sum(entry.num_tokens for entry in plan.entries if entry.is_prefill)
        columns.prefill_tokens.append(prefill)
        columns.decode_tokens.append(plan.num_tokens - prefill)
        columns.num_moved.append(len(plan.swap_in) + len(plan.swap_out) + len(plan.copy))
        columns.num_preempted.append(len(plan.preempted))

    def on_end(self, record: StepRecord) -> None:
        """Add when it ended, and its duration."""
        place = self._place.pop(record.step)
        self.overview.finished_ms[place] = record.closed_ns / _NS_PER_MS
        self.overview.duration_ms[place] = record.duration_ns / _NS_PER_MS
