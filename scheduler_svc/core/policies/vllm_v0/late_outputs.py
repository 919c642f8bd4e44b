"""Output handling one step late (R33, R59, R60): a step's stop rules are asked while the next one runs.

A token counts at once; that its sequence is over by it comes out one step later, so such a sequence runs once more and what that
gives is thrown away. Only steps whose groups have one sample each lag; others are handled completely when they arrive.
"""

from scheduler_svc.core.outputs import AtOnce, Flight, by_group, end_failed, report
from scheduler_svc.core.parts.interfaces import Progress
from scheduler_svc.core.plan import EndedSequence, StepOutcome, StepResult
from scheduler_svc.core.request import Group, Place, Sequence
from scheduler_svc.core.state import CoreState
from scheduler_svc.core.stop_rules import check_stop


class OneStepLate:
    """Owner of the batch whose stop rules are open (`_open`, by sequence name)."""

    MEMORY = ("_open", "_is_planned")

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._at_once = AtOnce(progress)
        self._open: dict[str, Sequence] = {}
        self._is_planned = False

    def before_plan(self, state: CoreState) -> list[EndedSequence]:
        """A plan before this one had nothing to run: what is open then is handled now."""
        ended = self._handle(state) if self._is_planned else []
        self._is_planned = True
        return ended

    def apply(self, flights: list[Flight], result: StepResult, state: CoreState) -> StepOutcome:
        """Handles the batch before, then counts this one's tokens."""
        self._is_planned = False
        outcome = StepOutcome(ended=self._handle(state))
        if any(flight.sequence.group.needs_result for flight in flights):
            later = self._at_once.apply(flights, result, state)
            outcome.entries += later.entries
            outcome.ended += later.ended
            outcome.dropped += later.dropped
        else:
            self._count(flights, result, state, outcome)
        if not (state.running or len(state.waiting) or state.swapped):
            outcome.ended += self._handle(state)
        return outcome

    def set_aside(self, group: Group, state: CoreState) -> bool:
        """Longer than the model takes: one more run would overflow its memory. Its place there goes to others."""
        if not group.live or group.live[0].num_tokens <= state.limits.max_model_len:
            return False
        group.place = Place.NOWHERE
        for sequence in group.live:
            state.leave_worker(sequence)
        return True

    def drain(self, group: Group, state: CoreState) -> list[EndedSequence]:
        """Asks the stop rules of a victim."""
        return [end for s in group.live if (end := self._stop(self._open.pop(s.name, None), state)) is not None]

    def reset(self) -> None:
        """What is open stays open: those tokens came."""
        self._is_planned = False

    def _count(self, flights: list[Flight], result: StepResult, state: CoreState, outcome: StepOutcome) -> None:
        for _, members in by_group(flights):
            for flight in members:
                self._progress.on_result(flight.sequence, flight.num_tokens)
            for flight in end_failed(members, result, state, outcome):
                sequence = flight.sequence
                if tokens := result.tokens.get(sequence.name):
                    offset = sequence.num_output_tokens
                    sequence.token_ids += tokens
                    report(sequence, offset, result, outcome)
                    self._open[sequence.name] = sequence

    def _handle(self, state: CoreState) -> list[EndedSequence]:
        opened, self._open = self._open, {}
        return [end for s in opened.values() if (end := self._stop(s, state)) is not None]

    @staticmethod
    def _stop(sequence: Sequence | None, state: CoreState) -> EndedSequence | None:
        if sequence is None or sequence.status.is_finished:
            return None
        status = check_stop(sequence, state.max_total_tokens)
        return None if status is None else state.retire(sequence, status)
