"""Replay of a recording: feed every input to a core in order and compare every decision with the recorded one."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from scheduler_svc.core.composition import live_change
from scheduler_svc.core.limits import CoreLimits, PoolSize
from scheduler_svc.core.parts.costs import Costs
from scheduler_svc.core.plan import EndedSequence, StepPlan, StepResult
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.core.spec.policy_spec import PolicySpec
from scheduler_svc.observe.plan_record import PlanFreezer, StepShapeColumns, endings
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
    GroupHeld,
    GroupMoved,
    PlanEvent,
    PrefixesReset,
    Returned,
    Revoked,
    StoppedAt,
    WarmedUp,
    WorkerBack,
    WorkerDrained,
    WorkerGone,
    WorkerLost,
    WorkerPut,
)
from scheduler_svc.observe.recording.inputs import token_ids
from scheduler_svc.observe.recording.recorder import failure
from scheduler_svc.observe.recording.segment_buffer import RecordingSegment
from scheduler_svc.observe.run_observer import EndCause, RunNotifier, RunObserver
from svc_common.errors import QuireError

_I32 = np.dtype("<i4")


@dataclass(slots=True)
class ReplayReport:
    """`steps`: plans made. `first_difference`: None if every decision equals the recorded one."""

    steps: int = 0
    first_difference: Difference | None = None

    @property
    def identical(self) -> bool:
        """True if every decision equals the recorded one."""
        return self.first_difference is None


class Replayer:
    """Runs a core through recorded segments, for `observers`. `now`: seconds on the recorded clock."""

    def __init__(self, *observers: RunObserver) -> None:
        self.core: Scheduler | None = None
        self.report = ReplayReport()
        self.now = 0.0
        self._steps = RunNotifier(observers, lambda: self.now)
        self._freezer = PlanFreezer()
        self._shapes: dict[int, StepShapeColumns] = {}
        self._in_flight: dict[int, StepPlan] = {}

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

    def close(self) -> None:
        """End the steps that have no result in the recording; no event follows."""
        self._steps.close()

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
            self.core.dissolve_fast_rows()
            return
        self._in_flight.clear()
        self.core = snapshot.restore(segment.snapshot)
        self._freezer = PlanFreezer()
        self._steps.start(self.core, self._freezer)

    def _live(self, event: Event) -> None:
        self.now = max(self.now, event.at)
        _LIVE[type(event)](self, event)

    # --- by kind -----------------------------------------------------------------------------------------------------

    def _added(self, event: Added) -> None:
        refusal, request = None, event.request.request()
        try:
            (self._core.add_prefilled if event.prefilled else self._core.add)(request)
        except QuireError as error:
            refusal = error
        self._steps.requested(request, refusal)
        self._compare("refused", event.refused, refusal.reason if refusal is not None else "")

    def _aborted(self, event: AbortEvent) -> None:
        self._ended(event, self._core.abort(event.request_ids), "abort")

    def _stopped_at(self, event: StoppedAt) -> None:
        self._ended(event, self._core.stop_at(event.name, event.num_output_tokens), "stop_string")

    def _ended(self, event: AbortEvent | StoppedAt, ended: list[EndedSequence], cause: EndCause) -> None:
        self._steps.ended(ended, cause)
        self._compare("ended", event.ended, endings(ended))

    def _planned(self, event: PlanEvent) -> None:
        failed, plans = "", list[StepPlan]()
        try:
            plans = self._plans(event)
        except Exception as error:
            failed = failure(error)
        records = self._freezer.of_all(plans)
        for plan in plans:
            self._steps.scheduled(self._core, plan)
        self.report.steps += len(plans)
        self._compare("failed", event.failed, failed)
        self._compare("num_plans", len(event.decisions), len(plans))
        for recorded, plan, record in zip(event.decisions, plans, records, strict=False):
            self._shapes[recorded.step], self._in_flight[recorded.step] = recorded.shape, plan
            self.report.first_difference = self.report.first_difference or first_difference(recorded, record)

    def _plans(self, event: PlanEvent) -> list[StepPlan]:
        if event.is_repeat:
            return [self._core.repeat(event.at, event.worker or 0)]
        return self._core.schedule(event.at, event.worker)

    def _returned(self, event: Returned) -> None:
        plan, shape = self._landed(event.result.step), self._shapes.pop(event.result.step, None)
        result = event.result.result(shape.sampling if shape is not None else ())
        outcome = self._core.update(result, event.now)
        self._steps.answered(plan, result, None, outcome)
        self._compare("ended", event.ended, endings(outcome.ended), plan.step)
        self._compare("dropped", event.dropped, outcome.dropped, plan.step)

    def _failed(self, event: Failed) -> None:
        plan = self._landed(event.step)
        self._shapes.pop(event.step, None)
        outcome = self._core.fail_step(event.step, event.why)
        self._steps.answered(plan, StepResult(event.step), event.why, outcome)
        self._compare("ended", event.ended, endings(outcome.ended), event.step)

    def _landed(self, step: int) -> StepPlan:
        """The plan of the step; an empty one if it was made before the replay began."""
        return self._in_flight.pop(step, None) or StepPlan(step, 0)

    def _drafted(self, event: Drafted) -> None:
        counts = np.frombuffer(event.counts, _I32)
        ends = np.cumsum(counts).tolist()
        ids = token_ids(event.tokens)
        runs = [ids[end - count : end] for end, count in zip(ends, counts.tolist(), strict=True)]
        self._core.put_drafts(dict(zip(event.names, runs, strict=True)))

    def _worker_lost(self, event: WorkerLost) -> None:
        core, lost = self._core, event.worker
        core.reset_sequences_of_lost_worker(lost)
        if lost is None:
            self._shapes.clear()
        self._in_flight = {s: p for s, p in self._in_flight.items() if lost not in (None, core.worker_of(p.lane))}
        self._steps.lost(lost)

    def _worker_back(self, event: WorkerBack) -> None:
        self._core.take_worker_back(event.worker)

    def _worker_put(self, event: WorkerPut) -> None:
        live_change.put_worker(self._core, event.number, PoolSize(**event.pool), CoreLimits(**event.limits))

    def _worker_drained(self, event: WorkerDrained) -> None:
        if event.is_moved:
            self._core.send_back(event.worker, keep_movable=event.keep_movable)
        else:
            self._core.drain_worker(event.worker)

    def _group_held(self, event: GroupHeld) -> None:
        (self._core.hold if event.on else self._core.let_go)(event.name)

    def _group_moved(self, event: GroupMoved) -> None:
        done = self._core.hand_over(event.name, event.worker, event.image)
        self._compare("group_moved", event.done, done)

    def _worker_gone(self, event: WorkerGone) -> None:
        self._core.remove_worker(event.worker)

    def _prefixes_reset(self, event: PrefixesReset) -> None:
        done = self._core.reset_prefix_cache(preempt_running=event.preempt_running)
        self._compare("prefixes_reset", event.done, done)

    def _changed(self, event: Changed) -> None:
        live_change.reconfigure(self._core, PolicySpec(**event.spec), CoreLimits(**event.limits))

    def _costs_seen(self, event: CostsSeen) -> None:
        self._core.observe_costs(Costs(**event.costs), event.worker)

    def _revoked(self, event: Revoked) -> None:
        self._core.revoke(event.worker)

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
    WorkerBack: Replayer._worker_back,
    WorkerPut: Replayer._worker_put,
    WorkerDrained: Replayer._worker_drained,
    WorkerGone: Replayer._worker_gone,
    GroupHeld: Replayer._group_held,
    GroupMoved: Replayer._group_moved,
    Revoked: Replayer._revoked,
}


def _chained(first: Event, rest: Iterator[Event]) -> Iterator[Event]:
    yield first
    yield from rest


def replay(segments: Iterable[RecordingSegment], *observers: RunObserver) -> ReplayReport:
    """Replay segments from the first one's snapshot; stops at the first difference."""
    replayer = Replayer(*observers)
    replayer.run(segments)
    return replayer.report
