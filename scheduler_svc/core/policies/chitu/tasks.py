"""Tasks, as Chitu calls the groups that it schedules: their type, and their share of a step.

A task is a prefill until all its tokens so far are computed, then a decode. Groups of several
sequences get their shares here too.
"""

import enum
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from block_manager.cache_rules import CachedSequence, PrefixHit
from scheduler_svc.core.parts.phases import AdmissionPart, AdmissionVerdict
from scheduler_svc.core.parts.progress import OneUnderWay
from scheduler_svc.core.parts.step_shares import Share, joint_shares
from scheduler_svc.core.plan_builder import PlanBuilder
from scheduler_svc.core.reasons import Numbers, Reason
from scheduler_svc.core.request import Group, QueueKind, SequenceStatus
from scheduler_svc.core.state import CoreState


class CountedBlocks(Protocol):
    """Cache rules that report exact block needs."""

    def num_blocks_to_admit(self, sequences: Sequence[CachedSequence], hit: PrefixHit, num_new_tokens: int) -> int:
        """Blocks for a group that starts with `num_new_tokens` of its first sequence behind its hit."""

    def num_blocks_to_extend(self, sequences: Sequence[CachedSequence], num_new_tokens: int) -> int:
        """Blocks for so many more tokens of each sequence."""


class Given(enum.Enum):
    """Outcome of scheduling a task."""

    SHARE = "share"
    NO_TOKENS = "no tokens"
    NO_BLOCKS = "no blocks"


@dataclass(slots=True)
class Room:
    """Tokens and blocks that a batch may still take. `is_whole`: prompts are not chunked.

    `short_of`: the reason reported when blocks run out. `is_fresh`: no task has used its tokens yet. `lack`:
    the numbers of the last refusal.
    """

    num_tokens: int
    num_blocks: int
    is_whole: bool
    short_of: Reason = Reason.NEED_BLOCKS
    is_fresh: bool = True
    lack: Numbers = field(default_factory=dict)

    @classmethod
    def of_chunks(
        cls, chunk_size: int | None, num_blocks: int, builder: PlanBuilder, short_of: Reason = Reason.NEED_BLOCKS
    ) -> "Room":
        """Room for so many prompt tokens (None: prompts are not chunked), at most the step's remaining budget."""
        left = builder.budget.num_tokens_left
        return cls(left if chunk_size is None else min(chunk_size, left), num_blocks, chunk_size is None, short_of)

    def lacks_tokens(self, need: int, budget: int) -> Given:
        """Refuse a share of `need` tokens, at least one, in a step with that budget."""
        self.lack = {"need": max(1, need), "left": max(0, self.num_tokens), "budget": budget}
        return Given.NO_TOKENS

    def lacks_blocks(self, need: int) -> Given:
        """Refuse a share of `need` blocks."""
        self.lack = {"need": need, "free": max(0, self.num_blocks)}
        return Given.NO_BLOCKS

    def take(self, num_tokens: int, num_blocks: int) -> None:
        """Subtract a task's share."""
        self.num_tokens -= num_tokens
        self.num_blocks -= num_blocks
        self.is_fresh = self.is_fresh and not num_tokens


