"""The scheduler core: a pure state machine (design.md 4).

`add` and `abort` change queues, `schedule(now)` decides the next step, `update` applies its result. No I/O, no clock, no iteration
over hashes: equal calls give equal plans (R201). Queues and tables are `state`; the rules are parts (`parts.py`, `policy.py`).
"""

from collections.abc import Iterable
from typing import Any

from block_manager import integrity
from block_manager.cache_rules import AllocStatus, PrefixHit
from block_manager.ledger import PoolReport
from block_manager.pool import PoolCounts
from scheduler_svc.core import lost_work
from scheduler_svc.core.costs import Costs
from scheduler_svc.core.flights import Flights
from scheduler_svc.core.intake import Intake
from scheduler_svc.core.outputs import OutputRules, note_first_tokens
from scheduler_svc.core.parts.budget import StepBudget
from scheduler_svc.core.parts.deadlines import Deadlines
from scheduler_svc.core.parts.interfaces import Placement, Progress, View
from scheduler_svc.core.parts.preemption import RECOMPUTE
from scheduler_svc.core.plan import EndedSequence, StepOutcome, StepPlan, StepResult
from scheduler_svc.core.policy import Phase
from scheduler_svc.core.request import Place, Request, Sequence, SequenceStatus
from scheduler_svc.core.spec import PolicySpec
from scheduler_svc.core.state import CoreState
from scheduler_svc.core.step_draft import StepDraft
from svc_common.errors import InvalidArgument, ResourceExhausted


