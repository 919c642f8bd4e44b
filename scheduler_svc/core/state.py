"""The state that phases work on: queues, cache, counters. Owned by the `Scheduler`.

A *worker group* is the processes that act as one worker, usually one. What all of them share is `SharedState`; each has a
`CoreState` of its own, which phases see.
"""

from dataclasses import dataclass, field

from block_manager.cache_rules import CacheRules, Pair
from block_manager.hashing import HashChain
from scheduler_svc.core.fast_decode.rows import FastRows
from scheduler_svc.core.limits import CoreLimits
from scheduler_svc.core.parts.costs import CostBook
from scheduler_svc.core.parts.output_lengths import OutputLengths
from scheduler_svc.core.parts.progress_guard import ProgressGuard
from scheduler_svc.core.parts.queues import GroupQueue
from scheduler_svc.core.parts.slow_masks import SlowMasks
from scheduler_svc.core.parts.tenant_accounts import NoTenantAccounts, ServiceAccount
from scheduler_svc.core.plan import EndedSequence
from scheduler_svc.core.reasons import Numbers
from scheduler_svc.core.request import Group, QueueKind, Request, Sequence, SequenceStatus
from scheduler_svc.core.wait_journal import WaitJournal

_GRANT_PAUSE_S = 2.0
"""Almost nothing is granted where requests arrive more often than this."""


@dataclass(slots=True)
class SharedState:
    """What the worker groups of one scheduler share. A waiting group of sequences may start on any of them.

    - `costs`: of work on a worker, measured last.
    - `chains`: block hashes of the tokens of each sequence.
    - `workers`: the states of all worker groups, by number.
    - `most_blocks`: of the worker group with the largest cache; of removed ones where all are.
    - `num_turns`: groups that have a place in the rotation over worker groups.
    - `num_started`: number of times a group entered a running queue.
    - `ended`: sequences that ended between two plans, to be reported by the next one.
    - `finished`: requests that ended since the last plan.
    - `num_wide`: unfinished groups of several sequences.
    - `num_cumulative_preemptions`: over all plans so far.
    - `lengths`: observed output lengths.
    - `is_warming_up`: set by `Scheduler.warm_up`.
    - `grants_from`: no decode steps are granted before that time.
    - `account`: service per tenant, under policies with tenant fairness.
    """

    waiting: GroupQueue
    costs: CostBook
    journal: WaitJournal = field(default_factory=WaitJournal)
    lengths: OutputLengths = field(default_factory=OutputLengths)
    account: ServiceAccount = field(default_factory=NoTenantAccounts)
    workers: list["CoreState"] = field(default_factory=list)
    chains: dict[str, HashChain] = field(default_factory=dict)
    requests: dict[str, Request] = field(default_factory=dict)
    ended: list[EndedSequence] = field(default_factory=list)
    finished: list[str] = field(default_factory=list)
    num_turns: int = 0
    num_started: int = 0
    most_blocks: int = 0
    num_wide: int = 0
    num_cumulative_preemptions: int = 0
    is_warming_up: bool = False
    grants_from: float = 0.0

    def measure(self) -> None:
        """Set `most_blocks`, after a worker group joined, was removed or changed its size."""
        states = [state for state in self.workers if not state.is_gone] or self.workers
        self.most_blocks = max(state.cache.capacity_blocks for state in states)

    def find(self, name: str) -> Sequence | None:
        """The unfinished sequence with that name; None if there is none."""
        request_id, _, index = name.rpartition("/")
        request = self.requests.get(request_id)
        for sequence in request.unfinished if request else ():
            if sequence.index == int(index):
                return sequence
        return None

    def take_ended(self) -> list[EndedSequence]:
        """Remove and return what is in `ended`."""
        taken, self.ended = self.ended, []
        return taken

    def num_most_cached(self, sequence: Sequence) -> int:
        """Tokens of the sequence's longest cached prefix on any worker group."""
        return max(state.cache.num_cached_tokens(sequence) for state in self.workers)


