"""Apply results of fast-decode rows by array operations; anything more than a plain token goes to `AtOnce`."""

from bisect import bisect_left
from dataclasses import replace
from operator import attrgetter

import numpy as np

from block_manager.cache_rules import FastPool
from scheduler_svc.core.entries import SequenceInFlight
from scheduler_svc.core.fast_decode.blocks import FastBlocks, RowProgress, split
from scheduler_svc.core.fast_decode.rows import NO_TOKEN, FastInFlight, FastRows, Ints
from scheduler_svc.core.fast_decode.share import FastRuns
from scheduler_svc.core.outputs import AtOnce
from scheduler_svc.core.plan import EndedSequence, StepOutcome, StepResult
from scheduler_svc.core.request import Group, QueueKind
from scheduler_svc.core.state import CoreState
from scheduler_svc.core.stop_rules import check_stop

_TICKET = attrgetter("ticket")


class FastOutputs:
    """Output rules that handle a result when it arrives. `rows` are shared with the running phase."""

    def __init__(self, inner: AtOnce, rows: FastRows, progress: RowProgress, cache: FastPool) -> None:
        self._inner = inner
        self._rows = rows
        self._progress = progress
        self._blocks = FastBlocks(rows, cache)

    def before_plan(self, state: CoreState) -> list[EndedSequence]:
        """Return an empty list: no end is ever pending."""
        return []

    def set_aside(self, group: Group, state: CoreState) -> bool:
        """Return False: no end is ever pending."""
        return False

    def drain(self, group: Group, state: CoreState) -> list[EndedSequence]:
        """Return an empty list: no result is ever pending."""
        return []

    def reset(self) -> None:
        """Drop plans in flight: their results will never arrive."""
        self._rows.flights.clear()

    def apply(self, flights: list[SequenceInFlight], result: StepResult, state: CoreState) -> StepOutcome:
        """Apply rows at once and other sequences one by one; ends and prefix registration in running order."""
        flight = self._rows.flights.get(result.step)
        if flight is not None and result.column is not None and not (flights or flight.left):
            del self._rows.flights[result.step]
            return self._apply(flight.rows, np.asarray(result.column, np.int64), [], result, state)
        return self._apply_mixed(flights, result, state)

    def _apply_mixed(self, flights: list[SequenceInFlight], result: StepResult, state: CoreState) -> StepOutcome:
        """Apply a result that may be of more than the rows of today."""
        self._drive_out_odd(flights, result)
        flight = self._rows.flights.pop(result.step, None)
        if flight is None and not self._rows.members:
            return self._inner.apply(flights, result, state)
        column = _column(flight, self._rows, result)
        loose, result = _as_objects(flights, flight, column, result)
        given, tokens = self._with_late(flight, column, loose, result)
        loose = [f for f in loose if not f.sequence.group.is_fast]
        return self._apply(given, tokens, loose, result, state)

    def _drive_out_odd(self, flights: list[SequenceInFlight], result: StepResult) -> None:
        """Turn rows with a result of more than one token, or a failure, into objects before it is applied.

        So too for sequences that were preempted and restarted since: their position in the plan was another.
        """
        groups = [f.sequence.group for f in flights]
        flight = self._rows.flights.get(result.step)
        if flight is not None and result.column is None:
            groups += [self._rows.members[row] for row in flight.rows.tolist() if row >= 0]
        again = {id(f.sequence.group) for f in flights if f.ticket != f.sequence.group.ticket}
        if flight is not None:
            back = [(group, int(flight.tickets[i])) for i, group in flight.left.items()]
            groups += [group for group, _ in back]
            again.update(id(group) for group, ticket in back if ticket != group.ticket)
        for group in groups:
            if group.is_fast and (id(group) in again or not _is_plain(group.sequences[0].name, result)):
                self._rows.leave(group)

    def _with_late(
        self, flight: FastInFlight | None, column: Ints, loose: list[SequenceInFlight], result: StepResult
    ) -> tuple[Ints, Ints]:
        """(row, token) pairs by ascending row, with those of sequences that became rows since the plan."""
        rows = np.zeros(0, np.int64) if flight is None else flight.rows
        late = [f.sequence for f in loose if f.sequence.group.is_fast]
        if late:
            rows = np.append(rows, self._rows.tickets.searchsorted([s.group.ticket for s in late]))
            column = np.append(column, [(result.tokens.get(s.name) or [NO_TOKEN])[0] for s in late])
            order = np.argsort(rows, kind="stable")
            rows, column = rows[order], column[order]
        return rows, column

    def _apply(
        self, given: Ints, tokens: Ints, loose: list[SequenceInFlight], result: StepResult, state: CoreState
    ) -> StepOutcome:
        """Apply one token to each row; those that are none (-1) or without a token are left out."""
        there = (given >= 0) & (tokens != NO_TOKEN)
        if not there.all():
            given, tokens = given[there], tokens[there]
        rows = self._rows
        at = rows.pick(given)
        rows.append(given, at, tokens)
        self._progress.on_tokens_rows(rows, at)
        over = given[rows.is_over(at, tokens, state.max_total_tokens)]
        confirmed = self._progress.confirmed_rows(rows, at)
        full = given[:0] if confirmed is None else rows.filled(given, at, confirmed)
        outcome = StepOutcome(fast=FastRuns(rows.members, given, rows.known[given] - 1, tokens))
        if loose or len(over) or len(full):
            self._in_order(over, full, loose, result, state, outcome)
        return outcome

    def _in_order(
        self,
        over: Ints,
        full: Ints,
        loose: list[SequenceInFlight],
        result: StepResult,
        state: CoreState,
        outcome: StepOutcome,
    ) -> None:
        """Apply ends, block registration and objects in the order of one loop over the running groups."""
        rows = self._rows
        ended = over.tolist()
        rows.write_back(ended)
        for ticket, members in _by_ticket(loose):
            if len(over) or len(full):
                end = int(rows.tickets.searchsorted(ticket))
                over, full = self._settle_rows(over, full, end, state, outcome)
            self._inner.apply_group(members, result, state, outcome)
            outcome.tickets += [ticket] * (len(outcome.entries) - len(outcome.tickets))
        self._settle_rows(over, full, len(rows.members), state, outcome)
        if ended:
            rows.remove(ended)

    def _settle_rows(
        self, over: Ints, full: Ints, end: int, state: CoreState, outcome: StepOutcome
    ) -> tuple[Ints, Ints]:
        """Register blocks of full rows below `end`, and end those that are over. Returns the rest of both."""
        ours, full = split(full, end)
        self._blocks.register(ours)
        ours, over = split(over, end)
        for row in ours.tolist():
            outcome.ended.append(self._end(row, state))
        return over, full

    def _end(self, row: int, state: CoreState) -> EndedSequence:
        group = self._rows.members[row]
        sequence = group.sequences[0]
        status = check_stop(sequence, state.max_total_tokens)
        assert status is not None
        del state.running[bisect_left(state.running, group.ticket, key=_TICKET)]
        group.place = QueueKind.NOWHERE
        group.is_fast = False
        return state.retire(sequence, status)


