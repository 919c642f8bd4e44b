"""Running sequences in plain decode as arrays, so that a decode step costs a few array operations.

While a sequence is a row, its counters are here and not in the object: `leave` and `sync` write them back. Rows
are in running order; row i belongs to `members[i]`. Recent tokens are kept in a ring of RING_BLOCKS blocks per
row and moved to `token_ids` when it is full.
"""

from dataclasses import dataclass, field
from itertools import chain, pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from scheduler_svc.core.entries import SequenceInFlight
from scheduler_svc.core.request import Group, Sequence

Ints = NDArray[np.int64]
Flags = NDArray[np.bool_]

MAX_STOP_IDS = 4
NO_TOKEN = -1
RING_BLOCKS = 4
_ALL = slice(None)
_NUM_COUNTERS = 13


@dataclass(slots=True)
class FastInFlight:
    """The rows of a plan in flight. `rows`: current row of each, -1 for those in `left` (by position in the plan).

    `tickets`: of their groups when the plan was made.
    """

    rows: Ints
    computed_before: Ints
    tickets: Ints
    left: dict[int, Group] = field(default_factory=dict)

    def shares(self, groups: dict[int, Group]) -> list[SequenceInFlight]:
        """Shares of these groups, by position in the plan, as objects and in order."""
        places = sorted(groups)
        columns = places, self.computed_before[places].tolist(), self.tickets[places].tolist()
        return [
            SequenceInFlight(groups[place].sequences[0], 1, before, ticket=ticket)
            for place, before, ticket in zip(*columns, strict=True)
        ]


