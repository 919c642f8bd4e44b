"""Snapshot of a core, the start of a replay: its objects as one JSON document, with its tokens and requests separate.

Tokens are kept apart from the objects so that they can be renamed, and an untouched waiting request is stored
as its record only. Reading makes blank objects of the core's and the block manager's own classes and sets
their attributes; no function is called, so that a snapshot from an untrusted source cannot run code.
"""

import gc
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import MISSING, Field, dataclass, fields
from operator import attrgetter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from block_manager.hashing import Hasher, PrefixJournal
from scheduler_svc.core.fast_decode.rows import FastInFlight, FastRows
from scheduler_svc.core.parts.interfaces import Ordering
from scheduler_svc.core.parts.queues import SortedQueue
from scheduler_svc.core.request import Group, QueueKind, Request, Sequence
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.observe.recording.inputs import PLAIN_FIELDS, RequestRecord, Tokens, plain_values, token_ids
from scheduler_svc.observe.recording.object_graph import GraphError, GraphReader, GraphWriter, Special
from scheduler_svc.observe.recording.token_alias import TokenAlias

_I32 = np.dtype("<i4")


class SnapshotError(ValueError):
    """The snapshot cannot be read, or contains objects that no core has."""


@dataclass(frozen=True, slots=True)
class CoreSnapshot:
    """`objects`: the JSON document. `tokens`: the tokens taken out of them. `requests`: records of all requests in them."""

    objects: bytes
    tokens: Tokens
    requests: list[RequestRecord]

    @property
    def num_bytes(self) -> int:
        """Approximate size, without the requests' records, which exist anyway."""
        return len(self.objects) + len(self.tokens) + 8 * len(self.requests)


def take(core: Scheduler, records: Mapping[str, RequestRecord]) -> CoreSnapshot:
    """Snapshot of the core. Dissolves its fast decode rows, which changes no decision. `records`: of live requests, if known."""
    core.dissolve_fast_rows()
    with _no_collecting():
        taker = _Taker(core, records)
        writer = GraphWriter(taker.specials(), nothing=(TokenAlias, Hasher, PrefixJournal))
        taker.value = writer.value
        return CoreSnapshot(writer.document(core), taker.taken(), taker.records)


@contextmanager
def _no_collecting() -> Iterator[None]:
    """Disable garbage collection while many objects are made, none of them garbage; it would take longer than making them."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def restore(snapshot: CoreSnapshot) -> Scheduler:
    """A core equal to the snapshot's, with the snapshot's tokens. Raises SnapshotError for anything else."""
    try:
        with _no_collecting():
            core = GraphReader(snapshot.objects, _Maker(snapshot).specials()).root()
    except (GraphError, ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError) as error:
        raise SnapshotError(f"{type(error).__name__}: {error}") from None
    if not isinstance(core, Scheduler):
        raise SnapshotError(f"it holds a {type(core).__name__}")
    return core


# --- out --------------------------------------------------------------------------------------------------------------

_Fresh = tuple[Callable[[Any], Any], tuple[Any, ...]]


def _fresh_values(kind: type[Any], *but: str) -> _Fresh:
    """A reader of an object's fields, and their values in a fresh object."""
    of_kind = [f for f in fields(kind) if f.name not in but and _has_default(f)]
    return attrgetter(*(f.name for f in of_kind)), tuple(_default(f) for f in of_kind)


def _default(field: Field[Any]) -> Any:
    return field.default if field.default_factory is MISSING else field.default_factory()


def _has_default(field: Field[Any]) -> bool:
    return field.default is not MISSING or field.default_factory is not MISSING


_FRESH_GROUP = _fresh_values(Group, "sequences", "width", "place")
_FRESH_SEQUENCE = _fresh_values(Sequence, "prefill_end")
_TAKEN_OUT = ("token_ids", "draft_token_ids", "stop_token_id", "name")
_GROUP_STATE = tuple(f.name for f in fields(Group))
_SEQUENCE_STATE = tuple(f.name for f in fields(Sequence) if f.name not in _TAKEN_OUT)
_REQUEST_STATE = ("groups", *(name for name in PLAIN_FIELDS if name != "cache_salt"))
_WAITING_REQUEST, _REQUEST, _WAITING_GROUP, _GROUP, _SEQUENCE, _ROWS, _FLIGHT, _QUEUE, _ARRAY = "wrWGSyzqa"


