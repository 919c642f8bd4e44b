"""Sliding windows under the cache rules of v1 and later: free blocks that no later step attends to."""

from collections.abc import Sequence
from operator import attrgetter
from typing import Protocol

from block_manager.cache_rules import CachedSequence
from scheduler_svc.core.entries import SequenceInFlight
from scheduler_svc.core.fast_decode.rows import FastRows
from scheduler_svc.core.outputs import OutputRules
from scheduler_svc.core.plan import EndedSequence, StepOutcome, StepResult
from scheduler_svc.core.request import Group
from scheduler_svc.core.state import CoreState

_TICKET = attrgetter("ticket")


class WindowCache(Protocol):
    """Cache rules that can free blocks outside the windows of their cache groups."""

    def free_out_of_window(self, sequences: Sequence[CachedSequence], num_tokens: Sequence[int]) -> list[int]:
        """Free blocks outside the windows and return how many of each; see `PoolRules.free_out_of_window`."""

    def next_out_of_window(self, num_tokens: int) -> int:
        """The number of computed tokens from which on it frees more than at `num_tokens`."""


class BehindWindow:
    """Output rules that delegate to others and then free blocks behind the windows.

    Only tokens that a result has confirmed as computed count: tokens in flight may be discarded, and the
    blocks of a failed step must still be in the table to be retracted. `rows`: those of fast decode, of which only those
    with a block behind a window are visited (`FastRows.frees_at`).
    """

    def __init__(self, inner: OutputRules, cache: WindowCache, rows: FastRows) -> None:
        self._inner = inner
        self._cache = cache
        self._rows = rows

    def before_plan(self, state: CoreState) -> list[EndedSequence]:
        """Delegate to the inner rules."""
        return self._inner.before_plan(state)

    def set_aside(self, group: Group, state: CoreState) -> bool:
        """Delegate to the inner rules."""
        return self._inner.set_aside(group, state)

    def drain(self, group: Group, state: CoreState) -> list[EndedSequence]:
        """Delegate to the inner rules."""
        return self._inner.drain(group, state)

    def reset(self) -> None:
        """Delegate to the inner rules."""
        self._inner.reset()

    def apply(self, flights: list[SequenceInFlight], result: StepResult, state: CoreState) -> StepOutcome:
        """Apply the result by the inner rules, then free the blocks before the windows of the finished step."""
        rows = self._rows.due_to_free(result.step)
        outcome = self._inner.apply(flights, result, state)
        flights = sorted([*flights, *rows], key=_TICKET) if rows else flights
        due = [f for f in flights if f.computed_before >= f.sequence.frees_at and not f.has_left]
        if due:
            self._free(due)
        return outcome

    def _free(self, flights: list[SequenceInFlight]) -> None:
        sequences, lengths = [flight.sequence for flight in flights], list(map(_num_sure, flights))
        num_freed = self._cache.free_out_of_window(sequences, lengths)
        frees_at = list(map(self._cache.next_out_of_window, lengths))
        for sequence, length in zip(sequences, frees_at, strict=True):
            sequence.frees_at = length
        self._rows.freed([sequence.group for sequence in sequences], num_freed, frees_at)


def _num_sure(flight: SequenceInFlight) -> int:
    """Tokens that are computed for sure: for a row, those before the step that returned."""
    sequence, before = flight.sequence, flight.computed_before
    if sequence.group.is_fast:
        return before
    return min(before, sequence.num_computed_tokens - sequence.num_placeholders)
