"""Replay of a recording: feed every input to a core in order and compare every decision with the recorded one."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from scheduler_svc.core.composition import live_change
from scheduler_svc.core.limits import CoreLimits
from scheduler_svc.core.parts.costs import Costs
from scheduler_svc.core.plan import EndedSequence, StepOutcome, StepPlan
from scheduler_svc.core.request import Request
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.core.spec.policy_spec import PolicySpec
from scheduler_svc.observe.plan_record import PlanFreezer, PlanRecord, StepShapeColumns, endings
from scheduler_svc.observe.recording import snapshot
from scheduler_svc.observe.recording.difference import Difference, first_difference
from scheduler_svc.observe.recording.events import (
    AbortEvent,
    Added,
    Changed,
    CostsSeen,
    Drafted,
    Event,
    Failed,
    LaneBack,
    PlanEvent,
    PrefixesReset,
    Returned,
    Revoked,
    StoppedAt,
    WarmedUp,
    WorkerLost,
)
from scheduler_svc.observe.recording.history import ReplayHistory
from scheduler_svc.observe.recording.inputs import token_ids
from scheduler_svc.observe.recording.recorder import failure
from scheduler_svc.observe.recording.segment_buffer import RecordingSegment
from svc_common.errors import QuireError

_I32 = np.dtype("<i4")


@dataclass(slots=True)
class ReplayReport:
    """`steps`: plans made. `first_difference`: None if every decision equals the recorded one."""

    steps: int = 0
    first_difference: Difference | None = None
    history: ReplayHistory = field(default_factory=ReplayHistory)

    @property
    def identical(self) -> bool:
        """True if every decision equals the recorded one."""
        return self.first_difference is None


class Watcher(Protocol):
    """Observer of a replay. Times are seconds on the recorded clock."""

    def began(self, core: Scheduler) -> None:
        """The replay starts or continues with this core."""

    def arrived(self, request: Request, at: float) -> None:
        """A request was added."""

    def planned(self, plan: StepPlan, at: float) -> None:
        """A plan was made."""

    def returned(self, event: "Returned | Failed", outcome: StepOutcome) -> None:
        """A plan's result, or its failure, arrived."""

    def ended(self, event: "AbortEvent | StoppedAt", ended: list[EndedSequence]) -> None:
        """Requests ended outside of a step."""

    def lost_worker(self, lane: int | None) -> None:
        """Plans in flight have no results; `lane`: only plans for that lane."""