class _Taker:
    """Collects tokens and requests while writing objects. Requests are numbered, since an ended and a live one may share an id."""

    value: Callable[[Any], Any]

    def __init__(self, core: Scheduler, known: Mapping[str, RequestRecord]) -> None:
        self.records: list[RequestRecord] = []
        self._live = core.state.requests
        self._known = known
        self._tokens = array("i")
        self._numbers: dict[int, int] = {}
        self._untouched: dict[int, bool] = {}

    def specials(self) -> dict[type[Any], Callable[[Any], list[Any]]]:
        """How objects of these types are written."""
        return {
            Request: self._request,
            Group: self._group,
            Sequence: self._sequence,
            FastRows: self._rows,
            FastInFlight: self._flight,
            SortedQueue: self._queue,
            np.ndarray: _array,
        }

    def taken(self) -> Tokens:
        """All collected tokens."""
        return Tokens(np.asarray(self._tokens, _I32).tobytes())

    def _put(self, ids: Iterable[int]) -> int:
        """Append tokens; returns their end position."""
        self._tokens.extend(ids)
        return len(self._tokens)

    def _number(self, request: Request) -> int:
        number = self._numbers.get(id(request))
        if number is None:
            number = self._numbers[id(request)] = len(self.records)
            lives = self._live.get(request.request_id) is request
            record = self._known.get(request.request_id) if lives else None
            self.records.append(RequestRecord.of(request) if record is None else record)
        return number

    def _is_untouched(self, request: Request) -> bool:
        known = self._untouched.get(id(request))
        if known is None:
            record = self.records[self._number(request)]
            known = self._untouched[id(request)] = _is_untouched(request, record)
        return known

    def _request(self, request: Request) -> list[Any]:
        number = self._number(request)
        if self._is_untouched(request):
            return [_WAITING_REQUEST, number, len(request.groups) > 1]
        return [_REQUEST, number, *(self.value(getattr(request, name)) for name in _REQUEST_STATE)]

    def _group(self, group: Group) -> list[Any]:
        if self._is_untouched(group.request):
            return [_WAITING_GROUP, self.value(group.request), group.request.groups.index(group)]
        return [_GROUP, *(self.value(getattr(group, name)) for name in _GROUP_STATE)]

    def _sequence(self, sequence: Sequence) -> list[Any]:
        number = self._number(sequence.group.request)
        start = len(self._tokens)
        outputs = self._put(sequence.token_ids[sequence.num_prompt_tokens :])
        drafts = self._put(sequence.draft_token_ids)
        stop = self._put(() if sequence.stop_token_id is None else (sequence.stop_token_id,))
        state = (self.value(getattr(sequence, name)) for name in _SEQUENCE_STATE)
        return [_SEQUENCE, number, sequence.name, start, outputs, drafts, stop, *state]

    def _rows(self, rows: FastRows) -> list[Any]:
        """There are no members after dissolving; rows in flight are found by group."""
        assert not rows.members
        return [_ROWS, rows.block_size, self.value(rows.flights)]

    def _flight(self, flight: FastInFlight) -> list[Any]:
        columns = {"rows": flight.rows, "before": flight.computed_before, "tickets": flight.tickets}
        return [_FLIGHT, {name: column.tolist() for name, column in columns.items()}, self.value(flight.left)]

    def _queue(self, queue: SortedQueue) -> list[Any]:
        """A queue as columns of keys plus groups in order, which is compact for long ones."""
        keys, ids, counts, groups = zip(*queue._items, strict=True) if queue._items else ((), (), (), ())
        columns = {"keys": keys, "ids": ids, "counts": counts}
        return [_QUEUE, queue._count, columns, self.value(queue._ordering), *map(self.value, groups)]


def _is_untouched(request: Request, record: RequestRecord) -> bool:
    """True if the request waits as it arrived: no plan has changed it."""
    num_tokens = record.num_tokens
    return plain_values(request) == tuple(record.values.values()) and all(
        group.place is QueueKind.WAITING
        and _is_fresh(group, _FRESH_GROUP)
        and len(group.sequences) == 1
        and _is_fresh(group.sequences[0], _FRESH_SEQUENCE)
        and group.sequences[0].prefill_end == group.sequences[0].num_tokens == num_tokens
        for group in request.groups
    )


