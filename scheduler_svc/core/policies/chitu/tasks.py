"""Tasks, as Chitu calls what it schedules: groups with their type, and how one of them gets its share of a step (R160-R162).

A task is a prefill until all it knows is computed, then a decode. A share is decided here for groups of several sequences too.
"""

import enum
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from block_manager.cache_rules import CachedSequence, PrefixHit
from scheduler_svc.core.parts.progress import OneUnderWay
from scheduler_svc.core.policies.mixed.mixed import Share, joint_shares
from scheduler_svc.core.reasons import Numbers, Reason
from scheduler_svc.core.request import Group, Place, SequenceStatus
from scheduler_svc.core.state import CoreState
from scheduler_svc.core.step_draft import StepDraft


class CountedBlocks(Protocol):
    """Cache rules that say how many blocks a share takes."""

    def num_blocks_to_admit(self, sequences: Sequence[CachedSequence], hit: PrefixHit, num_new_tokens: int) -> int:
        """Of a group that starts with so many tokens of its first sequence behind its hit."""

    def num_blocks_to_extend(self, sequences: Sequence[CachedSequence], num_new_tokens: int) -> int:
        """Of so many more tokens of each."""


class Given(enum.Enum):
    """What became of a task's share."""

    SHARE = "share"
    NO_TOKENS = "no tokens"
    NO_BLOCKS = "no blocks"


@dataclass(slots=True)
class Room:
    """What a batch may still take. `is_whole`: prompts are not cut. `short_of`: why there are no more blocks than these.

    `is_fresh`: no task has a share of its tokens yet. `lack`: the numbers of the last refusal, of blocks or tokens.
    """

    num_tokens: int
    num_blocks: int
    is_whole: bool
    short_of: Reason = Reason.NEED_BLOCKS
    is_fresh: bool = True
    lack: Numbers = field(default_factory=dict)

    @classmethod
    def of_chunks(
        cls, chunk_size: int | None, num_blocks: int, draft: StepDraft, short_of: Reason = Reason.NEED_BLOCKS
    ) -> "Room":
        """With so many tokens of prompts (None: they are not cut), at most what the step may take."""
        left = draft.budget.num_tokens_left
        return cls(left if chunk_size is None else min(chunk_size, left), num_blocks, chunk_size is None, short_of)

    def lacks_tokens(self, need: int, budget: int) -> Given:
        """Refuses a share of `need` tokens, or one, in a step of `budget`."""
        self.lack = {"need": max(1, need), "left": max(0, self.num_tokens), "budget": budget}
        return Given.NO_TOKENS

    def lacks_blocks(self, need: int) -> Given:
        """Refuses a share of `need` blocks."""
        self.lack = {"need": need, "free": max(0, self.num_blocks)}
        return Given.NO_BLOCKS

    def take(self, num_tokens: int, num_blocks: int) -> None:
        """A task got its share."""
        self.num_tokens -= num_tokens
        self.num_blocks -= num_blocks
        self.is_fresh = self.is_fresh and not num_tokens


class TaskShares:
    """Gives tasks their shares of a step."""

    def __init__(self, progress: OneUnderWay, cache: CountedBlocks) -> None:
        self.progress = progress
        self._cache = cache

    def is_ready(self, group: Group) -> bool:
        """It waits for no result (R166) and does not sit out (`mask_pace`)."""
        return not (group.is_paused or self.progress.is_under_way(group))

    def num_blocks_to_decode(self, groups: Sequence[Group]) -> int:
        """Blocks that one more token of each of their sequences takes."""
        return self._cache.num_blocks_to_extend([sequence for group in groups for sequence in group.live], 1)

    def give(self, group: Group, room: Room, state: CoreState, draft: StepDraft) -> Given:
        """Schedules as much of a task as there is room for."""
        if group.place is Place.WAITING:
            return self._start(group, room, state, draft)
        shares = self._shares(group, room, draft)
        if not shares:
            need = self.progress.num_pending(group.live[0]) if room.is_whole else 1
            return room.lacks_tokens(need, draft.budget.token_budget)
        num_blocks = self._cache.num_blocks_to_extend([sequence for sequence, _ in shares], shares[0][1])
        if num_blocks > room.num_blocks:
            return room.lacks_blocks(num_blocks)
        for sequence, num_tokens in shares:
            draft.extend(sequence, num_tokens, state)
            draft.add(sequence, num_tokens)
            draft.budget.take(num_tokens)
        room.take(sum(num_tokens for _, num_tokens in shares), num_blocks)
        return Given.SHARE

    def _start(self, group: Group, room: Room, state: CoreState, draft: StepDraft) -> Given:
        first, *siblings = live = group.live
        hit = state.cache.lookup(first)
        draft.lookups.append((group.request.request_id, hit.num_tokens))
        pending = first.num_tokens - hit.num_tokens
        if room.is_whole and pending > room.num_tokens:
            given = room.lacks_tokens(pending, draft.budget.token_budget)
            state.journal.stop(group, Reason.TOKEN_BUDGET, **room.lack)
            return given
        # Several sequences catch up in the steps that follow and sample together at the end.
        num_tokens = min(pending - bool(siblings), room.num_tokens)
        num_blocks = self._cache.num_blocks_to_admit(live, hit, num_tokens)
        if num_blocks > room.num_blocks:
            given = room.lacks_blocks(num_blocks)
            state.journal.stop(group, room.short_of, **room.lack)
            return given
        state.cache.admit(live, hit, num_tokens)
        enter(group, hit.num_tokens, state, draft.now)
        if num_tokens:
            draft.budget.take(num_tokens)
            draft.add(first, num_tokens)
        room.take(num_tokens, num_blocks)
        return Given.SHARE

    def _shares(self, group: Group, room: Room, draft: StepDraft) -> list[Share]:
        live = group.live
        wanted = [(sequence, self.progress.num_pending(sequence)) for sequence in live]
        if len(live) == 1:
            pending = wanted[0][1]
            cut = pending > room.num_tokens
            return [(live[0], min(pending, room.num_tokens))] if pending and not (cut and room.is_whole) else []
        # The step in which all of them sample is never cut, else chunks smaller than that would hold them up for ever.
        least = min(len(live), draft.budget.num_tokens_left) if room.is_fresh else 0
        return joint_shares(wanted, max(room.num_tokens, least))


def pool(state: CoreState) -> list[Group]:
    """All live tasks as they came; who was evicted keeps its place (R164)."""
    return [group for request in state.requests.values() for group in request.groups if not group.is_finished]


def enter(group: Group, num_computed_tokens: int, state: CoreState, now: float) -> None:
    """A waiting task has its blocks now, with so many tokens of its first sequence in them; others share its prompt's full ones."""
    first, *siblings = group.live
    first.num_computed_tokens = num_computed_tokens
    state.waiting.remove(group)
    state.running.append(group)
    state.start(group, now)
    size = state.limits.block_size
    for sibling in siblings:
        sibling.num_computed_tokens = first.num_prompt_tokens // size * size
    if group.request.num_cached_tokens is None:
        group.request.num_cached_tokens = num_computed_tokens


def give_up(group: Group, why: str, state: CoreState, draft: StepDraft) -> None:
    """It can never go on: ends it, so that others are served."""
    draft.ended += state.retire_group(group, SequenceStatus.FINISHED_IGNORED, why)


def hold_up(state: CoreState, reason: Reason, **numbers: int | float | str) -> None:
    """Nobody else that waits starts in this step."""
    if len(state.waiting):
        state.journal.stop(state.waiting.peek(), reason, **numbers)
