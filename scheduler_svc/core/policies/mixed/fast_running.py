"""The running phase of V1 by array operations in plain steps; in others `MixedRunning`.

Decisions are equal: rows and other groups take blocks and register prefixes in running order, as one loop
would.
"""

from block_manager.cache_rules import FastPool
from scheduler_svc.core.fast_decode.blocks import FastBlocks, RowProgress, split
from scheduler_svc.core.fast_decode.rows import FastRows, Ints, can_join
from scheduler_svc.core.fast_decode.share import FastShare
from scheduler_svc.core.parts.step_shares import Share, StepShares
from scheduler_svc.core.plan_builder import PlanBuilder
from scheduler_svc.core.policies.mixed.decode_grants import grant_of
from scheduler_svc.core.policies.mixed.mixed import MixedRunning
from scheduler_svc.core.request import Group, Sequence
from scheduler_svc.core.state import CoreState


class FastRunning:
    """Plans a step by fast decode if `StepShares` says that it is plain. `rows` are shared with the output rules."""

    def __init__(
        self, inner: MixedRunning, shares: StepShares, rows: FastRows, progress: RowProgress, cache: FastPool
    ) -> None:
        self._inner = inner
        self._shares = shares
        self._rows = rows
        self._progress = progress
        self._cache = cache
        self._blocks = FastBlocks(rows, cache)

    def run(self, state: CoreState, builder: PlanBuilder) -> None:
        """Schedule running groups by fast decode, or else by `MixedRunning`."""
        self._blocks.leave_for_checkpoints()
        loose = self._join(state) if len(state.running) > len(self._rows.members) else []
        plain = self._shares.plain(self._rows, loose, state, builder) if self._rows.members else None
        if plain is None or not self._take(*plain, state, builder):
            self._rows.dissolve()
            self._inner.run(state, builder)

    def repeat(self, state: CoreState, builder: PlanBuilder) -> None:
        """Schedule the step that the worker runs by a grant, for the rows that are left; they need no blocks."""
        builder.is_repeat = True
        self.run(state, builder)

    def _join(self, state: CoreState) -> list[Group]:
        """Turn groups into rows where possible. Returns the running groups that are not rows, in order."""
        loose = self._others(state)
        joining = [group for group in loose if self._may_join(group.sequences[0], state)]
        if not joining:
            return loose
        self._blocks.join(joining)
        return [group for group in loose if not group.is_fast]

    def _may_join(self, sequence: Sequence, state: CoreState) -> bool:
        return can_join(sequence) and sequence.name in state.on_worker and self._blocks.may_join(sequence)

    def _others(self, state: CoreState) -> list[Group]:
        """Running groups that are not rows, in order; usually the newest ones."""
        missing = len(state.running) - len(self._rows.members)
        found: list[Group] = []
        for group in reversed(state.running):
            if len(found) == missing:
                break
            if not group.is_fast:
                found.append(group)
        return found[::-1]

    def _take(self, scheduled: Ints, shares: list[Share], state: CoreState, builder: PlanBuilder) -> bool:
        """Take blocks and register prefixes in running order, then update the counters.

        Returns False, and does nothing, if blocks are short.
        """
        rows = self._rows
        crossing = scheduled[(rows.computed >= rows.capacity)[scheduled]]
        needed = len(crossing) * self._cache.ledger.num_groups
        for sequence, num_tokens in shares:
            needed += self._cache.num_blocks_needed(sequence, num_tokens)
        if needed and needed > self._cache.num_free_gpu:
            return False
        at = rows.pick(scheduled)
        before = rows.computed[at].copy()
        full = rows.filled(scheduled, at, before + 1)
        new_blocks: dict[int, list[int]] = {}
        for sequence, num_tokens in shares:
            end = rows.row_of(sequence.group)
            crossing, full = self._take_rows(crossing, full, end, new_blocks)
            self._inner.schedule(sequence, num_tokens, state, builder)
        self._take_rows(crossing, full, len(rows.members), new_blocks)
        if len(scheduled):
            builder.fast = FastShare(rows.members, scheduled, before, rows.batch_signature_of(scheduled), new_blocks)
        if not (shares or builder.is_repeat):
            builder.grant = grant_of(rows, scheduled, self._blocks.num_steps_alike(), state, builder.now)
        self._progress.on_scheduled_rows(rows, at)
        builder.budget.take(len(scheduled))
        return True

    def _take_rows(self, crossing: Ints, full: Ints, end: int, new_blocks: dict[int, list[int]]) -> tuple[Ints, Ints]:
        """Allocate blocks for rows below `end` that need one, and register the blocks that rows fill. Returns the rest
        of both.
        """
        if len(crossing):
            ours, crossing = split(crossing, end)
            new_blocks.update(self._blocks.append(ours))
        if len(full):
            ours, full = split(full, end)
            self._blocks.register(ours)
        return crossing, full
