"""A step while it is being planned; discarded once it is a `StepPlan`."""

from dataclasses import dataclass, field

from block_manager.cache_rules import Growth, Pair, StateMoves
from scheduler_svc.core.entries import BlockMoves, SequenceInFlight, StepGrant
from scheduler_svc.core.fast_decode.share import FastShare
from scheduler_svc.core.parts.budget import StepBudget
from scheduler_svc.core.plan import EndedSequence, ScheduledSequence, StepPlan
from scheduler_svc.core.reasons import Revocation
from scheduler_svc.core.request import Group, Sequence
from scheduler_svc.core.state import CoreState


@dataclass(slots=True)
class PlanBuilder:
    """Entries in scheduling order, preemptions and lookups in order of occurrence.

    - `lora_ids`: adapters in the batch so far.
    - `growth`: changes of block tables in this step.
    - `lane`: the lane planned for.
    - `takes_lane`: the lane is occupied even if nothing is scheduled.
    - `has_own_worker`: only this lane's sequences are reported in `left`.
    - `in_need`: the group for which the next victim is preempted.
    - `favoured`: the group for which others were preempted so that it starts in this step.
    - `torn`: withdrawn sequences without their copy-on-write copies.
    - `num_caught_up`: tokens of running groups that are recomputed over several steps.
    - `num_passed`: groups left to other worker groups; `left`: (sequences, tokens) of them by worker group.
    - `idlest`: heap of the other worker groups by seconds of queued work, as `parts/placement` saw them last.
    - `is_repeat`: the worker runs the step by a grant. `revoked`: why the grant before was revoked.
    """

    now: float
    budget: StepBudget
    lane: int = 0
    takes_lane: bool = False
    has_own_worker: bool = False
    entries: dict[str, SequenceInFlight] = field(default_factory=dict)
    growth: dict[str, Growth] = field(default_factory=dict)
    lora_ids: dict[int, None] = field(default_factory=dict)
    swap_in: BlockMoves = field(default_factory=BlockMoves)
    swap_out: BlockMoves = field(default_factory=BlockMoves)
    copy: BlockMoves = field(default_factory=BlockMoves)
    states: StateMoves | None = None
    preempted: list[tuple[str, str]] = field(default_factory=list)
    num_preempted: int = 0
    lookups: list[tuple[str, int]] = field(default_factory=list)
    ended: list[EndedSequence] = field(default_factory=list)
    late: list[str] = field(default_factory=list)
    fast: FastShare | None = None
    in_need: Group | None = None
    favoured: Group | None = None
    torn: dict[str, None] = field(default_factory=dict)
    num_caught_up: int = 0
    num_passed: int = 0
    left: dict[int, tuple[int, float]] = field(default_factory=dict)
    idlest: list[tuple[float, int]] | None = None
    num_prefill_groups: int = 0
    num_lookahead_slots: int = 0
    grant: StepGrant | None = None
    is_repeat: bool = False
    revoked: Revocation | None = None

    def extend(self, sequence: Sequence, num_tokens: int, state: CoreState, num_lookahead: int = 0) -> None:
        """Give a running sequence blocks for `num_tokens` more tokens."""
        growth = state.cache.extend(sequence, num_tokens, num_lookahead)
        self.growth[sequence.name] = growth
        self.copy.add(sequence.request.request_id, growth.copies)

    def add(self, sequence: Sequence, num_tokens: int, num_drafts: int = 0) -> None:
        """Schedule `num_tokens` tokens of a sequence."""
        sequence.num_scheduled_tokens = num_tokens
        reach = sequence.num_computed_tokens + num_tokens
        target = sequence.num_tokens + sequence.num_placeholders
        self.entries[sequence.name] = SequenceInFlight(
            sequence,
            num_tokens,
            sequence.num_computed_tokens,
            num_drafts,
            samples=reach >= target,
            is_prefill=num_tokens - num_drafts > 1 or sequence.in_prefill or reach < target,
        )

    def withdraw(self, sequence: Sequence, state: CoreState) -> int:
        """Remove a sequence from the plan, so that the KV it was to compute is not reused as a prefix.

        Returns the tokens it had been given, 0 if it was not scheduled.
        """
        entry = self.entries.pop(sequence.name, None)
        if entry is None:
            return 0
        state.cache.retract(sequence, entry.computed_before)
        growth = self.growth.pop(sequence.name, None)
        if growth is not None:
            self.copy.discard(sequence.request.request_id, growth.copies)
            if growth.copies:
                self.torn[sequence.name] = None
        return entry.num_tokens

    def commit(self, state: CoreState) -> None:
        """Commit the step to the cache: record which blocks count as computed and when they were accessed, and take what it
        reads and keeps of states.
        """
        by_group: dict[int, list[SequenceInFlight]] = {}
        for entry in self.entries.values():
            by_group.setdefault(id(entry.sequence.group), []).append(entry)
        for entries in by_group.values():
            for together in [[e] for e in entries] if entries[0].is_prefill else [entries]:
                num_cached = state.cache.num_computed_blocks([e.sequence for e in together])
                for entry in together:
                    entry.num_cached_blocks = num_cached
        planned = [entry.sequence for entry in self.entries.values()]
        self.states = state.cache.commit([*planned, *self._idle_siblings(planned)], self.now)

    def _idle_siblings(self, planned: list[Sequence]) -> list[Sequence]:
        """Live sequences without a share in groups that have one; their scheduled token count is set to 0."""
        idle: dict[str, Sequence] = {}
        for group in (sequence.group for sequence in planned if sequence.group.width > 1):
            idle.update((s.name, s) for s in group.live if s.name not in self.entries)
        for sequence in idle.values():
            sequence.num_scheduled_tokens = 0
        return list(idle.values())

    def seal(self, step: int, state: CoreState, first_lane: int = 0) -> StepPlan:
        """The finished plan, with the current queue lengths. `first_lane`: added to the lane's number in it."""
        scheduled, tickets = [], []
        for entry in self.entries.values():
            entry.ticket = entry.sequence.group.ticket
            scheduled.append(self._freeze(entry, state))
            tickets.append(entry.ticket)
        events, head_numbers = state.journal.take()
        finished: list[str] = []
        if not self.is_repeat:  # which is not sent
            finished, state.shared.finished = state.shared.finished, []
        state.shared.num_cumulative_preemptions += len(self.preempted)
        return StepPlan(
            step=step,
            lane=first_lane + self.lane,
            entries=scheduled,
            fast=self.fast,
            tickets=tickets,
            swap_in=self.swap_in.pairs,
            swap_out=self.swap_out.pairs,
            copy=self.copy.pairs,
            placed=self._take_arrived(state),
            swapped_in=self.swap_in.by_request,
            swapped_out=self.swap_out.by_request,
            copied=self.copy.by_request,
            states=self.states,
            preempted=self.preempted,
            left=self._take_left(state) if state.left else [],
            finished=finished,
            ended=self.ended,
            lookups=self.lookups,
            late=self.late,
            num_batched_tokens=self.budget.num_tokens,
            num_prefill_groups=self.num_prefill_groups,
            num_preempted=self.num_preempted,
            num_cumulative_preemptions=state.shared.num_cumulative_preemptions,
            num_lookahead_slots=self.num_lookahead_slots,
            num_decode_steps=self._num_decode_steps(state) if self.num_lookahead_slots else 1,
            num_waiting=len(state.waiting),
            num_running=len(state.running),
            num_swapped=len(state.swapped),
            free_gpu=state.cache.num_free_gpu,
            free_cpu=state.cache.num_free_cpu,
            events=events,
            head_numbers=head_numbers,
            grant=self.grant,
            is_repeat=self.is_repeat,
            revoked=self.revoked,
        )

    def _take_arrived(self, state: CoreState) -> dict[str, list[Pair]]:
        """What the plan's worker must place; it stays where the plan is not sent."""
        if self.is_repeat or not state.arrived:
            return {}
        arrived, state.arrived = state.arrived, {}
        return arrived

    def _take_left(self, state: CoreState) -> list[str]:
        """Pop the sequences that the plan's worker may forget; they stay where the plan is not sent."""
        if self.is_repeat:
            return list(state.left)
        left = [name for name, lane in state.left.items() if not self.has_own_worker or (lane or 0) == self.lane]
        for name in left:
            del state.left[name]
        return left

    def _num_decode_steps(self, state: CoreState) -> int:
        """Decode steps that the lookahead slots and the length limit allow; 1 unless all shares are plain decodes.

        Beams also get 1: the core must choose their tokens between steps.
        """
        entries = self.entries.values()
        if not entries or any(e.is_prefill or not e.samples for e in entries):
            return 1
        if any(e.sequence.request.beam is not None for e in entries):
            return 1
        room = min(state.max_total_tokens - e.sequence.num_tokens for e in entries)
        return max(1, min(1 + self.num_lookahead_slots, room))

    def _freeze(self, entry: SequenceInFlight, state: CoreState) -> ScheduledSequence:
        """A plan entry. A sequence with a rewritten block table is sent to the worker as fresh."""
        sequence = entry.sequence
        growth = self.growth.get(sequence.name)
        if growth is not None and growth.rewritten:
            state.leave_worker(sequence)
        fresh = sequence.name not in state.on_worker
        state.on_worker[sequence.name] = None
        added = growth.added if growth is not None else []
        blocks = list(state.cache.ledger.tables.get(sequence.name, ())) if fresh else added
        return ScheduledSequence(
            name=sequence.name,
            request_id=sequence.request.request_id,
            index=sequence.index,
            num_tokens=entry.num_tokens,
            computed_before=entry.computed_before,
            new_block_ids=blocks,
            fresh=fresh,
            resumed=fresh and sequence.num_preemptions > 0,
            samples=entry.samples,
            is_prefill=entry.is_prefill,
            num_prompt_tokens=sequence.num_prompt_tokens,
            token_ids=list(sequence.token_ids) if fresh else None,
            num_drafts=entry.num_drafts,
            num_cached_blocks=entry.num_cached_blocks,
            num_children=sequence.group.num_children,
            told_token_ids=_told(entry) if not fresh else [],
        )


def _told(entry: SequenceInFlight) -> list[int]:
    """The last token of a beam, which the core chose; the worker knows the tokens before it."""
    sequence = entry.sequence
    is_chosen = sequence.request.beam is not None and entry.samples and sequence.num_output_tokens > 0
    return sequence.token_ids[-1:] if is_chosen else []