def _is_fresh(item: Any, fresh: _Fresh) -> bool:
    read, values = fresh
    return bool(read(item) == values)


def _array(numbers: NDArray[Any]) -> list[Any]:
    return [_ARRAY, {"type": numbers.dtype.str, "shape": numbers.shape, "values": numbers.ravel().tolist()}]


# --- in ---------------------------------------------------------------------------------------------------------------


class _Maker:
    """Makes the objects that `_Taker` wrote, with requests and tokens from the snapshot."""

    def __init__(self, snapshot: CoreSnapshot) -> None:
        self._records = snapshot.requests
        self._tokens = token_ids(snapshot.tokens)

    def specials(self) -> dict[str, Special]:
        """By tag: how a blank object is made, and how its state is set."""
        return {
            _WAITING_REQUEST: (self._waiting_request, None),
            _REQUEST: (self._request, _fill_request),
            _WAITING_GROUP: (None, _waiting_group),
            _GROUP: (lambda *state: Group.__new__(Group), _fill_group),
            _SEQUENCE: (self._sequence, _fill_sequence),
            _ROWS: (lambda block_size, flights: FastRows(int(block_size)), _fill_rows),
            _FLIGHT: (_flight, _fill_flight),
            _QUEUE: (lambda *state: SortedQueue.__new__(SortedQueue), _fill_queue),
            _ARRAY: (_numbers, None),
        }

    def _request(self, number: int, *state: Any) -> Request:
        return self._records[number].request()

    def _waiting_request(self, number: int, as_samples: bool) -> Request:
        request = self._records[number].request()
        if as_samples:
            request.as_samples()
        for group in request.groups:
            group.place = QueueKind.WAITING
        return request

    def _sequence(
        self, number: int, name: str, start: int, outputs: int, drafts: int, stop: int, *state: Any
    ) -> Sequence:
        sequence = Sequence.__new__(Sequence)
        sequence.name = name
        sequence.token_ids = token_ids(self._records[number].prompt) + self._tokens[start:outputs]
        sequence.draft_token_ids = self._tokens[outputs:drafts]
        sequence.stop_token_id = self._tokens[drafts] if stop > drafts else None
        return sequence


def _fill_request(request: Request, number: int, *state: Any) -> None:
    _set(request, _REQUEST_STATE, state)


def _fill_group(group: Group, *state: Any) -> None:
    _set(group, _GROUP_STATE, state)


def _fill_sequence(sequence: Sequence, *parts: Any) -> None:
    _set(sequence, _SEQUENCE_STATE, parts[-len(_SEQUENCE_STATE) :])


def _set(item: Any, names: tuple[str, ...], state: tuple[Any, ...]) -> None:
    for name, value in zip(names, state, strict=True):
        setattr(item, name, value)


def _waiting_group(request: Request, number: int) -> Group:
    return request.groups[number]


def _fill_rows(rows: FastRows, block_size: int, flights: dict[int, FastInFlight]) -> None:
    rows.flights = flights


def _fill_queue(queue: SortedQueue, count: int, columns: dict[str, Any], ordering: Ordering, *groups: Group) -> None:
    keys = map(tuple, columns["keys"])
    queue._ordering, queue._count = ordering, count
    queue._items = list(zip(keys, columns["ids"], columns["counts"], groups, strict=True))
    queue._item_of = {item[3]: item for item in queue._items}


def _flight(columns: dict[str, list[int]], left: Any) -> FastInFlight:
    rows, before, tickets = (np.asarray(columns[name], np.int64) for name in ("rows", "before", "tickets"))
    return FastInFlight(rows, before, tickets)


def _fill_flight(flight: FastInFlight, columns: Any, left: dict[int, Group]) -> None:
    flight.left = left


def _numbers(written: dict[str, Any]) -> NDArray[Any]:
    dtype = np.dtype(written["type"])
    if dtype.kind not in "biuf":
        raise GraphError(f"it wants an array of {dtype}")
    return np.asarray(written["values"], dtype).reshape(written["shape"])
