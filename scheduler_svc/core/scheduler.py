"""The scheduler core: a pure state machine.

`add` and `abort` change the queues, `schedule(now)` decides the next step, `update` applies its result. No I/O,
no clock, no iteration over hash-ordered collections: equal calls give equal plans. Queues and block tables live
in `state`; the policy is made of the parts in `parts/` and `policies/` (protocols in `parts/interfaces.py` and
`parts/phases.py`).
"""

from collections.abc import Iterable
from typing import Any

from block_manager import integrity
from block_manager.cache_rules import AllocStatus, PrefixHit
from block_manager.ledger import PoolReport
from block_manager.pool import PoolCounts
from scheduler_svc.core import lost_work
from scheduler_svc.core.intake import RequestIntake
from scheduler_svc.core.outputs import OutputRules, note_first_tokens
from scheduler_svc.core.parts.budget import StepBudget
from scheduler_svc.core.parts.costs import Costs
from scheduler_svc.core.parts.interfaces import InspectablePart, Placement, Progress
from scheduler_svc.core.parts.phases import Phase, RepeatablePhase
from scheduler_svc.core.parts.preemption import RECOMPUTE
from scheduler_svc.core.parts.waiting_deadlines import Deadlines
from scheduler_svc.core.plan import EndedSequence, StepOutcome, StepPlan, StepResult
from scheduler_svc.core.plan_builder import PlanBuilder
from scheduler_svc.core.plans_in_flight import PlansInFlight
from scheduler_svc.core.reasons import Reason, Revocation
from scheduler_svc.core.request import QueueKind, Request, Sequence, SequenceStatus
from scheduler_svc.core.spec.policy_spec import PolicySpec
from scheduler_svc.core.state import CoreState
from svc_common.errors import InvalidArgument, ResourceExhausted


