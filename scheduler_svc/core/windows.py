"""Sliding windows under the cache rules of v1 and later: blocks that no step will look at again are given back (R105)."""

from typing import Protocol

from block_manager.cache_rules import CachedSequence
from scheduler_svc.core.outputs import Flight, OutputRules
from scheduler_svc.core.plan import EndedSequence, StepOutcome, StepResult
from scheduler_svc.core.request import Group, Sequence
from scheduler_svc.core.state import CoreState


class WindowCache(Protocol):
    """What cache rules can do for models all of whose layers look back so many tokens and no further."""

    def drop_unseen(self, sequence: CachedSequence, num_tokens: int, window: int) -> None:
        """See `V1PoolRules.drop_unseen`."""


class BehindWindow:
    """Output rules that hand a result on, and then free what its sequences have left behind.

    Only what results have shown to be computed counts: tokens that are under way may come to nothing (R151), and the blocks of a
    step that failed must still be there to be forgotten.
    """

    def __init__(self, inner: OutputRules, cache: WindowCache, window: int) -> None:
        self._inner = inner
        self._cache = cache
        self._window = window

    def before_plan(self, state: CoreState) -> list[EndedSequence]:
        """As the inner rules."""
        return self._inner.before_plan(state)

    def set_aside(self, group: Group, state: CoreState) -> bool:
        """As the inner rules."""
        return self._inner.set_aside(group, state)

    def drain(self, group: Group, state: CoreState) -> list[EndedSequence]:
        """As the inner rules."""
        return self._inner.drain(group, state)

    def reset(self) -> None:
        """As the inner rules."""
        self._inner.reset()

    def apply(self, flights: list[Flight], result: StepResult, state: CoreState) -> StepOutcome:
        """As the inner rules; then all before the window of the step that came back is free."""
        outcome = self._inner.apply(flights, result, state)
        for flight in flights:
            if not flight.has_left:
                num_sure = min(flight.computed_before, _num_sure(flight.sequence))
                self._cache.drop_unseen(flight.sequence, num_sure, self._window)
        return outcome


def _num_sure(sequence: Sequence) -> int:
    return sequence.num_computed_tokens - sequence.num_placeholders
