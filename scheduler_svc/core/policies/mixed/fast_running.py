"""The running phase of V1 by array operations while no request can be refused; otherwise `MixedRunning`.

Decisions are equal: rows and other groups take blocks and register prefixes in running order, as one loop
would.
"""

import numpy as np

from scheduler_svc.core.fast_decode.blocks import RowCache, RowProgress, SteadyBlocks, between
from scheduler_svc.core.fast_decode.rows import Ints, SteadyRows, can_join
from scheduler_svc.core.fast_decode.share import SteadyShare
from scheduler_svc.core.policies.mixed.mixed import MixedRunning, Share
from scheduler_svc.core.request import Group
from scheduler_svc.core.state import CoreState
from scheduler_svc.core.step_draft import StepDraft


class SteadyRunning:
    """Decides whether a step can use fast decode. `rows` are shared with the output rules."""

    def __init__(self, inner: MixedRunning, rows: SteadyRows, progress: RowProgress, cache: RowCache) -> None:
        self._inner = inner
        self._rows = rows
        self._progress = progress
        self._cache = cache
        self._blocks = SteadyBlocks(rows, cache)

    def run(self, state: CoreState, draft: StepDraft) -> None:
        """Schedule running groups by fast decode, or else by `MixedRunning`."""
        loose = self._others(state)
        joining = [group for group in loose if can_join(group.sequences[0])]
        if joining:
            self._blocks.join(joining)
            loose = [group for group in loose if not group.is_steady]
        if not len(self._rows) or not self._run_steady(loose, state, draft):
            self._rows.dissolve()
            self._inner.run(state, draft)

    def _others(self, state: CoreState) -> list[Group]:
        """Running groups that are not rows, in order; usually the newest ones."""
        missing = len(state.running) - len(self._rows)
        found: list[Group] = []
        for group in reversed(state.running):
            if len(found) == missing:
                break
            if not group.is_steady:
                found.append(group)
        return found[::-1]

    def _run_steady(self, loose: list[Group], state: CoreState, draft: StepDraft) -> bool:
        """Schedule the step by arrays. Returns False, and does nothing, if a request might not fit."""
        rows = self._rows
        wanted = np.minimum(self._progress.num_pending_rows(rows), state.limits.max_model_len - 1 - rows.computed)
        if int(wanted.max()) > 1:
            return False
        scheduled = np.flatnonzero(wanted > 0)
        left = draft.budget.num_tokens_left - len(scheduled)
        shares = self._loose_shares(loose, left, state) if left >= 0 else None
        crossing = np.flatnonzero((rows.computed >= rows.capacity) & (wanted > 0))
        if shares is None or not self._has_blocks(crossing, shares):
            return False
        self._take(scheduled, crossing, shares, state, draft)
        return True

    def _loose_shares(self, loose: list[Group], left: int, state: CoreState) -> list[Share] | None:
        """Shares of groups that are not rows; None if their order matters or they are not plain."""
        shares: list[Share] = []
        for group in loose:
            if len(group.sequences) > 1 or group.needs_result:
                return None
            sequence = group.sequences[0]
            num_tokens = self._inner.num_wanted(sequence, state)
            if num_tokens > left and (left <= 0 or group.ticket < int(self._rows.tickets[-1])):
                return None
            if num_tokens > 0:
                shares.append((sequence, min(num_tokens, left)))
                left -= min(num_tokens, left)
        return shares

    def _has_blocks(self, crossing: Ints, shares: list[Share]) -> bool:
        needed = len(crossing) + sum(self._cache.num_blocks_needed(s, n) for s, n in shares)
        return needed <= self._cache.num_free_gpu

    def _take(self, scheduled: Ints, crossing: Ints, shares: list[Share], state: CoreState, draft: StepDraft) -> None:
        """Take blocks and register prefixes in running order, then update the counters."""
        rows = self._rows
        before = rows.computed[rows.pick(scheduled)].copy()
        full = rows.filled(scheduled, before + 1)
        share = draft.steady = SteadyShare(rows.members, scheduled, before, rows.course_of(scheduled))
        start = 0
        for sequence, num_tokens in shares:
            end = rows.row_of(sequence.group)
            self._take_rows(crossing, full, start, end, share)
            self._inner.schedule(sequence, num_tokens, state, draft)
            start = end
        self._take_rows(crossing, full, start, len(rows), share)
        self._progress.on_scheduled_rows(rows, scheduled)
        draft.budget.take(len(scheduled))

    def _take_rows(self, crossing: Ints, full: Ints, start: int, end: int, share: SteadyShare) -> None:
        """Allocate blocks for rows in [start, end) that need one; register the blocks that rows fill."""
        if start < end:
            share.new_blocks.update(self._blocks.append(between(crossing, start, end)))
            self._blocks.register(between(full, start, end))
