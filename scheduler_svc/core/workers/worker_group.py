"""One worker group as the scheduler plans it: its state, the phases that fill its steps, and its plans in flight."""

from collections.abc import Iterable, Sequence

from scheduler_svc.core import lost_work
from scheduler_svc.core.outputs import OutputRules, note_first_tokens
from scheduler_svc.core.parts.budget import StepBudget
from scheduler_svc.core.parts.interfaces import InspectablePart, LaneChoice, Progress
from scheduler_svc.core.parts.phases import Phase, RepeatablePhase
from scheduler_svc.core.parts.preemption import RECOMPUTE
from scheduler_svc.core.plan import StepOutcome, StepPlan, StepResult
from scheduler_svc.core.plan_builder import PlanBuilder
from scheduler_svc.core.plans_in_flight import PlansInFlight
from scheduler_svc.core.reasons import Reason, Revocation
from scheduler_svc.core.request import Group, QueueKind, SequenceStatus
from scheduler_svc.core.state import CoreState


class WorkerGroup:
    """Owner of one worker group's part of the state, and of its parts. Step numbers are the scheduler's.

    A group of lanes: one, or the scheduler groups, slots or ranks of a task policy. Lanes are numbered through all
    worker groups: lane i of this one is `first_lane + i` in its plans. `views`: the parts that implement `InspectablePart`.
    `moves_groups`: running groups may move to and from other worker groups (`live_move`).
    """

    def __init__(
        self,
        state: CoreState,
        phases: list[Phase],
        lanes: LaneChoice,
        progress: Progress,
        outputs: OutputRules,
        views: Iterable[InspectablePart] = (),
        *,
        first_lane: int = 0,
        moves_groups: bool = True,
    ) -> None:
        self.state = state
        self.moves_groups = moves_groups and not lanes.keeps_groups
        self.lanes = lanes
        self.flights = PlansInFlight(state)
        self.first_lane = first_lane
        self.views = list(views)
        self._phases = phases
        self._repeatable = _repeatable(phases)
        self._progress = progress
        self._outputs = outputs
        self._num_granted = 0
        self.was_empty = True
        self._seen: dict[int, int] = {}
        self._num_started = 0
        self._is_changed = False
        self._revoked: Revocation | None = None

    # --- plans -------------------------------------------------------------------------------------------------------

    def begin(self) -> list[int]:
        """Begin a call of `schedule`: what was granted is over. Returns the lanes that can take a plan, by their own numbers."""
        self._num_granted, self._is_changed = 0, False
        return self.lanes.free_lanes()

    def plan(self, step: int, lane: int, now: float, *, is_last: bool, alone: bool) -> StepPlan:
        """The plan of a lane. `is_last`: of those that can take a plan now; `alone`: see `is_alone`."""
        builder = self._new_builder(step, now, lane)
        self.state.num_plans += 1
        builder.ended += self.state.shared.take_ended()
        builder.ended += self._outputs.before_plan(self.state)
        builder.revoked, self._revoked = self._revoked, None
        if builder.revoked is Revocation.REQUEST_WAITS:
            self.state.pause_grants(now)
        self._let_in()
        self.state.masks.begin_plan(self.state.number, self.state.running, self.state.fast_rows)
        if self.state.held:
            self._hold_back()
        for phase in self._phases:
            phase.run(self.state, builder)
        if is_last:
            self._end_what_is_stuck(builder, alone=alone)
        return self._sealed(step, builder)

    def repeat(self, step: int, now: float) -> StepPlan:
        """The plan of the step that the worker began by a grant: the rows of the last plan that are left, one token each."""
        self._num_granted -= 1
        builder = self._new_builder(step, now, lane=0)
        if len(self.state.waiting):
            self.state.journal.stop_all(QueueKind.WAITING, Reason.STEP_GRANTED)
        for phase in self._repeatable:
            phase.repeat(self.state, builder)
        return self._sealed(step, builder)

    def is_alone(self, others: Iterable["WorkerGroup"]) -> bool:
        """True if the last plan of each of the others had no work although it takes work, and nothing is in flight."""
        return all(o.state.is_gone or (o.was_empty and o.state.takes_work and not o.flights) for o in others)

    def _has_seen_all(self) -> bool:
        """True if each of the other worker groups was planned since the last time that this was true."""
        now = {other.number: other.num_plans for other in self.state.shared.workers if not other.is_gone}
        if not all(now[number] > self._seen.get(number, 0) for number in now if number != self.state.number):
            return False
        self._seen = now
        return True

    def _let_in(self) -> None:
        """Have groups that moved here take part from this plan on."""
        for group in self.state.joined:
            group.is_paused = False
        self.state.joined.clear()

    def _hold_back(self) -> None:
        """Have held groups sit out the next plan, as far as they run here still."""
        state = self.state
        for group in state.held:
            group.is_paused = group.is_paused and group.place is not QueueKind.WAITING  # it was preempted
        state.held = [g for g in state.held if g.place is QueueKind.RUNNING and g.worker == state.number]
        for group in state.held:
            state.fast_rows.leave(group)
            group.is_paused = True

    @property
    def has_grant(self) -> bool:
        """True if granted steps are left that were not planned yet."""
        return self._num_granted > 0

    @property
    def wants_step_back(self) -> Revocation | None:
        """Why granted steps that are left would not be planned any more; None if they would, or none are left."""
        state = self.state
        if self._num_granted <= 0:
            return None
        if len(state.waiting) or state.swapped or state.arrived or state.held:
            return Revocation.REQUEST_WAITS
        if state.left:
            return Revocation.ROW_ENDED
        if state.is_warming_up:
            return Revocation.WARMING_UP
        return Revocation.POLICY_CHANGED if self._is_changed else None

    def revoke(self) -> None:
        """Expect no more granted steps than the worker has begun. The next plan says why."""
        self._revoked, self._num_granted = self.wants_step_back, 0

    # --- results -----------------------------------------------------------------------------------------------------

    def update(self, result: StepResult, now: float | None) -> StepOutcome:
        """Apply the result of a plan. Sequences that are gone are skipped."""
        self.state.queued_tokens = None
        self.lanes.on_result(result.step)
        flights = self.flights.land(result.step)
        outcome = self._outputs.apply(flights, result, self.state)
        if outcome.has_tokens:
            self.state.guard.on_tokens()
        self.state.masks.pay(result.duration_s)
        if flights and now is not None:
            note_first_tokens(flights, outcome, now)
        return outcome

    def fail_step(self, step: int, why: str) -> StepOutcome:
        """Handle a plan that the worker could not run (`lost_work.fail`)."""
        self.state.queued_tokens = None
        self.lanes.on_result(step)
        return StepOutcome(ended=lost_work.fail(step, why, self.state, self.flights))

    def lose_memory(self) -> None:
        """Requeue what runs here with its tokens, in order, and drop all cached prefixes: the worker's memory is lost."""
        self.lanes.reset()
        self._outputs.reset()
        self._num_granted, self.state.queued_tokens = 0, None
        lost_work.lose_memory(self.state, self.flights)

    def lose(self) -> None:
        """The same where other worker groups take over; no group starts here until `Scheduler.take_worker_back`."""
        self._end_pending()
        self.lose_memory()
        self.state.takes_work = False
        self.lanes.vacate()
        for request in self.state.requests.values():
            for group in request.groups:
                if group.worker == self.state.number:
                    group.lane = None

    def _end_pending(self) -> None:
        for group in [*self.state.running, *self.state.swapped]:
            self.end_pending(group)

    def end_pending(self, group: Group) -> None:
        """Handle pending ends of a group's sequences, before these could start elsewhere."""
        self.state.shared.ended += self._outputs.drain(group, self.state)

    def drop(self, group: Group) -> None:
        """Take a group without outstanding results off this worker group, which frees its blocks."""
        state = self.state
        state.queued_tokens = None
        state.fast_rows.leave(group)
        state.take_out(group)
        for sequence in group.live:
            state.cache.release(sequence)
            state.leave_worker(sequence)
        group.lane = None

    def lose_lane(self, lane: int) -> None:
        """The same for one lane that has a worker of its own. It gets no work until `LaneChoice.take_back`."""
        self.lanes.lose(lane)
        lost_work.lose_lane(lane, self.state, self.flights)

    def send_back(self, keep: Sequence[Group] = ()) -> None:
        """Requeue all running and swapped groups but `keep`, in order, at the front; the results of their plans in flight are
        ignored.
        """
        self._end_pending()
        self.state.fast_rows.dissolve()
        self.state.queued_tokens = None
        back = [group for group in (*self.state.running, *self.state.swapped) if group not in keep]
        lost_work.send_back(back, self.state, self.flights)

    # --- live changes --------------------------------------------------------------------------------------------------

    def change(self, progress: Progress, outputs: OutputRules, phases: list[Phase]) -> None:
        """Swap policy parts; `live_change` checks compatibility."""
        self._progress, self._outputs, self._phases = progress, outputs, phases
        self._repeatable, self._is_changed = _repeatable(phases), True

    @property
    def parts(self) -> list[object]:
        """The parts that `change` replaces."""
        return [self._progress, self._outputs, *self._phases]

    # --- internals -----------------------------------------------------------------------------------------------------

    def _new_builder(self, step: int, now: float, lane: int) -> PlanBuilder:
        limits = self.state.limits
        self.state.queued_tokens = None
        self.state.journal.begin(step, now)
        builder = PlanBuilder(now, StepBudget(limits.max_num_batched_tokens, limits.max_num_seqs), lane)
        builder.has_own_worker = self.lanes.has_worker_per_lane
        return builder

    def _sealed(self, step: int, builder: PlanBuilder) -> StepPlan:
        """The finished plan, which is in flight from now on."""
        if builder.entries or not builder.fast:  # rows of fast decode commit nothing
            builder.commit(self.state)
        plan = builder.seal(step, self.state, self.first_lane)
        self.state.journal.step = step + 1
        self.state.queued_tokens = None
        self._num_granted = plan.grant.num_steps if plan.grant is not None else self._num_granted
        self.was_empty = plan.is_empty
        for entry in builder.entries.values():
            self._progress.on_scheduled(entry.sequence, entry.num_tokens, entry.num_drafts)
        if builder.takes_lane or not plan.is_empty:
            self.lanes.on_planned(builder.lane, step)
        if plan.is_empty:
            self.lanes.on_result(step)  # an empty plan has an empty result
        else:
            self.flights.take_off(plan, builder)
        return plan

    def _end_what_is_stuck(self, builder: PlanBuilder, *, alone: bool) -> None:
        """End the head of line when nothing runs and nothing can, so that the requests behind it are served.

        A swapped group is first recomputed instead: if it was swapped out during its prefill, the rest of its
        prompt must be computed in the step that swaps it in, and that may exceed the token budget of a step.
        """
        state = self.state
        idle = state.requests and not (builder.entries or builder.fast or builder.ended or self.flights)
        blocked = not state.is_idle or (alone and state.takes_work and state.is_largest and len(state.waiting) > 0)
        idle = bool(idle) and blocked and not state.is_warming_up and not state.held
        if idle and state.is_idle:
            if not self._has_seen_all():
                return
            if self._num_started != state.shared.num_started:  # what waited was left to another worker group
                self._num_started = state.shared.num_started
                state.guard.on_plan(is_empty=False)
        if state.masks.on_plan(is_empty=idle) or not state.guard.on_plan(is_empty=idle):
            return
        if state.swapped:
            group = state.swapped.pop(0)
            lost_work.restart(group, state)
            builder.preempted.append((group.request.request_id, RECOMPUTE))
        elif state.running and not state.is_largest:
            lost_work.outgrow(state.running[0], state)
        else:
            group = next(iter(state.running), None) or state.waiting.peek()
            builder.ended += state.retire_group(group, SequenceStatus.FINISHED_IGNORED, state.guard.why)


def _repeatable(phases: list[Phase]) -> list[RepeatablePhase]:
    """The phases that can grant repetitions."""
    return [phase for phase in phases if isinstance(phase, RepeatablePhase)]
