"""The scheduler core: a pure state machine over queues and blocks (design.md 4).

Plans come out, results go in; time is passed in; nothing here does I/O, reads a clock or iterates over a set.
"""

from collections.abc import Iterable

from block_manager import integrity
from block_manager.ledger import PoolReport
from scheduler_svc.core.budget import StepBudget
from scheduler_svc.core.parts import Placement, Progress
from scheduler_svc.core.plan import EndedSequence, StepOutcome, StepPlan, StepResult, TokenRun
from scheduler_svc.core.policy import Phase
from scheduler_svc.core.request import Request, Sequence, SequenceStatus
from scheduler_svc.core.state import CoreState
from scheduler_svc.core.step_draft import StepDraft
from scheduler_svc.core.stop_rules import check_stop
from svc_common.errors import AlreadyExists, InvalidArgument, OutOfRange


class Scheduler:
    """Owner of all queues and, through the cache rules, of all block tables.

    Every request that `add` takes ends exactly once: in `EndedSequence`s of a plan, an outcome, `abort` or `stop_at`.
    """

    def __init__(self, policy: str, state: CoreState, phases: list[Phase], placement: Placement, progress: Progress):
        """Parts come from `presets.build`."""
        self.policy = policy
        self.state = state
        self.step = 0
        self._phases = phases
        self._placement = placement
        self._progress = progress
        self._in_flight: dict[int, list[tuple[Sequence, int]]] = {}

    # --- requests ------------------------------------------------------------------------------------------------

    @property
    def has_unfinished(self) -> bool:
        """Whether any request is left."""
        return bool(self.state.requests)

    def request(self, request_id: str) -> Request | None:
        """The live request of that id."""
        return self.state.requests.get(request_id)

    def add(self, request: Request) -> None:
        """Queues a request. AlreadyExists for a live id, InvalidArgument for no tokens, OutOfRange when it can never run."""
        if request.request_id in self.state.requests:
            raise AlreadyExists(f"request {request.request_id} is running already", reason="DUPLICATE_REQUEST")
        self._check_fits(request)
        self.state.requests[request.request_id] = request
        for sequence in request.sequences:
            self.state.waiting.push(sequence)

    def abort(self, request_ids: Iterable[str]) -> list[EndedSequence]:
        """Ends requests, wherever they stand; their blocks are free at once. Unknown ids are ignored (R35, R141)."""
        ended = []
        for request_id in request_ids:
            request = self.state.requests.get(request_id)
            for sequence in request.unfinished if request else ():
                ended.append(self.state.retire(sequence, SequenceStatus.FINISHED_ABORTED))
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
        plans = []
        while (lane := self._placement.next_lane()) is not None:
            plan = self._plan(lane, now)
            plans.append(plan)
            if plan.is_empty:
                break
        return plans

    def update(self, result: StepResult) -> StepOutcome:
        """Applies what came back for a plan: appends tokens, ends what is over. Vanished sequences are skipped (R139)."""
        outcome = StepOutcome()
        for sequence, computed_before in self._land(result.step):
            if sequence.status.is_finished:
                continue
            if sequence.name in result.failed:
                self.state.cache.retract(sequence, computed_before)
                ended = self.state.retire(sequence, SequenceStatus.FINISHED_ABORTED, result.failed[sequence.name])
                outcome.ended.append(ended)
            elif tokens := result.tokens.get(sequence.name):
                self._append(sequence, tokens, outcome)
        return outcome

    def fail_step(self, step: int, why: str) -> StepOutcome:
        """The worker could not run that plan: its sequences end with `why`, nobody else."""
        alive = [(s, before) for s, before in self._land(step) if not s.status.is_finished]
        for sequence, computed_before in alive:
            self.state.cache.retract(sequence, computed_before)
        return StepOutcome(ended=[self.state.retire(s, SequenceStatus.FINISHED_ABORTED, why) for s, _ in alive])

    def reset_sequences_of_lost_worker(self) -> None:
        """The worker's memory is gone: all that ran waits again, in its order, with its tokens; no prefix is known."""
        self._in_flight.clear()
        self._placement.reset()
        for sequence in reversed(self.state.running):
            self.state.cache.release(sequence)
            sequence.status = SequenceStatus.PREEMPTED
            sequence.num_computed_tokens = 0
            self.state.waiting.push_front(sequence)
        self.state.running.clear()
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

    def _check_fits(self, request: Request) -> None:
        limits, num_tokens = self.state.limits, request.sequences[0].num_tokens
        if not num_tokens:
            raise InvalidArgument.field("prompt", "has no tokens")
        longest = min(limits.max_model_len - 1, self.state.cache.capacity_tokens)
        if num_tokens > longest:
            raise OutOfRange(
                f"{num_tokens} tokens are more than the {longest} that a prompt may have here "
                f"(model length {limits.max_model_len}, cache {self.state.cache.capacity_tokens} tokens)",
                reason="PROMPT_TOO_LONG",
                metadata={"limit": str(longest), "num_tokens": str(num_tokens)},
            )

    def _plan(self, lane: int, now: float) -> StepPlan:
        draft = StepDraft(now)
        budget = StepBudget(self.state.limits.max_num_batched_tokens)
        for phase in self._phases:
            phase.run(self.state, budget, draft)
        self.step += 1
        plan = draft.seal(self.step, lane, self.state)
        for entry in draft.entries.values():
            self._progress.on_scheduled(entry.sequence, entry.num_tokens)
        if not plan.is_empty:
            self._placement.on_planned(lane, self.step)
            self._in_flight[self.step] = [(e.sequence, e.computed_before) for e in draft.entries.values()]
        return plan

    def _land(self, step: int) -> list[tuple[Sequence, int]]:
        """The sequences of a plan that is back, each with its computed tokens before it."""
        self._placement.on_result(step)
        return self._in_flight.pop(step, [])

    def _append(self, sequence: Sequence, tokens: list[int], outcome: StepOutcome) -> None:
        offset = sequence.num_output_tokens
        status = None
        for token in tokens:
            sequence.token_ids.append(token)
            status = check_stop(sequence, self.state.limits.max_model_len)
            if status:
                break
        taken = sequence.token_ids[sequence.num_prompt_tokens + offset :]
        outcome.runs.append(TokenRun(sequence.name, sequence.request.request_id, sequence.index, offset, taken))
        if status:
            outcome.ended.append(self.state.retire(sequence, status))

    def _find(self, name: str) -> Sequence | None:
        request = self.state.requests.get(name.rpartition("/")[0])
        index = int(name.rpartition("/")[2])
        for sequence in request.unfinished if request else ():
            if sequence.index == index:
                return sequence
        return None