class Scheduler:
    """Owner of all queues and, through the cache rules, of all block tables.

    Every request that `add` takes ends exactly once: in `EndedSequence`s of a plan, an outcome, `abort` or `stop_at`.
    """

    def __init__(
        self,
        spec: PolicySpec,
        state: CoreState,
        intake: Intake,
        phases: list[Phase],
        placement: Placement,
        progress: Progress,
        outputs: OutputRules,
        views: Iterable[View] = (),
    ) -> None:
        """Parts come from `presets.build`; `views`: those of them that have something to show."""
        self.spec = spec
        self._state = state
        self.step = 0
        self._intake = intake
        self._phases = phases
        self._placement = placement
        self._progress = progress
        self._outputs = outputs
        self._flights = Flights(state)
        self._views = list(views)

    # --- requests ------------------------------------------------------------------------------------------------

    @property
    def policy(self) -> str:
        """Name of the policy."""
        return self.spec.name

    @property
    def state(self) -> CoreState:
        """Queues and what belongs to them, all counters up to date; for looking in, as that writes every row back."""
        self._state.steady.sync_all()
        return self._state

    @property
    def depth(self) -> int:
        """Plans that may be under way at once."""
        return self._placement.depth

    @property
    def has_worker_per_lane(self) -> bool:
        """Whether each lane is a worker with a memory of its own; else one worker has them all."""
        return self._placement.has_worker_per_lane

    @property
    def has_unfinished(self) -> bool:
        """Whether any request is left (R36)."""
        return bool(self._state.requests)

    @property
    def has_endings_to_tell(self) -> bool:
        """Whether requests ended since the last plan: one more plan tells the workers, even if it schedules nothing (R135)."""
        return bool(self._state.finished)

    @property
    def num_unfinished_groups(self) -> int:
        """Groups in all three queues (R36)."""
        return len(self._state.waiting) + len(self._state.running) + len(self._state.swapped)

    def request(self, request_id: str) -> Request | None:
        """The live request of that id, its counters up to date."""
        request = self._state.requests.get(request_id)
        for group in request.groups if request else ():
            self._state.steady.sync(group)
        return request

    def add(self, request: Request) -> None:
        """Queues a request. AlreadyExists for a live id, InvalidArgument for no tokens, OutOfRange when it can never run,
        DeadlineExceeded when it cannot be done in time (policies that look at deadlines)."""
        self._intake.check(request, self._state)
        self._state.journal.begin(self.step + 1, self._state.journal.now)
        self._state.requests[request.request_id] = request
        for group in request.groups:
            if group.is_finished:
                continue
            group.place = Place.WAITING
            self._state.num_wide += group.width > 1
            self._state.journal.arrived(group)
            self._state.waiting.push(group)

    def add_prefilled(self, request: Request) -> None:
        """Takes over a request whose known tokens but the last were computed elsewhere: it decodes at once (R167).

        It is one sequence, with `committed` tokens. Their KV must be brought into its blocks (`block_tables`) before its first plan
        runs. Errors as `add`; InvalidArgument for another shape, ResourceExhausted without room for its blocks.
        """
        if request.num_samples > 1 or not request.committed:
            raise InvalidArgument.field("committed", "must hold the first token of the only sample, which is prefilled")
        if self._placement.has_worker_per_lane:
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
        """Ends requests, wherever they stand; their blocks are free at once. Unknown ids are ignored (R35, R141)."""
        ended: list[EndedSequence] = []
        for request_id in request_ids:
            request = self._state.requests.get(request_id)
            for group in request.groups if request else ():
                ended += self._state.retire_group(group, SequenceStatus.FINISHED_ABORTED)
        return ended

    def stop_at(self, name: str, num_output_tokens: int) -> list[EndedSequence]:
        """Ends a sequence after `num_output_tokens` outputs: a stop string was found there. Unknown or over: nothing."""
        sequence = self._find(name)
        if sequence is None or num_output_tokens > sequence.num_output_tokens:
            return []
        del sequence.token_ids[sequence.num_prompt_tokens + num_output_tokens :]
        return [self._state.retire(sequence, SequenceStatus.FINISHED_STOPPED)]

    def observe_costs(self, costs: Costs) -> None:
        """What work was measured to cost on the worker; decisions from now on go by it."""
        self._state.costs.observe(costs)

    # --- steps ---------------------------------------------------------------------------------------------------

    def schedule(self, now: float) -> list[StepPlan]:
        """One plan per lane that can take one. `now`: seconds on the clock of the arrival times."""
        lanes = self._placement.free_lanes()
        return [self._plan(lane, now, is_last=lane == lanes[-1]) for lane in lanes]

    def update(self, result: StepResult, now: float | None = None) -> StepOutcome:
        """Applies what came back for a plan: appends tokens, ends what is over. Vanished sequences are skipped (R139).

        `now`: when it came back, on the clock of `schedule`; None: no request's first token is timed.
        """
        self._placement.on_result(result.step)
        flights = self._flights.land(result.step)
        outcome = self._outputs.apply(flights, result, self._state)
        if outcome.has_tokens:
            self._state.guard.on_tokens()
        self._state.masks.pay(result.duration_s)
        for name, seconds in result.mask_s.items():
            self._charge_masks(name, seconds)
        if now is not None:
            note_first_tokens(flights, outcome, now)
        return outcome

    def warm_up(self, *, on: bool) -> None:
        """The workers warm up, or are done with it: prompts come first, or alone (R168, R193)."""
        self._state.is_warming_up = on

    def put_drafts(self, drafts: dict[str, list[int]]) -> None:
        """Guesses at the next tokens, by sequence name; the next step verifies them. Unknown or over: ignored (R158)."""
        for name, tokens in drafts.items():
            if (sequence := self._find(name)) is not None:
                sequence.draft_token_ids = list(tokens)

    def fail_step(self, step: int, why: str) -> StepOutcome:
        """The worker could not run that plan: its sequences end with `why`, of beams all. Who was planned behind it, and may have
        built on what it was to compute, is computed again."""
        self._placement.on_result(step)
        return StepOutcome(ended=lost_work.fail(step, why, self._state, self._flights))

    def reset_sequences_of_lost_worker(self, lane: int | None = None) -> None:
        """The worker's memory is gone: all that ran waits again, in its order, with its tokens; no prefix is known.

        `lane`: that worker's alone, where each lane has one; it gets no plan with work until `take_lane_back`, and what was its may
        go on elsewhere. None: of all, which are there again.
        """
        if lane is not None:
            self._placement.lose(lane)
            lost_work.lose_lane(lane, self._state, self._flights)
            return
        self._placement.reset()
        self._outputs.reset()
        lost_work.lose_memory(self._state, self._flights)

    def take_lane_back(self, lane: int) -> None:
        """The lost worker of a lane is there again, or another one, with an empty memory."""
        self._placement.take_back(lane)

    def reset_prefix_cache(self, *, preempt_running: bool = False) -> bool:
        """Forgets all prefixes; False, and nothing forgotten, while a block is in use (R142).

        `preempt_running`: all that run wait again first, in their order. Their tokens under way are discarded: they are made again,
        and would come twice (R154).
        """
        if preempt_running:
            self._state.steady.dissolve()
            lost_work.send_back([*self._state.running, *self._state.swapped], self._state, self._flights)
        return self._state.cache.try_reset_prefixes()

    # --- live changes ---------------------------------------------------------------------------------------------

    def change(self, spec: PolicySpec, progress: Progress, outputs: OutputRules, phases: list[Phase]) -> None:
        """Plans by these parts from now on; only `live_change` knows which may be put in the others' place."""
        self.spec, self._progress, self._outputs, self._phases = spec, progress, outputs, phases

    @property
    def parts(self) -> list[object]:
        """What `change` puts in place."""
        return [self._progress, self._outputs, *self._phases]

    @property
    def deadlines(self) -> Deadlines | None:
        """Who watches deadlines, where the policy looks at them."""
        return self._intake.deadlines

    # --- looking in ----------------------------------------------------------------------------------------------

    def block_tables(self) -> dict[str, list[str]]:
        """`{"r0/0": ["g3", "c0"]}` of all sequences that hold blocks."""
        return self._state.cache.ledger.named_tables()

    def pool_report(self) -> PoolReport:
        """Pools and reference counts."""
        return self._state.cache.ledger.report()

    def cached_blocks(self) -> list[str]:
        """Free device blocks that hold a known prefix, by name."""
        return self._state.cache.ledger.cached_blocks()

    @property
    def pool_counts(self) -> tuple[PoolCounts, PoolCounts]:
        """Of the device's pool and of the host's."""
        return self._state.cache.ledger.counts()

    @property
    def queue_lengths(self) -> tuple[int, int, int]:
        """Groups that wait, run and are swapped out."""
        return len(self._state.waiting), len(self._state.running), len(self._state.swapped)

    def check_integrity(self) -> list[str]:
        """Violations of the ledger's invariants; empty when all is well (R200)."""
        return integrity.check(self._state.cache.ledger)

    def view(self) -> dict[str, Any]:
        """What the parts of this policy remember, by name: thresholds, lanes, cursors."""
        return {name: value for part in self._views for name, value in part.view().items()}

    # --- inside --------------------------------------------------------------------------------------------------

    def _plan(self, lane: int, now: float, *, is_last: bool) -> StepPlan:
        limits = self._state.limits
        self._state.journal.begin(self.step + 1, now)
        draft = StepDraft(now, StepBudget(limits.max_num_batched_tokens, limits.max_num_seqs), lane)
        draft.has_own_worker = self._placement.has_worker_per_lane
        draft.ended += self._outputs.before_plan(self._state)
        self._state.masks.begin_plan(self._state.running, self._state.steady)
        for phase in self._phases:
            phase.run(self._state, draft)
        if is_last:
            self._end_what_is_stuck(draft)
        draft.commit(self._state)
        self.step += 1
        plan = draft.seal(self.step, self._state)
        self._state.journal.begin(self.step + 1, now)
        self._take_off(plan, draft)
        return plan

    def _take_off(self, plan: StepPlan, draft: StepDraft) -> None:
        for entry in draft.entries.values():
            self._progress.on_scheduled(entry.sequence, entry.num_tokens, entry.num_drafts)
        if draft.takes_lane or not plan.is_empty:
            self._placement.on_planned(plan.lane, plan.step)
        if plan.is_empty:
            self._placement.on_result(plan.step)  # an empty plan has an empty result
        else:
            self._flights.take_off(plan, draft)

    def _end_what_is_stuck(self, draft: StepDraft) -> None:
        """Nothing runs and nothing can: the first in line ends, so that those behind it are served.

        What was swapped is computed again first: swapped in the middle of a prompt it must come back in one step (R86), and what is
        left of that prompt may be more than a step takes.
        """
        idle = self.has_unfinished and not (draft.entries or draft.steady or draft.ended or self._flights)
        idle = idle and not self._state.is_warming_up
        if self._state.masks.on_plan(is_empty=idle) or not self._state.guard.on_plan(is_empty=idle):
            return
        if self._state.swapped:
            group = self._state.swapped.pop(0)
            lost_work.restart(group, self._state)
            draft.preempted.append((group.request.request_id, RECOMPUTE))
        else:
            group = next(iter(self._state.running), None) or self._state.waiting.peek()
            draft.ended += self._state.retire_group(group, SequenceStatus.FINISHED_IGNORED, self._state.guard.why)

    def _charge_masks(self, name: str, seconds: float) -> None:
        """The sequence's group owes the others that time, and its tenant pays for it."""
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
                self._state.steady.leave(sequence.group)
                return sequence
        return None
