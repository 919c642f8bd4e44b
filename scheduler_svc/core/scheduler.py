"""The scheduler core: a pure state machine.

`add` and `abort` change the queues, `schedule(now)` decides the next steps, `update` applies a result. No I/O,
no clock, no iteration over hash-ordered collections: equal calls give equal plans. The waiting queue is in
`state.SharedState`; the other queues and the block tables of each worker group are in its `state.CoreState`, which
`worker_group` plans. The policy is made of the parts in `parts/` and `policies/` (protocols in `parts/interfaces.py`
and `parts/phases.py`).
"""

from collections.abc import Iterable
from typing import Any

from block_manager import integrity
from block_manager.cache_rules import AllocStatus, PrefixHit
from block_manager.ledger import Ledger, PoolReport
from block_manager.pool import PoolCounts
from block_manager.rules.per_rank import PerRankLedger
from scheduler_svc.core.intake import RequestIntake
from scheduler_svc.core.limits import CoreLimits, PoolSize
from scheduler_svc.core.parts.costs import Costs
from scheduler_svc.core.parts.waiting_deadlines import Deadlines
from scheduler_svc.core.plan import EndedSequence, StepOutcome, StepPlan, StepResult
from scheduler_svc.core.reasons import Revocation
from scheduler_svc.core.request import Group, QueueKind, Request, Sequence, SequenceStatus
from scheduler_svc.core.spec.policy_spec import PolicySpec
from scheduler_svc.core.state import CoreState, SharedState
from scheduler_svc.core.workers import live_move
from scheduler_svc.core.workers.worker_group import WorkerGroup
from svc_common.errors import InvalidArgument, ResourceExhausted

_BOUND = (QueueKind.RUNNING, QueueKind.SWAPPED)