class Scheduler:
    """Owner of all queues and, through the cache rules, of all block tables.

    Every request accepted by `add` ends exactly once: its `EndedSequence`s are in a plan, in an outcome, or
    returned by `abort` or `stop_at`.
    """

    def __init__(
        self,
        spec: PolicySpec,
        state: CoreState,
        intake: RequestIntake,
        phases: list[Phase],
        placement: Placement,
        progress: Progress,
        outputs: OutputRules,
        views: Iterable[InspectablePart] = (),
    ) -> None:
        """`presets.build` supplies the parts; `views`: those of them that implement `InspectablePart`.

        `has_worker_per_lane`: each lane is a worker with its own memory; else one worker serves all lanes.
        """
        self.has_worker_per_lane = placement.has_worker_per_lane
        self.spec = spec
        self._state = state
        self.step = 0
        self._intake = intake
        self._phases = phases
        self._repeatable = _repeatable(phases)
        self._placement = placement
        self._progress = progress
        self._outputs = outputs
        self._flights = PlansInFlight(state)
        self._views = list(views)
        self._num_granted = 0
        self._is_changed = False
        self._revoked: Revocation | None = None

    # --- requests ------------------------------------------------------------------------------------------------

    @property
    def policy(self) -> str:
        """Name of the policy."""
        return self.spec.name

    @property
    def state(self) -> CoreState:
        """The full state with all counters up to date. For inspection only: it writes back every fast-decode row."""
        self._state.fast_rows.sync_all()
        return self._state

    @property
    def depth(self) -> int:
        """Plans that may be in flight at once."""
        return self._placement.depth

    @property
    def has_unfinished(self) -> bool:
        """True while any request is unfinished."""
        return bool(self._state.requests)

    @property
    def has_endings_to_tell(self) -> bool:
        """True if requests ended since the last plan.

        One more plan must then be made to inform the workers, even if it schedules nothing.
        """
        return bool(self._state.finished)

    @property
    def num_unfinished_groups(self) -> int:
        """Groups in the waiting, running and swapped queues."""
        return len(self._state.waiting) + len(self._state.running) + len(self._state.swapped)

    def request(self, request_id: str) -> Request | None:
        """The unfinished request with that id, its counters up to date; None if there is none."""
        request = self._state.requests.get(request_id)
        for group in request.groups if request else ():
            self._state.fast_rows.sync(group)
        return request

    def add(self, request: Request) -> None:
        """Queue a request.

        Raises AlreadyExists for an id in use, InvalidArgument for an empty prompt, OutOfRange for a request
        that can never run, and, under policies with deadlines, DeadlineExceeded for one that cannot finish in
        time.
        """
        self._intake.check(request, self._state)
        self._state.journal.step = self.step + 1
        self._state.requests[request.request_id] = request
        for group in request.groups:
            if request.over and group.is_finished:
                continue
            group.place = QueueKind.WAITING
            self._state.num_wide += group.width > 1
            self._state.journal.arrived(group)
            self._state.waiting.push(group)

    def add_prefilled(self, request: Request) -> None:
        """Accept a request after its prefill on another worker (disaggregated prefill); it decodes at once.

        It must be one sequence with at least one token in `committed`; all its tokens but the last count as
        computed. Their KV must be written into its blocks (see `block_tables`) before its first plan runs.
        Raises what `add` raises; InvalidArgument for another shape or where each lane has its own worker;
        ResourceExhausted when its blocks do not fit.
        """
        if request.num_samples > 1 or not request.committed:
            raise InvalidArgument.field("committed", "must hold the first token of the only sample, which is prefilled")
        if self.has_worker_per_lane:
            raise InvalidArgument.field("committed", "cannot be taken over: which rank has its KV is not said")
        self.add(request)
        [sequence] = request.sequences
        num_computed = sequence.num_tokens - 1
        if self._state.cache.can_admit([sequence], PrefixHit(), num_computed) is not AllocStatus.OK:
            self._state.retire(sequence, SequenceStatus.FINISHED_ABORTED)
            raise ResourceExhausted(
                f"no room for the {num_computed} tokens of request {request.request_id}", reason="NO_BLOCKS"
            )
        self._state.cache.admit([sequence], PrefixHit(), num_computed)
        self._state.take_out(sequence.group)
        sequence.num_computed_tokens = sequence.prefill_end = num_computed
        self._state.running.append(sequence.group)
        self._state.start(sequence.group, self._state.journal.now)

    def abort(self, request_ids: Iterable[str]) -> list[EndedSequence]:
        """End requests in any queue and free their blocks at once. Unknown ids are ignored."""
        ended: list[EndedSequence] = []
        for request_id in request_ids:
            request = self._state.requests.get(request_id)
            for group in request.groups if request else ():
                ended += self._state.retire_group(group, SequenceStatus.FINISHED_ABORTED)
        return ended

    def stop_at(self, name: str, num_output_tokens: int) -> list[EndedSequence]:
        """End a sequence after `num_output_tokens` output tokens, where a stop string was found, and drop those
        behind.

        Returns nothing for a sequence that is unknown, has ended or has fewer output tokens.
        """
        sequence = self._find(name)
        if sequence is None or num_output_tokens > sequence.num_output_tokens:
            return []
        del sequence.token_ids[sequence.num_prompt_tokens + num_output_tokens :]
        return [self._state.retire(sequence, SequenceStatus.FINISHED_STOPPED)]

    def observe_costs(self, costs: Costs) -> None:
        """Record measured costs of work on the worker; later decisions use them."""
        self._state.costs.observe(costs)

    # --- steps ---------------------------------------------------------------------------------------------------

    def schedule(self, now: float) -> list[StepPlan]:
        """Make one plan per lane that can take one. `now`: seconds on the clock of the arrival times."""
        self._num_granted, self._is_changed = 0, False
        lanes = self._placement.free_lanes()
        return [self._plan(lane, now, is_last=lane == lanes[-1]) for lane in lanes]

    def repeat(self, now: float) -> StepPlan:
        """Plan the step that the worker began by a grant: the rows of the last plan that are left, one token each.

        Called after the result of the step before was applied.
        """
        self._num_granted -= 1
        builder = self._new_builder(now, lane=0)
        if len(self._state.waiting):
            self._state.journal.stop_all(QueueKind.WAITING, Reason.STEP_GRANTED)
        for phase in self._repeatable:
            phase.repeat(self._state, builder)
        return self._sealed(builder)

    @property
    def has_grant(self) -> bool:
        """True if granted steps are left that were not planned yet."""
        return self._num_granted > 0

    @property
    def wants_step_back(self) -> Revocation | None:
        """Why granted steps that are left would not be planned any more; None if they would, or none are left."""
        state = self._state
        if self._num_granted <= 0:
            return None
        if len(state.waiting) or state.swapped:
            return Revocation.REQUEST_WAITS
        if state.left:
            return Revocation.ROW_ENDED
        if state.is_warming_up:
            return Revocation.WARMING_UP
        return Revocation.POLICY_CHANGED if self._is_changed else None

    def revoke(self) -> None:
        """Expect no more granted steps than the worker has begun when it learns of the revocation.

        The next plan says why.
        """
        self._revoked, self._num_granted = self.wants_step_back, 0

    def update(self, result: StepResult, now: float | None = None) -> StepOutcome:
        """Apply the result of a plan: append tokens and end finished sequences. Sequences that are gone are
        skipped.

        `now`: when the result arrived, on the clock of `schedule`; None: do not record time to first token.
        """
        self._placement.on_result(result.step)
        flights = self._flights.land(result.step)
        outcome = self._outputs.apply(flights, result, self._state)
        if outcome.has_tokens:
            self._state.guard.on_tokens()
        self._state.masks.pay(result.duration_s)
        for name, seconds in result.mask_s.items():
            self._charge_masks(name, seconds)
        if flights and now is not None:
            note_first_tokens(flights, outcome, now)
        return outcome

    def warm_up(self, *, on: bool) -> None:
        """Tell whether the workers are warming up; meanwhile policies may put prompts first or schedule them alone."""
        self._state.is_warming_up = on

    def put_drafts(self, drafts: dict[str, list[int]]) -> None:
        """Set draft tokens, by sequence name; the next step verifies them. Unknown or finished sequences are ignored."""
        for name, tokens in drafts.items():
            if (sequence := self._find(name)) is not None:
                sequence.draft_token_ids = list(tokens)

    def fail_step(self, step: int, why: str) -> StepOutcome:
        """Handle a plan that the worker could not run: end its sequences with the error `why` (beams: the whole
        group).

        Sequences in later plans that may have built on the KV it was to compute are recomputed.
        """
        self._placement.on_result(step)
        return StepOutcome(ended=lost_work.fail(step, why, self._state, self._flights))

    def reset_sequences_of_lost_worker(self, lane: int | None = None) -> None:
        """Requeue all running sequences with their tokens, in order, after a worker lost its memory; drop all
        cached prefixes.

        `lane`: only that lane's worker is lost (where each lane has its own). The lane gets no plan with work
        until `take_lane_back`, and its sequences may continue on other lanes. None: all workers lost their
        memory and are back.
        """
        if lane is not None:
            self._placement.lose(lane)
            lost_work.lose_lane(lane, self._state, self._flights)
            return
        self._placement.reset()
        self._outputs.reset()
        lost_work.lose_memory(self._state, self._flights)

    def take_lane_back(self, lane: int) -> None:
        """Mark a lost lane as served again, by a worker with empty memory."""
        self._placement.take_back(lane)

    def reset_prefix_cache(self, *, preempt_running: bool = False) -> bool:
        """Drop all cached prefixes. Returns False, and drops nothing, while a block is in use.

        `preempt_running`: first requeue all running and swapped sequences, in order, at the front. Their tokens
        in flight are discarded; they are generated again and would otherwise be delivered twice.
        """
        if preempt_running:
            self._state.fast_rows.dissolve()
            lost_work.send_back([*self._state.running, *self._state.swapped], self._state, self._flights)
        return self._state.cache.try_reset_prefixes()

    # --- live changes ---------------------------------------------------------------------------------------------

    def change(self, spec: PolicySpec, progress: Progress, outputs: OutputRules, phases: list[Phase]) -> None:
        """Swap policy parts; `live_change` checks compatibility."""
        self.spec, self._progress, self._outputs, self._phases = spec, progress, outputs, phases
        self._repeatable, self._is_changed = _repeatable(phases), True

    @property
    def parts(self) -> list[object]:
        """The parts that `change` replaces."""
        return [self._progress, self._outputs, *self._phases]

    @property
    def deadlines(self) -> Deadlines | None:
        """The deadline watch; None if the policy ignores deadlines."""
        return self._intake.deadlines

    # --- inspection ----------------------------------------------------------------------------------------------

    def block_tables(self) -> dict[str, list[str]]:
        """Block tables of all sequences that hold blocks, as `{"r0/0": ["g3", "c0"]}`."""
        return self._state.cache.ledger.named_tables()

    def pool_report(self) -> PoolReport:
        """Pool sizes and reference counts."""
        return self._state.cache.ledger.report()

    def cached_blocks(self) -> list[str]:
        """Names of the free device blocks that hold a cached prefix."""
        return self._state.cache.ledger.cached_blocks()

    @property
    def pool_counts(self) -> tuple[PoolCounts, PoolCounts]:
        """Counts of the device pool and of the host pool."""
        return self._state.cache.ledger.counts()

    @property
    def queue_lengths(self) -> tuple[int, int, int]:
        """Number of waiting, running and swapped groups."""
        return len(self._state.waiting), len(self._state.running), len(self._state.swapped)

    def check_integrity(self) -> list[str]:
        """Check the ledger's invariants; returns violations, empty if there are none."""
        return integrity.check(self._state.cache.ledger)

    def view(self) -> dict[str, Any]:
        """Internal state of the policy's parts, by name: thresholds, slots, round-robin positions."""
        return {name: value for part in self._views for name, value in part.view().items()}

    # --- internals -----------------------------------------------------------------------------------------------

    def _plan(self, lane: int, now: float, *, is_last: bool) -> StepPlan:
        builder = self._new_builder(now, lane)
        builder.ended += self._outputs.before_plan(self._state)
        builder.revoked, self._revoked = self._revoked, None
        if builder.revoked is Revocation.REQUEST_WAITS:
            self._state.pause_grants(now)
        self._state.masks.begin_plan(self._state.running, self._state.fast_rows)
        for phase in self._phases:
            phase.run(self._state, builder)
        if is_last:
            self._end_what_is_stuck(builder)
        return self._sealed(builder)

    def _new_builder(self, now: float, lane: int) -> PlanBuilder:
        limits = self._state.limits
        self._state.journal.begin(self.step + 1, now)
        builder = PlanBuilder(now, StepBudget(limits.max_num_batched_tokens, limits.max_num_seqs), lane)
        builder.has_own_worker = self.has_worker_per_lane
        return builder

    def _sealed(self, builder: PlanBuilder) -> StepPlan:
        """The finished plan, which is in flight from now on."""
        if builder.entries or not builder.fast:  # rows of fast decode commit nothing
            builder.commit(self._state)
        self.step += 1
        plan = builder.seal(self.step, self._state)
        self._state.journal.step = self.step + 1
        self._num_granted = plan.grant.num_steps if plan.grant is not None else self._num_granted
        self._take_off(plan, builder)
        return plan

    def _take_off(self, plan: StepPlan, builder: PlanBuilder) -> None:
        for entry in builder.entries.values():
            self._progress.on_scheduled(entry.sequence, entry.num_tokens, entry.num_drafts)
        is_empty = plan.is_empty
        if builder.takes_lane or not is_empty:
            self._placement.on_planned(plan.lane, plan.step)
        if is_empty:
            self._placement.on_result(plan.step)  # an empty plan has an empty result
        else:
            self._flights.take_off(plan, builder)

    def _end_what_is_stuck(self, builder: PlanBuilder) -> None:
        """End the head of line when nothing runs and nothing can, so that the requests behind it are served.

        A swapped group is first recomputed instead: if it was swapped out during its prefill, the rest of its
        prompt must be computed in the step that swaps it in, and that may exceed the token budget of a step.
        """
        idle = self._state.requests and not (builder.entries or builder.fast or builder.ended or self._flights)
        idle = bool(idle) and not self._state.is_warming_up
        if self._state.masks.on_plan(is_empty=idle) or not self._state.guard.on_plan(is_empty=idle):
            return
        if self._state.swapped:
            group = self._state.swapped.pop(0)
            lost_work.restart(group, self._state)
            builder.preempted.append((group.request.request_id, RECOMPUTE))
        else:
            group = next(iter(self._state.running), None) or self._state.waiting.peek()
            builder.ended += self._state.retire_group(group, SequenceStatus.FINISHED_IGNORED, self._state.guard.why)

    def _charge_masks(self, name: str, seconds: float) -> None:
        """Charge mask time to the sequence's group, and to its tenant as an equivalent number of tokens."""
        request_id, _, index = name.rpartition("/")
        request = self._state.requests.get(request_id)
        for group in request.groups if request else ():
            if any(sequence.index == int(index) for sequence in group.live):
                self._state.masks.charge(group, seconds)
                self._state.account.held_up(group, self._state.costs.now.tokens_in(seconds))

    def _find(self, name: str) -> Sequence | None:
        request_id, _, index = name.rpartition("/")
        request = self._state.requests.get(request_id)
        for sequence in request.unfinished if request else ():
            if sequence.index == int(index):
                self._state.fast_rows.leave(sequence.group)
                return sequence
        return None


def _repeatable(phases: list[Phase]) -> list[RepeatablePhase]:
    """The phases that can grant repetitions."""
    return [phase for phase in phases if isinstance(phase, RepeatablePhase)]
