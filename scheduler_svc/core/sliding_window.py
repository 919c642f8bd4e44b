"""Sliding windows under the cache rules of v1 and later: free blocks that no later step attends to."""

from typing import Protocol

from block_manager.cache_rules import CachedSequence
from scheduler_svc.core.entries import SequenceInFlight
from scheduler_svc.core.outputs import OutputRules
from scheduler_svc.core.plan import EndedSequence, StepOutcome, StepResult
from scheduler_svc.core.request import Group, Sequence
from scheduler_svc.core.state import CoreState


class WindowCache(Protocol):
    """Cache rules that can free blocks outside the windows of their cache groups."""

    def free_out_of_window(self, sequence: CachedSequence, num_tokens: int) -> None:
        """Free blocks outside the window; see `V1PoolRules.free_out_of_window`."""


class BehindWindow:
    """Output rules that delegate to others and then free blocks behind the windows.

    Only tokens that a result has confirmed as computed count: tokens in flight may be discarded, and the
    blocks of a failed step must still be in the table to be retracted.
    """

    def __init__(self, inner: OutputRules, cache: WindowCache) -> None:
        self._inner = inner
        self._cache = cache

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
        outcome = self._inner.apply(flights, result, state)
        for flight in flights:
            if not flight.has_left:
                num_sure = min(flight.computed_before, _num_sure(flight.sequence))
                self._cache.free_out_of_window(flight.sequence, num_sure)
        return outcome


def _num_sure(sequence: Sequence) -> int:
    return sequence.num_computed_tokens - sequence.num_placeholders
