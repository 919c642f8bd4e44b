"""Admit a prompt only if forecast peak KV usage fits, so that running requests finish without preemption."""

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from block_manager.ledger import Ledger
from scheduler_svc.core.parts.admission import OpenGate
from scheduler_svc.core.parts.phases import AdmissionVerdict
from scheduler_svc.core.plan_builder import PlanBuilder
from scheduler_svc.core.reasons import Reason
from scheduler_svc.core.request import Group, QueueKind
from scheduler_svc.core.state import CoreState

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

_RISE = 0.1
_FALL = 0.002
_MOST_CAUTION = 1.0
_ROUNDING = 1e-3
"""Blocks; more than sums of the same numbers in different orders differ by."""


@dataclass(frozen=True, slots=True)
class TableGrowth:
    """How tables grow: at each position `num_whole` blocks for the whole sequence, and one for each of `windows`, in
    tokens, until the sequence is that long. `num_state_blocks`: of a sequence of any length.
    """

    block_size: int
    num_whole: int = 1
    windows: tuple[int, ...] = ()
    num_state_blocks: int = 0

    @classmethod
    def of(cls, ledger: Ledger) -> "TableGrowth":
        """That of a ledger's tables."""
        num_whole = ledger.num_groups - len(ledger.windows)
        return cls(ledger.block_size, num_whole, ledger.windows, ledger.num_state_blocks)

    @property
    def num_besides(self) -> float:
        """Blocks of a sequence besides its full ones: last blocks, on average half empty, and states."""
        return (self.num_whole + len(self.windows)) / 2 + self.num_state_blocks

    def in_windows(self, tokens: Floats, width: Floats) -> Floats:
        """Slots in blocks of windows, for `tokens` of `width` sequences together; their first and last blocks are on
        average half needed.
        """
        most = (window + self.block_size / 2 for window in self.windows)
        return sum((np.minimum(tokens, width * each) for each in most), start=np.zeros(np.shape(tokens)))


@dataclass(slots=True)
class BlockDemand:
    """Block demand of several groups, one array entry per group.

    `tokens`: tokens so far; `blocks`: blocks held; `own`: those of them freed when it ends; `remaining`:
    expected further tokens; `width`: sequences that grow. `order`: by all fields, the longest expected first, once
    `peak` needed it.
    """

    tokens: Floats
    blocks: Floats
    own: Floats
    remaining: Floats
    width: Floats
    order: Ints | None = None

    def __add__(self, other: "BlockDemand") -> "BlockDemand":
        """The demand of both sets of groups, of which the second is one group if the first has its `order`."""
        names = ("tokens", "blocks", "own", "remaining", "width")
        both = BlockDemand(*(np.concatenate([getattr(self, name), getattr(other, name)]) for name in names))
        both.order = None if self.order is None else self._order_with(other, self.order)
        return both

    def _keys(self) -> tuple[Floats, ...]:
        return -self.remaining, self.tokens, self.blocks, self.own, self.width

    def _order_with(self, other: "BlockDemand", order: Ints) -> Ints:
        """`order` with one more group, behind those that equal it."""
        first, end = 0, len(order)
        for keys, [key] in zip(self._keys(), other._keys(), strict=True):
            equal = keys[order[first:end]]
            first, end = first + int(equal.searchsorted(key)), first + int(equal.searchsorted(key, "right"))
        return np.insert(order, end, len(order))

    def growth(self, tables: TableGrowth) -> float:
        """Upper bound on the blocks by which the groups grow, as if none ended before another."""
        tokens = self.tokens + self.width * self.remaining
        slots = tables.num_whole * tokens + tables.in_windows(tokens, self.width)
        grown = slots / tables.block_size - self.blocks + tables.num_besides * self.width
        return float(np.maximum(0.0, grown).sum())

    def peak(self, num_used: int, tables: TableGrowth) -> float:
        """Peak number of blocks in use from now on, given `num_used` now: the maximum just before each group ends."""
        # Sorted by all fields, so that the order in which groups were examined makes no difference.
        order = self.order = np.lexsort(self._keys()[::-1]) if self.order is None else self.order
        remaining, width, whole = self.remaining[order], self.width[order].cumsum(), tables.num_whole
        known = (whole * self.tokens - self.blocks * tables.block_size)[order].cumsum()
        besides = tables.num_besides * width
        slots = known + whole * width * remaining
        if tables.windows:
            slots += self._in_windows(order, tables)
        grown = np.maximum(0.0, slots / tables.block_size + besides)
        gone = self.own.sum() - self.own[order].cumsum()
        return float((num_used + grown - gone).max())

    def _in_windows(self, order: Ints, tables: TableGrowth) -> Floats:
        """Slots in blocks of windows when each group ends, of those that have not ended before."""
        tokens, width, remaining = self.tokens[order], self.width[order], self.remaining[order]
        then = tokens + width * remaining[:, None]
        return np.asarray(np.tril(tables.in_windows(then, width)).sum(axis=1))


