"""Admission checks: whether a waiting sequence may start."""

from scheduler_svc.core.policy import Verdict
from scheduler_svc.core.request import Sequence
from scheduler_svc.core.state import CoreState


class MaxSeqs:
    """No more than `max_num_seqs` run at a time (R132)."""

    def gate(self, state: CoreState, now: float) -> bool:
        """Always open."""
        return True

    def check(self, sequence: Sequence, state: CoreState) -> Verdict:
        """STOP at the limit."""
        full = len(state.running) >= state.limits.max_num_seqs
        return Verdict.STOP if full else Verdict.ENTER