class Replayer:
    """Runs a core through recorded segments, and reports to `watcher`."""

    def __init__(self, watcher: Watcher | None = None) -> None:
        self.core: Scheduler | None = None
        self.report = ReplayReport()
        self.now = 0.0
        self._watcher = watcher
        self._freezer = PlanFreezer()
        self._shapes: dict[int, StepShapeColumns] = {}

    def run(self, segments: Iterable[RecordingSegment], *, until_step: int | None = None) -> Iterator[Event]:
        """Replay the segments while decisions agree. `until_step`: stop just before the `schedule` call that plans that step.

        Returns the remaining events, to continue in another way.
        """
        return self.go_on(self._events(segments), until_step=until_step)

    def go_on(self, events: Iterator[Event], *, until_step: int | None = None) -> Iterator[Event]:
        """Continue with the events that an earlier run returned."""
        for event in events:
            if until_step is not None and isinstance(event, PlanEvent) and self._plans_up_to(event) >= until_step:
                return _chained(event, events)
            self._live(event)
            if self.report.first_difference is not None:
                break
        return iter(())

    @property
    def _core(self) -> Scheduler:
        assert self.core is not None
        return self.core

    def _plans_up_to(self, event: PlanEvent) -> int:
        """The last step that is planned in that call."""
        return self._core.step + max(1, len(event.decisions))

    def _events(self, segments: Iterable[RecordingSegment]) -> Iterator[Event]:
        for segment in segments:
            self._enter(segment)
            yield from segment.events

    def _enter(self, segment: RecordingSegment) -> None:
        """Continue with the same core if the segment allows it, else restore the segment's snapshot."""
        self._shapes.clear()
        if self.core is not None and segment.goes_on:
            self.core.state.fast_rows.dissolve()
            return
        self.core = snapshot.restore(segment.snapshot)
        self._freezer = PlanFreezer()
        self.report.history.begin(self.core)
        if self._watcher is not None:
            self._watcher.began(self.core)

    def _live(self, event: Event) -> None:
        self.now = max(self.now, event.at)
        _LIVE[type(event)](self, event)

    # --- by kind -----------------------------------------------------------------------------------------------------

    def _added(self, event: Added) -> None:
        refused = ""
        try:
            request = event.request.request()
            (self._core.add_prefilled if event.prefilled else self._core.add)(request)
            self.report.history.arrived(request)
            if self._watcher is not None:
                self._watcher.arrived(request, event.at)
        except QuireError as error:
            refused = error.reason
        self._compare("refused", event.refused, refused)

    def _aborted(self, event: AbortEvent) -> None:
        ended = self._core.abort(event.request_ids)
        self.report.history.ended(ended, self._core.step)
        if self._watcher is not None:
            self._watcher.ended(event, ended)
        self._compare("ended", event.ended, endings(ended))

    def _stopped_at(self, event: StoppedAt) -> None:
        ended = self._core.stop_at(event.name, event.num_output_tokens)
        self.report.history.ended(ended, self._core.step)
        if self._watcher is not None:
            self._watcher.ended(event, ended)
        self._compare("ended", event.ended, endings(ended))

    def _planned(self, event: PlanEvent) -> None:
        failed, plans = "", list[StepPlan]()
        try:
            plans = [self._core.repeat(event.at)] if event.is_repeat else self._core.schedule(event.at)
        except Exception as error:
            failed = failure(error)
        for plan in plans:
            self.report.history.planned(plan)
            if self._watcher is not None:
                self._watcher.planned(plan, event.at)
        self.report.steps += len(plans)
        self._compare("failed", event.failed, failed)
        self._compare("num_plans", len(event.decisions), len(plans))
        for recorded, plan in zip(event.decisions, plans, strict=False):
            self._compare_plan(recorded, plan)

    def _compare_plan(self, recorded: PlanRecord, plan: StepPlan) -> None:
        self._shapes[recorded.step] = recorded.shape
        found = first_difference(recorded, self._freezer.of(plan))
        self.report.first_difference = self.report.first_difference or found

    def _returned(self, event: Returned) -> None:
        shape = self._shapes.pop(event.result.step, None)
        outcome = self._core.update(event.result.result(shape.sampling if shape is not None else ()), event.now)
        self._outcome(event, outcome, event.result.step)
        self._compare("ended", event.ended, endings(outcome.ended), event.result.step)
        self._compare("dropped", event.dropped, outcome.dropped, event.result.step)

    def _failed(self, event: Failed) -> None:
        self._shapes.pop(event.step, None)
        outcome = self._core.fail_step(event.step, event.why)
        self._outcome(event, outcome, event.step)
        self._compare("ended", event.ended, endings(outcome.ended), event.step)

    def _outcome(self, event: Returned | Failed, outcome: StepOutcome, step: int) -> None:
        self.report.history.got(outcome, step)
        if self._watcher is not None:
            self._watcher.returned(event, outcome)

    def _drafted(self, event: Drafted) -> None:
        counts = np.frombuffer(event.counts, _I32)
        ends = np.cumsum(counts).tolist()
        ids = token_ids(event.tokens)
        runs = [ids[end - count : end] for end, count in zip(ends, counts.tolist(), strict=True)]
        self._core.put_drafts(dict(zip(event.names, runs, strict=True)))

    def _worker_lost(self, event: WorkerLost) -> None:
        self._core.reset_sequences_of_lost_worker(event.lane)
        if event.lane is None:
            self._shapes.clear()
        if self._watcher is not None:
            self._watcher.lost_worker(event.lane)

    def _lane_back(self, event: LaneBack) -> None:
        self._core.take_lane_back(event.lane)

    def _prefixes_reset(self, event: PrefixesReset) -> None:
        done = self._core.reset_prefix_cache(preempt_running=event.preempt_running)
        self._compare("prefixes_reset", event.done, done)

    def _changed(self, event: Changed) -> None:
        live_change.reconfigure(self._core, PolicySpec(**event.spec), CoreLimits(**event.limits))

    def _costs_seen(self, event: CostsSeen) -> None:
        self._core.observe_costs(Costs(**event.costs))

    def _revoked(self, event: Revoked) -> None:
        self._core.revoke()

    def _warmed_up(self, event: WarmedUp) -> None:
        self._core.warm_up(on=event.on)

    def _compare(self, name: str, recorded: Any, got: Any, step: int | None = None) -> None:
        if recorded != got and self.report.first_difference is None:
            at = self._core.step if step is None else step
            self.report.first_difference = Difference(at, name, recorded, got)


_LIVE: dict[type[Any], Callable[[Replayer, Any], None]] = {
    Added: Replayer._added,
    AbortEvent: Replayer._aborted,
    StoppedAt: Replayer._stopped_at,
    PlanEvent: Replayer._planned,
    Returned: Replayer._returned,
    Failed: Replayer._failed,
    Drafted: Replayer._drafted,
    WorkerLost: Replayer._worker_lost,
    PrefixesReset: Replayer._prefixes_reset,
    Changed: Replayer._changed,
    CostsSeen: Replayer._costs_seen,
    WarmedUp: Replayer._warmed_up,
    LaneBack: Replayer._lane_back,
    Revoked: Replayer._revoked,
}


def _chained(first: Event, rest: Iterator[Event]) -> Iterator[Event]:
    yield first
    yield from rest


def replay(segments: Iterable[RecordingSegment]) -> ReplayReport:
    """Replay segments from the first one's snapshot; stops at the first difference."""
    replayer = Replayer()
    replayer.run(segments)
    return replayer.report