class Scheduler:
    """Owner of all queues and, through the cache rules, of all block tables.

    Every request accepted by `add` ends exactly once: its `EndedSequence`s are in a plan, in an outcome, or
    returned by `abort` or `stop_at`.
    """

    def __init__(
        self,
        spec: PolicySpec,
        shared: SharedState,
        intake: RequestIntake,
        limits: CoreLimits,
    ) -> None:
        """`presets.build` supplies the parts.

        `workers`: the worker groups, by number; `pools`: the blocks that each has, of which it uses at most those of
        `limits`. `put` adds them.
        """
        self.spec = spec
        self.workers: list[WorkerGroup] = []
        self.limits = limits
        self.pools: list[PoolSize] = []
        self.step = 0
        self._shared = shared
        self._intake = intake
        self._worker_of_step: dict[int, WorkerGroup] = {}

    # --- requests ------------------------------------------------------------------------------------------------

    @property
    def policy(self) -> str:
        """Name of the policy."""
        return self.spec.name

    @property
    def state(self) -> CoreState:
        """The state of the first worker group, with what all share. For inspection only: see `states`."""
        return self.states[0]

    @property
    def states(self) -> list[CoreState]:
        """The state of each worker group with all counters up to date. For inspection only: it writes back every
        fast-decode row.
        """
        for worker in self.workers:
            worker.state.fast_rows.sync_all()
        return self._shared.workers

    def dissolve_fast_rows(self) -> None:
        """Turn all fast-decode rows into objects, which changes no decision."""
        for worker in self.workers:
            worker.state.fast_rows.dissolve()

    @property
    def depth(self) -> int:
        """Plans that a worker may have in flight at once."""
        return self.workers[0].lanes.depth

    @property
    def has_unfinished(self) -> bool:
        """True while any request is unfinished."""
        return bool(self._shared.requests)

    @property
    def has_endings_to_tell(self) -> bool:
        """True if requests ended since the last plan, or one of several workers has sequences to forget.

        One more plan must then be made to inform the workers, even if it schedules nothing.
        """
        several = len(self.workers) > 1
        untold = several and any(state.left or state.arrived for state in self._shared.workers)
        return bool(self._shared.finished) or untold

    @property
    def num_unfinished_groups(self) -> int:
        """Groups in the waiting, running and swapped queues."""
        return sum(self.queue_lengths)

    def request(self, request_id: str) -> Request | None:
        """The unfinished request with that id, its counters up to date; None if there is none."""
        request = self._shared.requests.get(request_id)
        for group in request.groups if request else ():
            self._worker_of(group).fast_rows.sync(group)
        return request

    def add(self, request: Request) -> None:
        """Queue a request.

        Raises AlreadyExists for an id in use, InvalidArgument for an empty prompt, OutOfRange for a request
        that can never run, and, under policies with deadlines, DeadlineExceeded for one that cannot finish in
        time.
        """
        states = [state for state in self._shared.workers if not state.is_gone] or self._shared.workers
        self._intake.check(request, max(states, key=lambda state: state.cache.capacity_tokens))
        shared = self._shared
        shared.journal.step = self.step + 1
        shared.requests[request.request_id] = request
        for group in request.groups:
            if request.over and group.is_finished:
                continue
            group.place = QueueKind.WAITING
            shared.num_wide += group.width > 1
            shared.journal.arrived(group)
            shared.waiting.push(group)

    def add_prefilled(self, request: Request) -> None:
        """Accept a request after its prefill on another worker (disaggregated prefill); it decodes at once.

        It must be one sequence with at least one token in `committed`; all its tokens but the last count as
        computed. Their KV must be written into its blocks (see `block_tables`) before its first plan runs.
        Raises what `add` raises; InvalidArgument for another shape or where there are several workers;
        ResourceExhausted when its blocks do not fit.
        """
        if request.num_samples > 1 or not request.committed:
            raise InvalidArgument.field("committed", "must hold the first token of the only sample, which is prefilled")
        if self.num_workers > 1:
            raise InvalidArgument.field("committed", "cannot be taken over: which worker has its KV is not said")
        if self.limits.num_state_blocks:
            raise InvalidArgument.field(
                "committed", "cannot be taken over: the model has states, which are not in blocks of KV"
            )
        self.add(request)
        [sequence], [worker] = request.sequences, self.workers
        state, num_computed = worker.state, sequence.num_tokens - 1
        if state.cache.can_admit([sequence], PrefixHit(), num_computed) is not AllocStatus.OK:
            state.retire(sequence, SequenceStatus.FINISHED_ABORTED)
            raise ResourceExhausted(
                f"no room for the {num_computed} tokens of request {request.request_id}", reason="NO_BLOCKS"
            )
        state.cache.admit([sequence], PrefixHit(), num_computed)
        state.take_out(sequence.group)
        sequence.num_computed_tokens = sequence.prefill_end = num_computed
        state.running.append(sequence.group)
        state.start(sequence.group, state.journal.now)

    def abort(self, request_ids: Iterable[str]) -> list[EndedSequence]:
        """End requests in any queue and free their blocks at once. Unknown ids are ignored."""
        ended: list[EndedSequence] = []
        for request_id in request_ids:
            request = self._shared.requests.get(request_id)
            for group in request.groups if request else ():
                ended += self._worker_of(group).retire_group(group, SequenceStatus.FINISHED_ABORTED)
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
        return [self._worker_of(sequence.group).retire(sequence, SequenceStatus.FINISHED_STOPPED)]

    def observe_costs(self, costs: Costs, worker: int | None = None) -> None:
        """Record measured costs of work on a worker group, or on all; later decisions use them."""
        self._shared.costs.observe(costs)
        for each in self.workers if worker is None else [self._planner(worker)]:
            each.state.costs.observe(costs)

    # --- steps ---------------------------------------------------------------------------------------------------

    def schedule(self, now: float, worker: int | None = None) -> list[StepPlan]:
        """Make one plan for each lane that can take one, of one worker group or of all.

        `now`: seconds on the clock of the arrival times.
        """
        plans: list[StepPlan] = []
        for each in self.workers if worker is None else [self._planner(worker)]:
            lanes = each.begin()
            alone = each.is_alone(other for other in self.workers if other is not each)
            for lane in lanes:
                plan = each.plan(self.step + 1, lane, now, is_last=lane == lanes[-1], alone=alone)
                plans.append(self._noted(plan, each))
        return plans

    def repeat(self, now: float, worker: int = 0) -> StepPlan:
        """Plan the step that a worker began by a grant: the rows of its last plan that are left, one token each.

        Called after the result of the step before was applied.
        """
        planner = self._planner(worker)
        return self._noted(planner.repeat(self.step + 1, now), planner)

    def has_grant(self, worker: int = 0) -> bool:
        """True if granted steps of that worker group are left that were not planned yet."""
        return self._planner(worker).has_grant

    def wants_step_back(self, worker: int = 0) -> Revocation | None:
        """Why granted steps that are left would not be planned any more; None if they would, or none are left."""
        return self._planner(worker).wants_step_back

    def revoke(self, worker: int = 0) -> None:
        """Expect no more granted steps than that worker has begun when it learns of the revocation."""
        self._planner(worker).revoke()

    def update(self, result: StepResult, now: float | None = None) -> StepOutcome:
        """Apply the result of a plan: append tokens and end finished sequences. Sequences that are gone are
        skipped.

        `now`: when the result arrived, on the clock of `schedule`; None: do not record time to first token.
        """
        outcome = self._landed(result.step).update(result, now)
        for name, seconds in result.mask_s.items():
            self._charge_masks(name, seconds)
        return outcome

    def warm_up(self, *, on: bool) -> None:
        """Tell whether the workers are warming up; meanwhile policies may put prompts first or schedule them alone."""
        self._shared.is_warming_up = on

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
        return self._landed(step).fail_step(step, why)

    # --- workers -------------------------------------------------------------------------------------------------

    def put(self, worker: WorkerGroup, pool: PoolSize) -> None:
        """Serve a worker group with an empty memory, as the next one or in place of a lost one (`live_change.put_worker`)."""
        at = slice(worker.state.number, worker.state.number + 1)
        self.workers[at], self._shared.workers[at], self.pools[at] = [worker], [worker.state], [pool]
        self._shared.measure()

    @property
    def has_worker_per_lane(self) -> bool:
        """True if each lane is a worker with its own memory, and all are planned together; else one worker serves all
        lanes of a worker group.
        """
        return self.workers[0].lanes.has_worker_per_lane

    @property
    def num_workers(self) -> int:
        """Workers, or groups of processes that act as one, each with its own memory."""
        return self.workers[0].lanes.num_lanes if self.has_worker_per_lane else len(self.workers)

    def worker_of(self, lane: int) -> int:
        """Number of the worker that runs the plans of that lane."""
        return lane if self.has_worker_per_lane else lane // self.workers[0].lanes.num_lanes

    def reset_sequences_of_lost_worker(self, worker: int | None = None) -> None:
        """Requeue all running sequences with their tokens, in order, after a worker lost its memory; drop its cached
        prefixes.

        `worker`: only that one is lost, of several. It gets no plan with work until `take_worker_back`, and its
        sequences may continue on others. None: all workers lost their memory and are back.
        """
        if worker is None:
            for each in reversed(self.workers):
                each.lose_memory() if len(self.workers) == 1 else each.lose()
                each.state.takes_work = True
            self._worker_of_step.clear()
        elif self.has_worker_per_lane:
            self.workers[0].lose_lane(worker)
        else:
            assert len(self.workers) > 1, "lanes of one worker are lost together"
            lost = self.workers[worker]
            lost.lose()
            self._worker_of_step = {step: each for step, each in self._worker_of_step.items() if each is not lost}

    def take_worker_back(self, worker: int) -> None:
        """Mark a lost worker, which has an empty memory, or a drained one as served again."""
        if self.has_worker_per_lane:
            self.workers[0].lanes.take_back(worker)
        else:
            self.workers[worker].state.takes_work = True

    def drain_worker(self, worker: int) -> None:
        """Start no more groups on a worker group, of which there must be several or which is to end; those that run there end."""
        self.workers[worker].state.takes_work = False

    def remove_worker(self, worker: int) -> None:
        """Remove a worker group on which nothing runs; requests that only it could hold end when they are examined.

        Its number stays free for one that is put there.
        """
        state = self.workers[worker].state
        state.takes_work, state.is_gone = False, True
        self._shared.measure()

    def send_back(self, worker: int, *, keep_movable: bool = False) -> None:
        """Requeue all groups of a worker group, which continue on others; what they generated is kept.

        `keep_movable`: but for those that can move with their KV, now or once their prompt is computed.
        """
        each = self.workers[worker]
        each.send_back([group for group in each.state.running if keep_movable and live_move.may_move(group, each)])

    # --- moving groups with their KV (`live_move`, which says what can move) ---------------------------------------

    def hold(self, name: str) -> None:
        """Have a running sequence sit out plans until `let_go` or `hand_over`."""
        live_move.hold(name, self.workers)

    def let_go(self, name: str) -> None:
        """Have a held sequence take part in plans again; no-op for others."""
        live_move.let_go(name, self.workers)

    def hand_over(self, name: str, worker: int, image: str) -> bool:
        """Continue a held sequence without outstanding results on another worker group, which has the copy `image` of its
        blocks. False, and nothing has changed, if it cannot go on there now.
        """
        return live_move.hand_over(name, self.workers, self.workers[worker], image)

    def has_work(self, worker: int) -> bool:
        """True if a plan for that worker could have work, or something to forget."""
        state = self.workers[worker].state
        return not state.has_nothing or bool(state.left or state.arrived)

    def runs_on(self, request: Request, worker: int) -> bool:
        """True if a part of the request is bound to that worker."""
        if self.has_worker_per_lane:
            return any(group.lane == worker for group in request.groups)
        return any(group.worker == worker and group.place in _BOUND for group in request.groups)

    def reset_prefix_cache(self, *, preempt_running: bool = False) -> bool:
        """Drop all cached prefixes. Returns False, and drops nothing, while a block is in use.

        `preempt_running`: first requeue all running and swapped sequences, in order, at the front. Their tokens
        in flight are discarded; they are generated again and would otherwise be delivered twice.
        """
        if preempt_running:
            for worker in reversed(self.workers):
                worker.send_back()
        caches = [worker.state.cache for worker in self.workers]
        if any(cache.ledger.tables or cache.ledger.host_tables for cache in caches):
            return False
        for cache in caches:
            cache.reset_prefixes()
        return True

    @property
    def deadlines(self) -> Deadlines | None:
        """The deadline watch; None if the policy ignores deadlines."""
        return self._intake.deadlines

    # --- inspection ----------------------------------------------------------------------------------------------

    @property
    def ledger(self) -> Ledger:
        """The block tables of all worker groups. Where there are several workers, block names contain the worker's number."""
        ledgers = [worker.state.cache.ledger for worker in self.workers]
        return ledgers[0] if len(ledgers) == 1 else PerRankLedger(ledgers)

    def block_tables(self) -> dict[str, list[str]]:
        """Block tables of all sequences that hold blocks, as `{"r0/0": ["g3", "c0"]}`."""
        return self.ledger.named_tables()

    def pool_report(self) -> PoolReport:
        """Pool sizes and reference counts."""
        return self.ledger.report()

    def cached_blocks(self) -> list[str]:
        """Names of the free device blocks that hold a cached prefix."""
        return self.ledger.cached_blocks()

    @property
    def pool_counts(self) -> tuple[PoolCounts, PoolCounts]:
        """Counts of the device pool and of the host pool, over all workers."""
        return self.ledger.counts()

    @property
    def queue_lengths(self) -> tuple[int, int, int]:
        """Number of waiting, running and swapped groups."""
        states = self._shared.workers
        return len(self._shared.waiting), sum(len(s.running) for s in states), sum(len(s.swapped) for s in states)

    def check_integrity(self, turn: int | None = None) -> list[str]:
        """Check the invariants of all workers' ledgers, or of one: `turn` counts through them. Returns violations."""
        workers = self.workers if turn is None else [self.workers[turn % len(self.workers)]]
        return [wrong for worker in workers for wrong in integrity.check(worker.state.cache.ledger)]

    def view(self) -> dict[str, Any]:
        """Internal state of the first worker group's parts, by name: thresholds, slots, round-robin positions."""
        return {name: value for part in self.workers[0].views for name, value in part.view().items()}

    # --- internals -----------------------------------------------------------------------------------------------

    def _noted(self, plan: StepPlan, worker: WorkerGroup) -> StepPlan:
        self.step = plan.step
        if not plan.is_empty:
            self._worker_of_step[plan.step] = worker
        return plan

    def _landed(self, step: int) -> WorkerGroup:
        """The worker group that ran the step; the first one for steps without work."""
        return self._worker_of_step.pop(step, self.workers[0])

    def _planner(self, worker: int) -> WorkerGroup:
        """What plans for that worker; one for all ranks."""
        return self.workers[0 if self.has_worker_per_lane else worker]

    def _worker_of(self, group: Group) -> CoreState:
        """The state of the worker group on which a group runs, or ran last."""
        return self._shared.workers[group.worker]

    def _charge_masks(self, name: str, seconds: float) -> None:
        """Charge mask time to the sequence's group, and to its tenant as an equivalent number of tokens."""
        request_id, _, index = name.rpartition("/")
        request = self._shared.requests.get(request_id)
        for group in request.groups if request else ():
            if any(sequence.index == int(index) for sequence in group.live):
                state = self._worker_of(group)
                state.masks.charge(group, seconds)
                state.account.held_up(group, state.costs.now.tokens_in(seconds))

    def _find(self, name: str) -> Sequence | None:
        """The unfinished sequence with that name, as an object."""
        sequence = self._shared.find(name)
        if sequence is not None:
            self._worker_of(sequence.group).fast_rows.leave(sequence.group)
        return sequence
