"""Chitu's congestion control: a limit on the blocks that prompts may fill, halved at each preemption."""

from block_manager.pool import BlockPool
from scheduler_svc.core.entries import SequenceInFlight
from scheduler_svc.core.outputs import AtOnce
from scheduler_svc.core.parts.interfaces import Progress
from scheduler_svc.core.plan import StepOutcome, StepResult
from scheduler_svc.core.request import SequenceStatus
from scheduler_svc.core.state import CoreState

_BY_ITSELF = (SequenceStatus.FINISHED_STOPPED, SequenceStatus.FINISHED_LENGTH_CAPPED)


class AdaptiveThreshold:
    """Blocks of the pool that may be in use after a prompt got its share; decodes are not limited. Scales with the
    pool.
    """

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self._lowered: int | None = None

    @property
    def total(self) -> int:
        """Blocks in the pool."""
        return self._pool.num_usable

    @property
    def value(self) -> int:
        """The current threshold in blocks."""
        return self.total if self._lowered is None else min(self._lowered, self.total)

    def lower(self) -> int:
        """Halve the threshold after a preemption; returns the new value."""
        self._lowered = max(1, self.value // 2)
        return self._lowered

    def recover(self) -> None:
        """Reset the threshold to the whole pool."""
        self._lowered = None


class RecoveringOutputs(AtOnce):
    """`AtOnce` that resets the threshold when a task finishes naturally."""

    def __init__(self, progress: Progress, threshold: AdaptiveThreshold) -> None:
        super().__init__(progress)
        self._threshold = threshold

    def apply(self, flights: list[SequenceInFlight], result: StepResult, state: CoreState) -> StepOutcome:
        """Apply the result; reset the threshold if a task finished."""
        outcome = super().apply(flights, result, state)
        if any(end.status in _BY_ITSELF for end in outcome.ended):
            self._threshold.recover()
        return outcome