class PeakForecastAdmission(OpenGate):
    """Forecast peak KV usage: each group grows to its expected length and then frees its blocks; the peak must fit
    the pool.

    Expected output lengths are learned (`OutputLengths`) and multiplied by a caution factor, which grows with
    each step that lost work to preemption and decays to `caution` as outputs finish. Where swapping a victim
    costs less than recomputing it, the factor is reduced by that ratio.

    A group that would run alone always enters, and so does one for which others were just preempted. The check
    is a forecast; whether the blocks of this step are available is up to the cache rules.

    The peak is computed only where the pool would be too small for all groups to grow to their ends at once.
    """

    MEMORY = ("_caution", "_num_lost", "_num_ended")

    def __init__(self, caution: float) -> None:
        self._least = self._caution = caution
        self._num_lost = self._num_ended = 0
        self._draft: PlanBuilder | None = None
        self._demand: BlockDemand | None = None
        self._admitted: list[BlockDemand] = []
        self._num_used = 0
        self._most_used = 0.0

    def check(self, group: Group, state: CoreState, builder: PlanBuilder) -> AdmissionVerdict:
        """STOP if the forecast peak exceeds the capacity."""
        if not state.running or group is builder.favoured or group is state.guard.favourite:
            return AdmissionVerdict.ENTER
        capacity = state.cache.capacity_blocks - state.cache.watermark_blocks
        demand, mine = self._running(state, builder, capacity), self._of([group], state)
        tables = TableGrowth.of(state.cache.ledger)
        most_used = self._most_used + mine.growth(tables)
        if most_used < capacity - _ROUNDING:
            self._admitted.append(mine)
            self._most_used = most_used
            return AdmissionVerdict.ENTER
        for one in (*self._admitted, mine):
            demand += one
        peak = demand.peak(self._num_used, tables)
        if peak <= capacity:
            self._demand, self._admitted, self._most_used = demand, [], peak
            return AdmissionVerdict.ENTER
        state.journal.stop(group, Reason.RESERVED, need=math.ceil(peak), capacity=capacity)
        return AdmissionVerdict.STOP

    def close(self, num_started: int) -> None:
        """Drop the demand computed for this step."""
        self._draft, self._demand, self._admitted = None, None, []

    def _running(self, state: CoreState, builder: PlanBuilder, capacity: int) -> BlockDemand:
        """Demand of the groups running at the first check of the step, and of those admitted since but for `_admitted`."""
        if self._demand is None or self._draft is not builder:
            self._draft = builder
            self._learn(state)
            usable = capacity + state.cache.watermark_blocks
            self._num_used = usable - state.cache.num_free_gpu
            loose = [group for group in state.running if not group.is_fast]
            self._demand = self._of_rows(state) + self._of(loose, state)
            held = float(np.sum(self._demand.blocks))
            # Shared blocks are in several tables: each holder is assumed to free its part.
            self._demand.own = self._demand.blocks * (min(1.0, self._num_used / held) if held else 0.0)
            self._admitted = []
            self._most_used = self._num_used + self._demand.growth(TableGrowth.of(state.cache.ledger))
        return self._demand

    def _learn(self, state: CoreState) -> None:
        """Update the caution factor by tokens lost and outputs finished since the last step."""
        num_ended = state.lengths.num_noted - self._num_ended
        self._caution = max(self._least, self._caution - _FALL * num_ended)
        if state.num_lost_tokens > self._num_lost:
            self._caution = max(self._caution, min(_MOST_CAUTION, self._caution + _RISE))
        self._num_lost, self._num_ended = state.num_lost_tokens, state.lengths.num_noted

    def _factor(self, state: CoreState) -> float:
        """Factor applied to expected growth."""
        costs, ledger = state.costs.now, state.cache.ledger
        if not (costs.are_known and state.cache.num_free_cpu):
            return self._caution
        return self._caution * min(1.0, costs.swap_s(ledger.num_groups) / costs.compute_s(ledger.block_size))

    def _of_rows(self, state: CoreState) -> BlockDemand:
        rows = state.fast_rows
        known = rows.known.astype(np.float64)
        left = np.maximum(1.0, np.minimum(rows.ends_at, state.max_total_tokens) - known)
        return self._demand_of(
            known - rows.prompts, left, known, rows.held.astype(np.float64), np.ones(len(rows.members)), state
        )

    def _of(self, groups: list[Group], state: CoreState) -> BlockDemand:
        firsts = [group.live[0] for group in groups]
        tokens = np.array([s.num_tokens for s in firsts], np.float64)
        prompts = np.array([s.num_prompt_tokens for s in firsts], np.float64)
        ends_at = np.array([s.num_prompt_tokens + s.request.stop.max_tokens for s in firsts], np.float64)
        left = np.maximum(1.0, np.minimum(ends_at, state.max_total_tokens) - tokens)
        blocks = np.array([_num_held(group, state) for group in groups], np.float64)
        width = np.array([group.max_num_running_seqs for group in groups], np.float64)
        return self._demand_of(tokens - prompts, left, tokens, blocks, width, state)

    def _demand_of(
        self, num_outputs: Floats, left: Floats, tokens: Floats, blocks: Floats, width: Floats, state: CoreState
    ) -> BlockDemand:
        remaining = np.minimum(left, self._factor(state) * state.lengths.remaining(num_outputs, left))
        return BlockDemand(tokens, blocks, np.zeros(len(tokens)), remaining, width)


def _num_held(group: Group, state: CoreState) -> int:
    """Device blocks in the group's tables; for a waiting group, blocks in use that it would share."""
    ledger = state.cache.ledger
    if group.place is QueueKind.WAITING:
        return sum(ledger.gpu.refs[block] > 0 for block in state.cache.lookup(group.live[0]).block_ids)
    return len({block for s in group.live for block in ledger.tables.get(s.name, ())} - ledger.gpu.reserved)
