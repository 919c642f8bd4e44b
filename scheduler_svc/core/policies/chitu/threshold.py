"""Chitu's congestion control: how many blocks prompts may fill, halved for each eviction (R170, R174, R175)."""

from block_manager.pool import BlockPool
from scheduler_svc.core.outputs import AtOnce, Flight
from scheduler_svc.core.parts.interfaces import Progress
from scheduler_svc.core.plan import StepOutcome, StepResult
from scheduler_svc.core.request import SequenceStatus
from scheduler_svc.core.state import CoreState

_BY_ITSELF = (SequenceStatus.FINISHED_STOPPED, SequenceStatus.FINISHED_LENGTH_CAPPED)


class AdaptiveThreshold:
    """Blocks of a pool that may be in use once a prompt got its share; decodes are not bound by it. It follows the pool's size."""

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self._lowered: int | None = None

    @property
    def total(self) -> int:
        """Blocks that there are."""
        return self._pool.num_usable

    @property
    def value(self) -> int:
        """The threshold now."""
        return self.total if self._lowered is None else min(self._lowered, self.total)

    def lower(self) -> int:
        """A task was evicted; the threshold from now on."""
        self._lowered = max(1, self.value // 2)
        return self._lowered

    def recover(self) -> None:
        """Nobody needs to be spared: all blocks at once."""
        self._lowered = None


class RecoveringOutputs(AtOnce):
    """Results handled at once; a task that finishes by itself brings the threshold back (R175)."""

    def __init__(self, progress: Progress, threshold: AdaptiveThreshold) -> None:
        super().__init__(progress)
        self._threshold = threshold

    def apply(self, flights: list[Flight], result: StepResult, state: CoreState) -> StepOutcome:
        """As its base."""
        outcome = super().apply(flights, result, state)
        if any(end.status in _BY_ITSELF for end in outcome.ended):
            self._threshold.recover()
        return outcome