class FastRows:
    """Owner of the arrays, int64 [rows]. All lengths are in tokens of the whole sequence, prompt included.

    - `known`, `computed`, `placeholders`: the counters of `Sequence`.
    - `prompts`: prompt lengths; `ends_at`: prompt length + max_tokens.
    - `may_stop_at`: no stop rule applies below this length.
    - `capacity`: tokens that the block table can hold.
    - `held`: blocks of the sequence, without null blocks.
    - `next_full`: length at which the next block is full and can be registered.
    - `frees_at`: as in `Sequence`.
    - `flushed`: tokens already in `token_ids`.
    - `slots`: index in the ring store.
    - `stop_ids`: [MAX_STOP_IDS, rows], -1 = none.
    - `tickets`: order of entering `running`, ascending.
    - `batch_signature`: identity shared by the shares that contain all rows.
    - lists parallel to the arrays: `members`, and `ends`, the open ends of their block tables.

    The arrays are views of one, so that rows join and leave by one operation.
    """

    tickets: Ints
    known: Ints
    computed: Ints
    placeholders: Ints
    prompts: Ints
    ends_at: Ints
    may_stop_at: Ints
    capacity: Ints
    held: Ints
    next_full: Ints
    frees_at: Ints
    flushed: Ints
    slots: Ints
    stop_ids: Ints

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self.batch_signature = object()
        self.flights: dict[int, FastInFlight] = {}
        self.members: list[Group] = []
        self.ends: list[Any] = []
        self._hold(np.zeros((_NUM_COUNTERS + MAX_STOP_IDS, 0), np.int64))
        self._num_stop_ids = 0
        self._ring = RING_BLOCKS * block_size
        self._store = np.zeros((0, self._ring), "<i4")
        self._free_slots: list[int] = []

    def pick(self, rows: Ints) -> Any:
        """An index for ascending, distinct rows; a slice if these are all rows, which avoids a gather."""
        return _ALL if len(rows) == len(self.members) else rows

    def _hold(self, columns: Ints) -> None:
        """Replace all arrays, in the order of `_counters`."""
        self._columns = columns
        self.tickets, self.known, self.computed, self.placeholders, self.prompts, *others = columns[:_NUM_COUNTERS]
        self.ends_at, self.may_stop_at, self.capacity, self.held, *others = others
        self.next_full, self.frees_at, self.flushed, self.slots = others
        self.stop_ids = columns[_NUM_COUNTERS:]

    # --- joining and leaving -------------------------------------------------------------------------------------

    def join(self, groups: list[Group], ends: list[Any], next_full: list[int]) -> None:
        """Turn groups of one sequence, in running order, into rows. Plans in flight keep the old list of members."""
        is_last = not self.members or groups[0].ticket > self.members[-1].ticket
        new = [self._counters(group, end, full) for group, end, full in zip(groups, ends, next_full, strict=True)]
        self._hold(np.concatenate([self._columns, np.array(new, np.int64).T], axis=1))
        self._num_stop_ids = max(self._num_stop_ids, *(_num_stop_ids(group.sequences[0]) for group in groups))
        self.batch_signature = object()
        self.members, self.ends = self.members + groups, self.ends + ends
        for group in groups:
            group.is_fast = True
        if not is_last:
            self._sort()

    def _counters(self, group: Group, end: Any, next_full: int) -> tuple[int, ...]:
        [sequence] = group.sequences
        num_tokens, num_prompt_tokens, stop = len(sequence.token_ids), sequence.num_prompt_tokens, group.request.stop
        return (
            group.ticket,
            num_tokens,
            sequence.num_computed_tokens,
            sequence.num_placeholders,
            num_prompt_tokens,
            num_prompt_tokens + stop.max_tokens,
            num_prompt_tokens + max(1, stop.min_tokens),
            len(end.table) * self.block_size,
            end.num_held,
            next_full,
            sequence.frees_at,
            num_tokens,
            self._new_slot(sequence.token_ids, next_full - self.block_size),
            *_stop_ids(sequence),
        )

    def _sort(self) -> None:
        """Bring rows into running order, where groups joined that entered `running` before others."""
        order = np.argsort(self.tickets)
        self._hold(np.take(self._columns, order, axis=1))
        self.members = [self.members[row] for row in order.tolist()]
        self.ends = [self.ends[row] for row in order.tolist()]
        now_at = np.argsort(order)
        for flight in self.flights.values():
            flight.rows = np.where(flight.rows >= 0, now_at[flight.rows], -1)

    def _new_slot(self, token_ids: list[int], first: int) -> int:
        """Allocate a ring and fill it with the tokens from offset `first` on, as far as it would hold them."""
        if not self._free_slots:
            size = len(self._store)
            self._store = np.concatenate([self._store, np.zeros((max(64, size), self._ring), "<i4")])
            self._free_slots = list(range(len(self._store) - 1, size - 1, -1))
        slot = self._free_slots.pop()
        first = max(first, (len(token_ids) - 1) // self._ring * self._ring)
        if recent := token_ids[first:]:
            self._store[slot, first % self._ring : first % self._ring + len(recent)] = recent
        return slot

    def leave(self, group: Group) -> None:
        """Turn a row into an object. No-op for a group that is not a row."""
        if group.is_fast:
            self.remove([self.row_of(group)])

    def dissolve(self) -> None:
        """Turn all rows into objects."""
        if self.members:
            self.remove(list(range(len(self.members))))

    def remove(self, gone: list[int]) -> None:
        """Turn these rows, ascending, into objects; plans in flight then refer to them by group."""
        self.batch_signature = object()
        self._free_slots += self.slots[gone].tolist()
        self.write_back([row for row in gone if self.members[row].is_fast])
        for row in gone:
            self.members[row].is_fast = False
        if self.flights:
            keep = np.ones(len(self.members), np.bool_)
            keep[gone] = False
            for flight in self.flights.values():
                self._move(flight, keep)
        ends = pairwise([-1, *gone, len(self.members)])
        stay = [slice(0, 0), *(slice(before + 1, row) for before, row in ends if row > before + 1)]
        self._hold(np.concatenate([self._columns[:, piece] for piece in stay], axis=1))
        self.members = list(chain.from_iterable([self.members[piece] for piece in stay]))
        self.ends = list(chain.from_iterable([self.ends[piece] for piece in stay]))

    def _move(self, flight: FastInFlight, keep: Flags) -> None:
        stays = (flight.rows >= 0) & keep[flight.rows]
        for position in np.flatnonzero((flight.rows >= 0) & ~stays).tolist():
            flight.left[position] = self.members[flight.rows[position]]
        flight.rows = np.where(stays, (np.cumsum(keep) - 1)[flight.rows], -1)

    # --- plans in flight -----------------------------------------------------------------------------------------

    def batch_signature_of(self, rows: Ints) -> object:
        """`batch_signature` for a share of these rows: the common one if it has all rows, else a new one, which also ends
        the common one.
        """
        if len(rows) == len(self.members):
            return self.batch_signature
        self.batch_signature = object()
        return object()

    def take_off(self, step: int, rows: Ints, computed_before: Ints) -> None:
        """Record a plan with these rows as in flight."""
        self.flights[step] = FastInFlight(rows, computed_before, self.tickets[rows])

    def due_to_free(self, step: int) -> list[SequenceInFlight]:
        """Shares of a plan's rows that may have blocks behind a window once its result is applied (`frees_at`)."""
        flight = self.flights.get(step)
        if flight is None:
            return []
        here = np.flatnonzero(flight.rows >= 0)
        due = here[flight.computed_before[here] >= self.frees_at[flight.rows[here]]]
        rows = zip(due.tolist(), flight.rows[due].tolist(), strict=True)
        return flight.shares({place: self.members[row] for place, row in rows} | flight.left)

    def freed(self, groups: list[Group], num_freed: list[int], frees_at: list[int]) -> None:
        """Note how many blocks were freed behind windows, and when the next will be, of those groups that are rows."""
        at = [place for place, group in enumerate(groups) if group.is_fast]
        if at:
            rows = self.tickets.searchsorted([groups[place].ticket for place in at])
            self.held[rows] -= np.take(num_freed, at)
            self.frees_at[rows] = np.take(frees_at, at)

    def land(self, step: int) -> list[SequenceInFlight]:
        """Remove a plan after all its rows became objects, and return its shares."""
        flight = self.flights.pop(step, None)
        return [] if flight is None else flight.shares(flight.left)

    def discard(self, groups: list[Group]) -> None:
        """Ignore results of plans in flight for these groups, which are not rows any more."""
        names = {id(group) for group in groups}
        for flight in self.flights.values():
            flight.left = {i: group for i, group in flight.left.items() if id(group) not in names}

    # --- objects and rows ----------------------------------------------------------------------------------------

    def row_of(self, group: Group) -> int:
        """The row of a member."""
        return int(self.tickets.searchsorted(group.ticket))

    def sync(self, group: Group) -> None:
        """Write back a group's row. No-op for a group that is not a row."""
        if group.is_fast:
            self.write_back([self.row_of(group)])

    def sync_all(self) -> None:
        """Write all rows back to their objects; they stay rows."""
        self.write_back(list(range(len(self.members))))

    def write_back(self, rows: list[int]) -> None:
        """Write the counters and tokens of these rows back to their objects; they stay rows."""
        if not rows:
            return
        counters = self._columns[:_NUM_COUNTERS].take(rows, axis=1).T.tolist()
        for row, (_, known, computed, placeholders, *_, flushed, slot) in zip(rows, counters, strict=True):
            sequence = self.members[row].sequences[0]
            first = flushed % self._ring
            sequence.token_ids += self._store[slot, first : first + known - flushed].tolist()
            sequence.num_computed_tokens, sequence.num_placeholders = computed, placeholders
        self.flushed[rows] = self.known[rows]

    # --- tokens --------------------------------------------------------------------------------------------------

    def append(self, rows: Ints, at: Any, tokens: Ints) -> None:
        """Append one token per row; full rings are moved to `token_ids`. `at`: `pick(rows)`, here and below."""
        known = self.known[at]
        self._store[self.slots[at], known % self._ring] = tokens
        self.known[at] += 1
        full = rows[self.known[at] % self._ring == 0]
        if len(full):
            self._flush(full)

    def _flush(self, rows: Ints) -> None:
        starts = (self.flushed[rows] % self._ring).tolist()
        rings = self._store[self.slots[rows]].tolist()
        for row, start, tokens in zip(rows.tolist(), starts, rings, strict=True):
            self.members[row].sequences[0].token_ids += tokens[start:] if start else tokens
        self.flushed[rows] = self.known[rows]

    def first_in_ring(self, rows: Ints) -> Ints:
        """Index of the first token that each row's ring holds."""
        first: Ints = (self.known[rows] - 1) // self._ring * self._ring
        return first

    def blocks_before(self, rows: Ints, ends_at: Ints) -> bytes:
        """Tokens of the full blocks that end there, as little-endian int32, one row after the other."""
        blocks = self._store.reshape(len(self._store), RING_BLOCKS, self.block_size)
        places = (ends_at - self.block_size) % self._ring // self.block_size
        return blocks[self.slots[rows], places].tobytes()

    def filled(self, rows: Ints, at: Any, num_tokens: Ints) -> Ints:
        """The rows with a full next block, given their numbers of confirmed tokens."""
        filled: Ints = rows[np.minimum(num_tokens, self.known[at]) >= self.next_full[at]]
        return filled

    def is_over(self, at: Any, tokens: Ints, max_total_tokens: int) -> Flags:
        """Which rows end by the tokens just appended."""
        known = self.known[at]
        over: Flags = known >= self.ends_at[at]
        for column in range(self._num_stop_ids):
            over |= self.stop_ids[column, at] == tokens
        over &= known >= self.may_stop_at[at]
        over |= known >= max_total_tokens
        return over


def can_join(sequence: Sequence) -> bool:
    """True if the sequence is in plain decode and needs nothing but counters."""
    request = sequence.request
    return (
        sequence.num_output_tokens > 0
        and not sequence.in_prefill
        and not sequence.group.needs_result
        and not sequence.group.is_paused
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
