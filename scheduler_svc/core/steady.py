"""Running sequences in plain decode, as columns: in steady decode a step costs a few array operations (design.md 4, fast path).

While a sequence is a row here its counters are here, not in the object: `leave` and `sync` write them back. Rows stand in running
order; row i belongs to `members[i]`. Recent tokens wait in `tail`, one block of them, and go to `token_ids` block by block.
"""

from dataclasses import dataclass, field
from itertools import compress

import numpy as np
from numpy.typing import NDArray

from scheduler_svc.core.request import Group, Sequence

Ints = NDArray[np.int64]
Flags = NDArray[np.bool_]

MAX_STOP_IDS = 4
NO_TOKEN = -1
_COLUMNS = ("tickets", "known", "computed", "placeholders", "ends_at", "may_stop_at", "capacity", "next_full", "flushed")


@dataclass(slots=True)
class SteadyFlight:
    """The rows of a plan that is under way. `rows`: where each stands now, -1 for those in `left` (by position in the plan).

    `tickets`: of their groups when the plan was made.
    """

    rows: Ints
    computed_before: Ints
    tickets: Ints
    left: dict[int, Group] = field(default_factory=dict)


class SteadyRows:
    """Owner of the columns. All lengths are in tokens of the whole sequence, prompt included.

    `known`, `computed`, `placeholders`: as in `Sequence`. `ends_at`: prompt and max_tokens; `may_stop_at`: with fewer no stop rule is
    asked. `capacity`: what its table can hold. `next_full`: where the next block can be found by others. `flushed`: known tokens
    that are in `token_ids`. `stop_ids`: int64 [rows, 4], -1 = none. `tickets`: order of coming into `running`, ascending.
    """

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self.members: list[Group] = []
        self.flights: dict[int, SteadyFlight] = {}
        none = np.zeros(0, np.int64)
        self.tickets = self.known = self.computed = self.placeholders = self.ends_at = none
        self.may_stop_at = self.capacity = self.next_full = self.flushed = none
        self.stop_ids = np.zeros((0, MAX_STOP_IDS), np.int64)
        self.tail = np.zeros((0, block_size), np.int64)
        self.has_stop_ids = False

    def __len__(self) -> int:
        return len(self.members)

    # --- joining and leaving -------------------------------------------------------------------------------------

    def join(self, groups: list[Group], capacities: list[int], next_full: list[int]) -> None:
        """Groups of one sequence become rows; they are in running order."""
        sequences = [group.sequences[0] for group in groups]
        at = np.searchsorted(self.tickets, [group.ticket for group in groups])
        new = {
            "tickets": [group.ticket for group in groups],
            "known": [s.num_tokens for s in sequences],
            "computed": [s.num_computed_tokens for s in sequences],
            "placeholders": [s.num_placeholders for s in sequences],
            "ends_at": [s.num_prompt_tokens + s.request.stop.max_tokens for s in sequences],
            "may_stop_at": [s.num_prompt_tokens + max(1, s.request.stop.min_tokens) for s in sequences],
            "capacity": capacities,
            "next_full": next_full,
            "flushed": [s.num_tokens for s in sequences],
        }
        for name in _COLUMNS:
            setattr(self, name, np.insert(getattr(self, name), at, new[name]))
        ids = np.array([_stop_ids(s) for s in sequences], np.int64)
        self.stop_ids = np.insert(self.stop_ids, at, ids, axis=0)
        self.has_stop_ids = bool((self.stop_ids != NO_TOKEN).any())
        self.tail = np.insert(self.tail, at, 0, axis=0)
        self._insert_members(groups, at)

    def _insert_members(self, groups: list[Group], at: Ints) -> None:
        members = list(self.members)
        for offset, (group, place) in enumerate(zip(groups, at.tolist(), strict=True)):
            members.insert(place + offset, group)
            group.is_steady = True
        for flight in self.flights.values():
            moved = flight.rows + np.searchsorted(at, flight.rows, side="right")
            flight.rows = np.where(flight.rows >= 0, moved, -1)
        self.members = members

    def leave(self, group: Group) -> None:
        """A row becomes an object again. Who is no row: nothing."""
        if group.is_steady:
            keep = np.ones(len(self), np.bool_)
            keep[self.row_of(group)] = False
            self.remove(keep)

    def dissolve(self) -> None:
        """All rows become objects again."""
        if self.members:
            self.remove(np.zeros(len(self), np.bool_))

    def remove(self, keep: Flags) -> None:
        """Those that are not kept become objects again; what is under way of them is found by their group from now on."""
        gone = np.flatnonzero(~keep)
        for row in gone.tolist():
            self._write_back(row)
            self.members[row].is_steady = False
        for flight in self.flights.values():
            for position in np.flatnonzero((flight.rows >= 0) & ~keep[flight.rows]).tolist():
                flight.left[position] = self.members[flight.rows[position]]
            moved = np.cumsum(keep) - 1
            flight.rows = np.where((flight.rows >= 0) & keep[flight.rows], moved[flight.rows], -1)
        for name in _COLUMNS:
            setattr(self, name, getattr(self, name)[keep])
        self.stop_ids, self.tail = self.stop_ids[keep], self.tail[keep]
        self.members = list(compress(self.members, keep.tolist()))

    # --- plans under way -----------------------------------------------------------------------------------------

    def take_off(self, step: int, rows: Ints, computed_before: Ints) -> None:
        """A plan with these rows is under way."""
        self.flights[step] = SteadyFlight(rows, computed_before, self.tickets[rows])

    def land(self, step: int) -> list[tuple[Group, int, int]]:
        """What a plan under way had, once all its rows have left: (group, computed tokens before it, ticket)."""
        flight = self.flights.pop(step, None)
        if flight is None:
            return []
        return [(g, int(flight.computed_before[i]), int(flight.tickets[i])) for i, g in sorted(flight.left.items())]

    def discard(self, groups: list[Group]) -> None:
        """What plans under way give for these, which are no rows any more, is ignored."""
        names = {id(group) for group in groups}
        for flight in self.flights.values():
            flight.left = {i: group for i, group in flight.left.items() if id(group) not in names}

    # --- objects and rows ----------------------------------------------------------------------------------------

    def row_of(self, group: Group) -> int:
        """The row of a member."""
        return int(np.searchsorted(self.tickets, group.ticket))

    def sync(self, group: Group) -> None:
        """Writes a row's counters and tokens back; it stays a row."""
        if group.is_steady:
            self._write_back(self.row_of(group))

    def sync_all(self) -> None:
        """Writes all rows back; they stay rows."""
        for row in range(len(self)):
            self._write_back(row)

    def _write_back(self, row: int) -> None:
        sequence = self.members[row].sequences[0]
        start, num = int(self.flushed[row]), int(self.known[row] - self.flushed[row])
        if num:
            first = start % self.block_size
            sequence.token_ids += self.tail[row, first : first + num].tolist()
            self.flushed[row] += num
            sequence.group.num_fruitless = 0
        sequence.num_computed_tokens = int(self.computed[row])
        sequence.num_placeholders = int(self.placeholders[row])

    def append(self, rows: Ints, tokens: Ints) -> None:
        """One more known token each; full blocks of them go to `token_ids`."""
        known = self.known[rows]
        self.tail[rows, known % self.block_size] = tokens
        known += 1
        self.known[rows] = known
        full = rows[known % self.block_size == 0]
        if len(full):
            self._flush(full)

    def _flush(self, rows: Ints) -> None:
        starts = (self.flushed[rows] % self.block_size).tolist()
        for row, start, tokens in zip(rows.tolist(), starts, self.tail[rows].tolist(), strict=True):
            self.members[row].sequences[0].token_ids += tokens[start:] if start else tokens
        self.flushed[rows] = self.known[rows]

    def is_over(self, rows: Ints, tokens: Ints, max_total_tokens: int) -> Flags:
        """Which rows end by the tokens that were just appended (R140)."""
        known = self.known[rows]
        over: Flags = (known >= self.ends_at[rows]) | (known >= max_total_tokens)
        if self.has_stop_ids:
            over |= (self.stop_ids[rows] == tokens[:, None]).any(axis=1)
        return over & (known >= self.may_stop_at[rows])


def can_join(sequence: Sequence) -> bool:
    """It decodes token by token and nothing about it needs more than counters."""
    request = sequence.request
    return (
        sequence.num_output_tokens > 0
        and sequence.group.num_fruitless == 0
        and not sequence.in_prefill
        and sequence.group.width == 1
        and not sequence.draft_token_ids
        and request.num_samples == request.n
        and _num_stop_ids(sequence) <= MAX_STOP_IDS
    )


def _num_stop_ids(sequence: Sequence) -> int:
    stop = sequence.request.stop
    return len(stop.stop_token_ids) + (0 if stop.ignore_eos else len(stop.eos_token_ids))


def _stop_ids(sequence: Sequence) -> list[int]:
    stop = sequence.request.stop
    ids = [*sorted(stop.stop_token_ids), *(() if stop.ignore_eos else sorted(stop.eos_token_ids))]
    return ids + [NO_TOKEN] * (MAX_STOP_IDS - len(ids))
