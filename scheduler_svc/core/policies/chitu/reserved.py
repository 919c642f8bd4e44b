"""Reservations: a task enters a slot or rank only if its blocks up to its maximum length fit, so none is ever
preempted.

Chitu keeps no block accounts there; none of its recordings runs short of blocks.
"""

from collections.abc import Iterable

from scheduler_svc.core.plan_builder import PlanBuilder
from scheduler_svc.core.policies.chitu.scored import TOO_LARGE
from scheduler_svc.core.policies.chitu.tasks import Given, Room, TaskShares, give_up
from scheduler_svc.core.reasons import Reason
from scheduler_svc.core.request import Group
from scheduler_svc.core.state import CoreState


class Reservation:
    """Unreserved blocks of a pool of `num_blocks`. A task larger than the pool reserves all of it."""

    def __init__(self, entered: Iterable[Group], num_blocks: int, state: CoreState) -> None:
        self._state = state
        self._num_blocks = num_blocks
        self._reserved = sum(self._num_blocks_of(group) for group in entered)

    def fits(self, group: Group) -> bool:
        """Whether the task's maximum need is still unreserved."""
        return self._num_blocks_of(group) <= self._num_blocks - self._reserved

    def take(self, group: Group) -> bool:
        """Reserve for a task if it fits; returns whether it did."""
        if self.fits(group):
            self._reserved += self._num_blocks_of(group)
            return True
        self._state.journal.stop(group, Reason.RESERVED, **self.shortage(group))
        return False

    def shortage(self, group: Group) -> dict[str, int]:
        """The numbers of RESERVED: blocks the task needs, and unreserved blocks."""
        return {"need": self._num_blocks_of(group), "free": self._num_blocks - self._reserved}

    def _num_blocks_of(self, group: Group) -> int:
        """Blocks for prompt and output without the last token, which is never computed; counted for each sequence."""
        request, limits = group.request, self._state.limits
        output = max(request.stop.max_tokens, request.stop.min_tokens)
        longest = min(len(request.prompt_token_ids) + output, limits.max_model_len) - 1
        most = self._state.cache.ledger.most_blocks(longest, group.max_num_running_seqs)
        return min(most, self._num_blocks)


def has_rows(group: Group, entered: Iterable[Group], state: CoreState) -> bool:
    """Whether `max_num_seqs` has room for the group beside all that entered."""
    num_seqs = sum(g.max_num_running_seqs for g in entered)
    if num_seqs + group.max_num_running_seqs > state.limits.max_num_seqs:
        state.journal.stop(group, Reason.MAX_SEQS, running=num_seqs, limit=state.limits.max_num_seqs)
        return False
    return True


def give_all(batch: list[Group], room: Room, shares: TaskShares, state: CoreState, builder: PlanBuilder) -> None:
    """Schedule the batch in order while tokens are left. A task that lacks blocks exceeds the whole pool and is ended."""
    for group in batch:
        if room.num_tokens <= 0:
            break
        if shares.give(group, room, state, builder) is Given.NO_BLOCKS:
            give_up(group, TOO_LARGE, state, builder)