@dataclass(slots=True)
class CoreState:
    """The queues and the cache of one worker group, and through `shared` those of all.

    - `number`: of the worker group. `costs`: of its work.
    - `left`: sequences that the worker must still be told to forget, with their lanes.
    - `on_worker`: names of sequences that the worker holds.
    - `max_total_tokens`: length at which a sequence ends.
    - `masks`: groups that sit out steps because of mask time.
    - `fast_rows`: the fast-decode rows.
    - `held`: running groups that sit out plans, to be moved to another worker group (`live_move`).
    - `joined`: groups that moved here since the last plan; a step that the worker began by a grant is without them.
    - `arrived`: of groups that moved here since the last plan, by image: (index in it, device block) to be placed.
    - `num_plans`: plans made for it.
    - `num_lost_tokens`: computed tokens that preempted groups must recompute.
    - `takes_work`: False while the worker group is drained or lost: no waiting group starts on it. `is_gone`: it was removed.
    - `queued_tokens`: cache of `parts/placement`; None after the running queue has changed.
    """

    limits: CoreLimits
    cache: CacheRules
    shared: SharedState
    max_total_tokens: int
    guard: ProgressGuard
    fast_rows: FastRows
    number: int = 0
    costs: CostBook = field(default_factory=CostBook)
    masks: SlowMasks = field(default_factory=SlowMasks)
    running: list[Group] = field(default_factory=list)
    swapped: list[Group] = field(default_factory=list)
    left: dict[str, int | None] = field(default_factory=dict)
    on_worker: dict[str, None] = field(default_factory=dict)
    held: list[Group] = field(default_factory=list)
    joined: list[Group] = field(default_factory=list)
    arrived: dict[str, list[Pair]] = field(default_factory=dict)
    num_plans: int = 0
    num_lost_tokens: int = 0
    takes_work: bool = True
    is_gone: bool = False
    queued_tokens: float | None = None

    @property
    def waiting(self) -> GroupQueue:
        """The queue of groups that may start on any worker group."""
        return self.shared.waiting

    @property
    def requests(self) -> dict[str, Request]:
        """All unfinished requests, by id."""
        return self.shared.requests

    @property
    def journal(self) -> WaitJournal:
        """Reasons for which groups wait."""
        return self.shared.journal

    @property
    def lengths(self) -> OutputLengths:
        """Observed output lengths."""
        return self.shared.lengths

    @property
    def account(self) -> ServiceAccount:
        """Service per tenant."""
        return self.shared.account

    @property
    def is_warming_up(self) -> bool:
        """True while the workers warm up."""
        return self.shared.is_warming_up

    @property
    def is_idle(self) -> bool:
        """True if no group runs here or waits on the host."""
        return not (self.running or self.swapped)

    @property
    def has_nothing(self) -> bool:
        """True if no group runs here, waits on the host or waits to start."""
        return self.is_idle and not len(self.waiting)

    @property
    def is_largest(self) -> bool:
        """True if no other worker group, lost ones included, has a larger cache."""
        return self.cache.capacity_blocks >= self.shared.most_blocks

    @property
    def num_running_seqs(self) -> int:
        """Sequences that the running groups have or will have."""
        return sum(group.max_num_running_seqs for group in self.running) if self.shared.num_wide else len(self.running)

    def num_shared_at_start(self, first: Sequence) -> int:
        """Tokens of its siblings that the first sequence of a group computes for them: those in full blocks of the prompt.

        None of a model with states, which each sequence computes itself.
        """
        size = self.limits.block_size
        return 0 if self.limits.num_state_blocks else first.num_prompt_tokens // size * size

    def take_out(self, group: Group) -> None:
        """Remove a group from its queue."""
        if group.place is QueueKind.RUNNING:
            self.running.remove(group)
        elif group.place is QueueKind.SWAPPED:
            self.swapped.remove(group)
        elif group.place is QueueKind.WAITING:
            self.waiting.remove(group)
        group.place = QueueKind.NOWHERE

    def leave_worker(self, sequence: Sequence) -> None:
        """Have the worker forget a sequence with the next plan."""
        if self.on_worker.pop(sequence.name, 0) is None:
            self.left[sequence.name] = sequence.lane

    def start(self, group: Group, now: float, came_from: int | None = None) -> None:
        """Mark a waiting group that was given blocks as running. The caller appends it to `running`.

        `came_from`: the worker group that it moved from, with its KV.
        """
        group.place, group.worker, group.passed_at = QueueKind.RUNNING, self.number, None
        group.left_to = None
        group.is_paused = False  # which the masks of another worker group may have set
        group.ticket = self.shared.num_started
        self.shared.num_started += 1
        live = group.live
        for sequence in live:
            sequence.status = SequenceStatus.RUNNING
        if group.request.first_scheduled_time is None:
            group.request.first_scheduled_time = now
            if now < self.shared.grants_from:
                self.pause_grants(now)
        self.account.started(group)
        if came_from is None:
            self.journal.runs(group, live[0].num_computed_tokens)
        else:
            self.journal.moved(group, came_from, self.number)

    def pause_grants(self, now: float) -> None:
        """Grant no decode steps until no request has joined for a while: the last one waited for a revocation."""
        self.shared.grants_from = now + _GRANT_PAUSE_S

    def shortage(self, need: int) -> Numbers:
        """The numbers of NEED_BLOCKS: blocks needed, free, and kept free by the watermark."""
        return {"need": need, "free": self.cache.num_free_gpu, "watermark": self.cache.watermark_blocks}

    def retire(self, sequence: Sequence, status: SequenceStatus, error: str | None = None) -> EndedSequence:
        """End a sequence in any queue: free its blocks and have the worker forget it.

        With its last sequence the group leaves its queue.
        """
        self.fast_rows.leave(sequence.group)
        self.cache.release(sequence)
        return self.end(sequence, status, error)

    def end(self, sequence: Sequence, status: SequenceStatus, error: str | None = None) -> EndedSequence:
        """End a sequence without freeing blocks: they are freed already, or must not be."""
        group, request, done = sequence.group, sequence.group.request, False
        if len(group.sequences) > 1 and group.live[:1] == [sequence]:
            leave_to_siblings(group)
        self.cache.forget(sequence)
        self.leave_worker(sequence)
        sequence.status = status
        if status in _NATURAL:
            most = min(request.stop.max_tokens, self.max_total_tokens - sequence.num_prompt_tokens)
            self.lengths.note(sequence.num_output_tokens, max(1, most))
        if group.is_finished:
            self.take_out(group)
            self.account.ended(group)
            self.journal.ended(group, status)
            self.shared.num_wide -= group.width > 1
            done = request.is_finished
        if done and self.requests.pop(request.request_id, None) is not None:
            self.shared.finished.append(request.request_id)
        return EndedSequence(
            name=sequence.name,
            request_id=request.request_id,
            index=sequence.index,
            status=status,
            num_output_tokens=sequence.num_output_tokens,
            request_done=done,
            stop_token_id=sequence.stop_token_id,
            error=error,
        )

    def retire_group(self, group: Group, status: SequenceStatus, error: str | None = None) -> list[EndedSequence]:
        """End all live sequences of a group."""
        return [self.retire(sequence, status, error) for sequence in group.live]

    def drop(self, sequence: Sequence) -> None:
        """Drop a losing beam from its group, which must have another sequence."""
        self.cache.release(sequence)
        self.cache.forget(sequence)
        self.leave_worker(sequence)
        sequence.status = SequenceStatus.FINISHED_ABORTED
        sequence.group.remove(sequence.index)


_NATURAL = (SequenceStatus.FINISHED_STOPPED, SequenceStatus.FINISHED_LENGTH_CAPPED)


def leave_to_siblings(group: Group) -> None:
    """Let siblings compute their shared tokens themselves from where the oldest sequence stopped."""
    elder, *siblings = group.live
    for sibling in siblings:
        if sibling.num_computed_tokens < sibling.num_shared_tokens:
            sibling.num_shared_tokens = min(sibling.num_shared_tokens, elder.num_computed_tokens)