class TaskShares:
    """Gives tasks their shares of a step. `placement`: says which waiting tasks start on which worker group."""

    def __init__(self, progress: OneUnderWay, cache: CountedBlocks, placement: AdmissionPart) -> None:
        self.progress = progress
        self._cache = cache
        self._placement = placement

    def pool(self, state: CoreState, builder: PlanBuilder) -> list[Group]:
        """The tasks that a plan of this worker group may schedule: its own, and waiting ones that may start on it."""
        tasks, is_open = [], True
        for group in pool(state):
            if is_bound(group):
                if group.worker == state.number:
                    tasks.append(group)
            elif is_open:
                verdict = self._placement.check(group, state, builder)
                is_open = verdict is not AdmissionVerdict.STOP
                if verdict is AdmissionVerdict.ENTER:
                    tasks.append(group)
        return tasks

    def is_ready(self, group: Group) -> bool:
        """True if the task waits for no result and does not sit out (`slow_masks`)."""
        return not (group.is_paused or self.progress.is_in_flight(group))

    def num_blocks_to_decode(self, groups: Sequence[Group]) -> int:
        """Blocks for one more token of each of their sequences."""
        return self._cache.num_blocks_to_extend([sequence for group in groups for sequence in group.live], 1)

    def give(self, group: Group, room: Room, state: CoreState, builder: PlanBuilder) -> Given:
        """Schedule as much of a task as there is room for."""
        if group.place is QueueKind.WAITING:
            return self._start(group, room, state, builder)
        shares = self._shares(group, room, builder)
        if not shares:
            need = self.progress.num_pending(group.live[0]) if room.is_whole else 1
            return room.lacks_tokens(need, builder.budget.token_budget)
        num_blocks = self._cache.num_blocks_to_extend([sequence for sequence, _ in shares], shares[0][1])
        if num_blocks > room.num_blocks:
            return room.lacks_blocks(num_blocks)
        for sequence, num_tokens in shares:
            builder.extend(sequence, num_tokens, state)
            builder.add(sequence, num_tokens)
            builder.budget.take(num_tokens)
        room.take(sum(num_tokens for _, num_tokens in shares), num_blocks)
        return Given.SHARE

    def _start(self, group: Group, room: Room, state: CoreState, builder: PlanBuilder) -> Given:
        first, *siblings = live = group.live
        hit = state.cache.lookup(first)
        builder.lookups.append((group.request.request_id, hit.num_tokens))
        pending = first.num_tokens - hit.num_tokens
        if room.is_whole and pending > room.num_tokens:
            given = room.lacks_tokens(pending, builder.budget.token_budget)
            state.journal.stop(group, Reason.TOKEN_BUDGET, **room.lack)
            return given
        # Siblings compute the rest in later steps, and all sample together at the end.
        num_tokens = min(pending - bool(siblings), room.num_tokens)
        num_blocks = self._cache.num_blocks_to_admit(live, hit, num_tokens)
        if num_blocks > room.num_blocks:
            given = room.lacks_blocks(num_blocks)
            state.journal.stop(group, room.short_of, **room.lack)
            return given
        state.cache.admit(live, hit, num_tokens)
        enter(group, hit.num_tokens, state, builder.now)
        if num_tokens:
            builder.budget.take(num_tokens)
            builder.add(first, num_tokens)
        room.take(num_tokens, num_blocks)
        return Given.SHARE

    def _shares(self, group: Group, room: Room, builder: PlanBuilder) -> list[Share]:
        live = group.live
        wanted = [(sequence, self.progress.num_pending(sequence)) for sequence in live]
        if len(live) == 1:
            pending = wanted[0][1]
            cut = pending > room.num_tokens
            return [(live[0], min(pending, room.num_tokens))] if pending and not (cut and room.is_whole) else []
        # The step in which all of them sample is never cut: smaller chunks would delay them forever.
        least = min(len(live), builder.budget.num_tokens_left) if room.is_fresh else 0
        return joint_shares(wanted, max(room.num_tokens, least))


def pool(state: CoreState) -> list[Group]:
    """All unfinished tasks in order of arrival; preempted ones keep their place."""
    return [group for request in state.requests.values() for group in request.groups if not group.is_finished]


def is_bound(group: Group) -> bool:
    """True if a task runs, or has a slot, rank or scheduler group, of one worker group."""
    return group.lane is not None or group.place is not QueueKind.WAITING


def enter(group: Group, num_computed_tokens: int, state: CoreState, now: float) -> None:
    """Start a waiting task after its blocks were allocated, with `num_computed_tokens` of its first sequence cached.

    Its other sequences share the full blocks of the prompt (`CoreState.num_shared_at_start`).
    """
    first, *siblings = group.live
    first.num_computed_tokens = num_computed_tokens
    state.waiting.remove(group)
    state.running.append(group)
    state.start(group, now)
    for sibling in siblings:
        sibling.num_computed_tokens = state.num_shared_at_start(first)
    if group.request.num_cached_tokens is None:
        group.request.num_cached_tokens = num_computed_tokens


def give_up(group: Group, why: str, state: CoreState, builder: PlanBuilder) -> None:
    """End a task that can never continue, so that others are served."""
    builder.ended += state.retire_group(group, SequenceStatus.FINISHED_IGNORED, why)


def hold_up(state: CoreState, reason: Reason, **numbers: int | float | str) -> None:
    """Record why no further waiting group starts in this step."""
    if len(state.waiting):
        state.journal.stop(state.waiting.peek(), reason, **numbers)
