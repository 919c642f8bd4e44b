"""The scheduler core: a pure state machine (design.md 4).

`add` and `abort` change queues, `schedule(now)` decides the next step, `update` applies its result. No I/O, no clock, no iteration
over hashes: equal calls give equal plans (R201). Queues and tables are `state`; the rules are parts (`parts.py`, `policy.py`).
"""

from collections.abc import Iterable

from block_manager import integrity
from block_manager.ledger import PoolReport
from scheduler_svc.core.budget import StepBudget
from scheduler_svc.core.intake import Intake
from scheduler_svc.core.outputs import Flight, OutputRules
from scheduler_svc.core.parts import Placement, Progress
from scheduler_svc.core.plan import EndedSequence, StepOutcome, StepPlan, StepResult
from scheduler_svc.core.policy import Phase
from scheduler_svc.core.request import Group, Place, Request, Sequence, SequenceStatus
from scheduler_svc.core.state import CoreState
from scheduler_svc.core.step_draft import StepDraft

STUCK = "it could not go on although nothing else was running: it needs more of the cache than there is"


class Scheduler:
    """Owner of all queues and, through the cache rules, of all block tables.

    Every request that `add` takes ends exactly once: in `EndedSequence`s of a plan, an outcome, `abort` or `stop_at`.
    """

    def __init__(
        self,
        policy: str,
        state: CoreState,
        intake: Intake,
        phases: list[Phase],
        placement: Placement,
        progress: Progress,
        outputs: OutputRules,
    ) -> None:
        """Parts come from `presets.build`."""
        self.policy = policy
        self.state = state
        self.step = 0
        self._intake = intake
        self._phases = phases
        self._placement = placement
        self._progress = progress
        self._outputs = outputs
        self._in_flight: dict[int, list[Flight]] = {}

    # --- requests ------------------------------------------------------------------------------------------------

    @property
    def depth(self) -> int:
        """Plans that may be under way at once."""
        return self._placement.depth

    @property
    def has_unfinished(self) -> bool:
        """Whether any request is left (R36)."""
        return bool(self.state.requests)

    @property
    def num_unfinished_groups(self) -> int:
        """Groups in all three queues (R36)."""
        return len(self.state.waiting) + len(self.state.running) + len(self.state.swapped)

    def request(self, request_id: str) -> Request | None:
        """The live request of that id."""
        return self.state.requests.get(request_id)

    def add(self, request: Request) -> None:
        """Queues a request. AlreadyExists for a live id, InvalidArgument for no tokens, OutOfRange when it can never run."""
        self._intake.check(request, self.state)
        self.state.requests[request.request_id] = request
        for group in request.groups:
            group.place = Place.WAITING
            self.state.num_wide += group.width > 1
            self.state.waiting.push(group)

    def abort(self, request_ids: Iterable[str]) -> list[EndedSequence]:
        """Ends requests, wherever they stand; their blocks are free at once. Unknown ids are ignored (R35, R141)."""
        ended: list[EndedSequence] = []
        for request_id in request_ids:
            request = self.state.requests.get(request_id)
            for group in request.groups if request else ():
                ended += self.state.retire_group(group, SequenceStatus.FINISHED_ABORTED)
        return ended

    def stop_at(self, name: str, num_output_tokens: int) -> list[EndedSequence]:
        """Ends a sequence after `num_output_tokens` outputs: a stop string was found there. Unknown or over: nothing."""
        sequence = self._find(name)
        if sequence is None or num_output_tokens > sequence.num_output_tokens:
            return []
        del sequence.token_ids[sequence.num_prompt_tokens + num_output_tokens :]
        return [self.state.retire(sequence, SequenceStatus.FINISHED_STOPPED)]

    # --- steps ---------------------------------------------------------------------------------------------------

    def schedule(self, now: float) -> list[StepPlan]:
        """One plan per lane that can take one. `now`: seconds on the clock of the arrival times."""
        return [self._plan(lane, now) for lane in self._placement.free_lanes()]

    def update(self, result: StepResult) -> StepOutcome:
        """Applies what came back for a plan: appends tokens, ends what is over. Vanished sequences are skipped (R139)."""
        return self._outputs.apply(self._land(result.step), result, self.state)

    def put_drafts(self, drafts: dict[str, list[int]]) -> None:
        """Guesses at the next tokens, by sequence name; the next step verifies them. Unknown or over: ignored (R158)."""
        for name, tokens in drafts.items():
            if (sequence := self._find(name)) is not None:
                sequence.draft_token_ids = list(tokens)

    def fail_step(self, step: int, why: str) -> StepOutcome:
        """The worker could not run that plan: its sequences end with `why`, nobody else."""
        alive = [flight for flight in self._land(step) if not flight.sequence.status.is_finished]
        for flight in alive:
            self.state.cache.retract(flight.sequence, flight.computed_before)
        return StepOutcome(ended=[self.state.retire(f.sequence, SequenceStatus.FINISHED_ABORTED, why) for f in alive])

    def reset_sequences_of_lost_worker(self) -> None:
        """The worker's memory is gone: all that ran waits again, in its order, with its tokens; no prefix is known."""
        self._in_flight.clear()
        self._placement.reset()
        self._outputs.reset()
        for group in reversed([*self.state.running, *self.state.swapped]):
            self._restart(group)
        self.state.running.clear()
        self.state.swapped.clear()
        self.state.left.clear()
        self.state.on_worker.clear()
        self.state.cache.reset_prefixes()

    # --- looking in ----------------------------------------------------------------------------------------------

    def block_tables(self) -> dict[str, list[str]]:
        """`{"r0/0": ["g3", "c0"]}` of all sequences that hold blocks."""
        return self.state.cache.ledger.named_tables()

    def pool_report(self) -> PoolReport:
        """Pools and reference counts."""
        return self.state.cache.ledger.report()

    def check_integrity(self) -> list[str]:
        """Violations of the ledger's invariants; empty when all is well (R200)."""
        return integrity.check(self.state.cache.ledger)

    # --- inside --------------------------------------------------------------------------------------------------

    def _plan(self, lane: int, now: float) -> StepPlan:
        limits = self.state.limits
        draft = StepDraft(now, StepBudget(limits.max_num_batched_tokens, limits.max_num_seqs))
        draft.ended += self._outputs.before_plan(self.state)
        for phase in self._phases:
            phase.run(self.state, draft)
        self._end_what_is_stuck(draft)
        draft.commit(self.state)
        self.step += 1
        plan = draft.seal(self.step, lane, self.state)
        self._take_off(plan, draft)
        return plan

    def _take_off(self, plan: StepPlan, draft: StepDraft) -> None:
        for entry in draft.entries.values():
            self._progress.on_scheduled(entry.sequence, entry.num_tokens, entry.num_drafts)
        if not plan.is_empty:
            self._placement.on_planned(plan.lane, plan.step)
            self._in_flight[plan.step] = [
                Flight(e.sequence, e.num_tokens, e.computed_before, e.num_drafts) for e in draft.entries.values()
            ]

    def _end_what_is_stuck(self, draft: StepDraft) -> None:
        """Nothing runs and nothing can: the first in line ends, so that those behind it are served."""
        idle = self.has_unfinished and not (draft.entries or draft.ended or self._in_flight)
        if self.state.guard.on_plan(is_empty=idle):
            first: Iterable[Group] = [*self.state.swapped[:1], *self.state.running[:1]]
            group = next(iter(first), None) or self.state.waiting.peek()
            draft.ended += self.state.retire_group(group, SequenceStatus.FINISHED_IGNORED, STUCK)

    def _land(self, step: int) -> list[Flight]:
        """The sequences of a plan that is back."""
        self._placement.on_result(step)
        return self._in_flight.pop(step, [])

    def _restart(self, group: Group) -> None:
        for sequence in group.live:
            self.state.cache.release(sequence)
            sequence.status = SequenceStatus.PREEMPTED
            sequence.num_placeholders = 0
            sequence.draft_token_ids = []
            sequence.restart()
        group.place = Place.WAITING
        self.state.waiting.push_front(group)

    def _find(self, name: str) -> Sequence | None:
        request_id, _, index = name.rpartition("/")
        request = self.state.requests.get(request_id)
        for sequence in request.unfinished if request else ():
            if sequence.index == int(index):
                return sequence
        return None