def _is_plain(name: str, result: StepResult) -> bool:
    special = name in result.failed or name in result.children or name in result.candidates
    return not special and len(result.tokens.get(name, ())) <= 1


def _column(flight: FastInFlight | None, rows: FastRows, result: StepResult) -> Ints:
    """One token for each position of the plan's fast-decode part, NO_TOKEN for none."""
    if flight is None:
        return np.zeros(0, np.int64)
    if result.column is not None:
        return np.asarray(result.column, np.int64)
    groups = [rows.members[row] if row >= 0 else flight.left.get(i) for i, row in enumerate(flight.rows.tolist())]
    names = [group.sequences[0].name if group else "" for group in groups]
    return np.array([(result.tokens.get(name) or [NO_TOKEN])[0] for name in names], np.int64)


def _as_objects(
    flights: list[SequenceInFlight], flight: FastInFlight | None, column: Ints, result: StepResult
) -> tuple[list[SequenceInFlight], StepResult]:
    """Shares of the plan that are not rows any more, appended to `flights`, and a result that includes their tokens."""
    if flight is None or not flight.left:
        return flights, result
    back = {position: group for position, group in flight.left.items() if not group.is_finished}
    tokens = {g.sequences[0].name: [int(column[i])] for i, g in back.items() if column[i] != NO_TOKEN}
    return [*flights, *flight.shares(back)], replace(result, tokens={**tokens, **result.tokens})


def _by_ticket(flights: list[SequenceInFlight]) -> list[tuple[int, list[SequenceInFlight]]]:
    """Shares of unfinished sequences by group, in the plan's order."""
    found: dict[int, list[SequenceInFlight]] = {}
    for flight in flights:
        if not flight.sequence.status.is_finished:
            found.setdefault(flight.ticket, []).append(flight)
    return sorted(found.items())
