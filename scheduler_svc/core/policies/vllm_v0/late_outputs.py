"""Asynchronous output handling: stop rules of a step are checked while the next one runs (vLLM's
`use_async_output_proc`).

Tokens count at once; that a sequence has ended is detected one step later, so it runs once more and that token
is discarded. Only steps of groups with one sample each are delayed; others are handled when they arrive.
"""

from scheduler_svc.core.entries import SequenceInFlight
from scheduler_svc.core.outputs import AtOnce, by_group, end_failed, report
from scheduler_svc.core.parts.interfaces import Progress
from scheduler_svc.core.plan import EndedSequence, StepOutcome, StepResult
from scheduler_svc.core.request import Group, QueueKind, Sequence
from scheduler_svc.core.state import CoreState
from scheduler_svc.core.stop_rules import check_stop


class OneStepLate:
    """Output rules one step late; owner of the sequences with pending stop rules (`_open`, by name)."""

    MEMORY = ("_open", "_is_planned")

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._at_once = AtOnce(progress)
        self._open: dict[str, Sequence] = {}
        self._is_planned = False

    def before_plan(self, state: CoreState) -> list[EndedSequence]:
        """Handle pending sequences if the previous plan had nothing to run."""
        ended = self._handle(state) if self._is_planned else []
        self._is_planned = True
        return ended

    def apply(self, flights: list[SequenceInFlight], result: StepResult, state: CoreState) -> StepOutcome:
        """Handle the pending batch, then append this result's tokens."""
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
        """True for a sequence longer than the model allows: one more run would overflow its KV. Its place goes to
        others.
        """
        if not group.live or group.live[0].num_tokens <= state.limits.max_model_len:
            return False
        group.place = QueueKind.NOWHERE
        for sequence in group.live:
            state.leave_worker(sequence)
        return True

    def drain(self, group: Group, state: CoreState) -> list[EndedSequence]:
        """Check the pending stop rules of a victim."""
        return [end for s in group.live if (end := self._stop(self._open.pop(s.name, None), state)) is not None]

    def reset(self) -> None:
        """Keep pending sequences: their tokens have arrived."""
        self._is_planned = False

    def _count(
        self, flights: list[SequenceInFlight], result: StepResult, state: CoreState, outcome: StepOutcome
    ) -> None:
        for members in by_group(flights):
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
