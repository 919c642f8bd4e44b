"""Reservation: a task enters a slot or a rank only when the blocks of its whole life can be had there, so nobody ever leaves.

The reference keeps no block accounts there; no recording is short of blocks (design.md 4).
"""

from collections.abc import Iterable

from scheduler_svc.core.policies.chitu.scored import TOO_LARGE
from scheduler_svc.core.policies.chitu.tasks import Given, Room, TaskShares, give_up
from scheduler_svc.core.reasons import Reason
from scheduler_svc.core.request import Group
from scheduler_svc.core.state import CoreState
from scheduler_svc.core.step_draft import StepDraft


class Reservation:
    """What those that entered may still take, of one pool of `num_blocks`. A larger task may have the whole pool to itself."""

    def __init__(self, entered: Iterable[Group], num_blocks: int, state: CoreState) -> None:
        self._state = state
        self._num_blocks = num_blocks
        self._reserved = sum(self._num_blocks_of(group) for group in entered)

    def fits(self, group: Group) -> bool:
        """Whether there is enough for one more."""
        return self._num_blocks_of(group) <= self._num_blocks - self._reserved

    def take(self, group: Group) -> bool:
        """Reserves for one more, if there is enough."""
        if self.fits(group):
            self._reserved += self._num_blocks_of(group)
            return True
        self._state.journal.stop(group, Reason.RESERVED, **self.shortage(group))
        return False

    def shortage(self, group: Group) -> dict[str, int]:
        """The blocks that it needs, and those that no other has reserved: the numbers of RESERVED."""
        return {"need": self._num_blocks_of(group), "free": self._num_blocks - self._reserved}

    def _num_blocks_of(self, group: Group) -> int:
        """Of prompt and output, without the last token, which is never computed; each sequence may need its own."""
        request, limits = group.request, self._state.limits
        output = max(request.stop.max_tokens, request.stop.min_tokens)
        longest = min(len(request.prompt_token_ids) + output, limits.max_model_len) - 1
        return min(-(-longest // limits.block_size) * group.max_num_running_seqs, self._num_blocks)


def has_rows(group: Group, entered: Iterable[Group], state: CoreState) -> bool:
    """Whether the workers can hold its sequences beside those of all that entered."""
    num_seqs = sum(g.max_num_running_seqs for g in entered)
    if num_seqs + group.max_num_running_seqs > state.limits.max_num_seqs:
        state.journal.stop(group, Reason.MAX_SEQS, running=num_seqs, limit=state.limits.max_num_seqs)
        return False
    return True


def give_all(batch: list[Group], room: Room, shares: TaskShares, state: CoreState, draft: StepDraft) -> None:
    """Schedules the batch in its order while there are tokens. Who runs out of blocks had the whole pool, and ends."""
    for group in batch:
        if room.num_tokens <= 0:
            break
        if shares.give(group, room, state, draft) is Given.NO_BLOCKS:
            give_up(group, TOO_LARGE, state, draft)
