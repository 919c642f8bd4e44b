"""Encoding of segments as bytes: JSON documents and the arrays that they refer to. Tokens are renamed here."""

import json
import struct
from collections.abc import Callable
from dataclasses import fields
from typing import Any, Protocol

import numpy as np

from scheduler_svc.observe.plan_record import PlanRecord, StepShapeColumns
from scheduler_svc.observe.recording.events import (
    EVENTS,
    Added,
    Drafted,
    Event,
    PlanEvent,
    Returned,
)
from scheduler_svc.observe.recording.inputs import RequestRecord, ResultRecord, Tokens
from scheduler_svc.observe.recording.segment_buffer import RecordingSegment
from scheduler_svc.observe.recording.snapshot import CoreSnapshot

_HEAD = struct.Struct("<III")
_I32 = np.dtype("<i4")
_PLAN_FIELDS = tuple(f.name for f in fields(PlanRecord))
_TOKENS, _BYTES = 0, 1


class TokenRename(Protocol):
    """Renaming of tokens and salts; see `TokenAlias`."""

    def tokens(self, data: bytes) -> bytes:
        """Rename token ids, little-endian int32."""

    def salt(self, text: str) -> str:
        """Rename a tenant's salt."""


class BadSegment(ValueError):
    """The bytes are not a segment."""


def encode(segment: RecordingSegment, rename: TokenRename | None) -> bytes:
    """Encode a segment; `rename` None: keep its tokens."""
    return _Encoder(rename).segment(segment)


def decode(data: bytes) -> RecordingSegment:
    """Decode a segment. Raises BadSegment for malformed bytes."""
    try:
        return _Decoder(data).segment()
    except (ValueError, KeyError, TypeError, IndexError, AttributeError, struct.error) as error:
        raise BadSegment(f"{type(error).__name__}: {error}") from None


class _Encoder:
    """Arrays of one segment, and its numbering of names, shapes and requests."""

    def __init__(self, rename: TokenRename | None) -> None:
        self._rename = rename
        self._arrays = (bytearray(), bytearray())
        self._names: dict[str, int] = {}
        self._shapes: dict[int, int] = {}
        self._shape_list: list[list[Any]] = []
        self._shapes_held: list[StepShapeColumns] = []
        self._requests: dict[int, int] = {}
        self._request_list: list[RequestRecord] = []

    def segment(self, segment: RecordingSegment) -> bytes:
        """The segment's bytes."""
        taken = segment.snapshot
        document: dict[str, Any] = {
            "number": segment.number,
            "first_step": segment.first_step,
            "about": segment.about,
            "goes_on": segment.goes_on,
            "num_steps": segment.num_steps,
            "snapshot": [taken.objects, taken.tokens, [self._request(r) for r in taken.requests]],
            "events": [[_NUMBERS[type(event)], *self._fields(event)] for event in segment.events],
        }
        events = self._text(document)  # first: it collects the requests, shapes and names
        tables = self._text(
            {
                "requests": [_request_fields(r, self._rename) for r in self._request_list],
                "shapes": self._shape_list,
                "names": list(self._names),
            }
        )
        tokens, others = self._arrays
        named = bytes(tokens) if self._rename is None else self._rename.tokens(bytes(tokens))
        return b"".join((_HEAD.pack(len(events), len(tables), len(tokens)), events, tables, named, others))

    def _text(self, values: dict[str, Any]) -> bytes:
        return json.dumps(values, default=self._other, separators=(",", ":")).encode()

    def _fields(self, event: Event) -> list[Any]:
        return [getattr(event, name) for name in _FIELDS[type(event)]]

    def _other(self, value: Any) -> Any:
        """Values of types that JSON lacks."""
        if isinstance(value, bytes):
            return self._array(value)
        if isinstance(value, RequestRecord):
            return self._request(value)
        if isinstance(value, PlanRecord):
            return [self._shape(value.shape) if n == "shape" else getattr(value, n) for n in _PLAN_FIELDS]
        if isinstance(value, ResultRecord):
            return [getattr(value, f.name) for f in fields(ResultRecord)]
        raise TypeError(f"a {type(value).__name__} has no place in a recording")

    def _array(self, data: bytes) -> list[int]:
        array = self._arrays[_TOKENS if isinstance(data, Tokens) else _BYTES]
        array += data
        return [len(array) - len(data), len(array)]

    def _request(self, record: RequestRecord) -> int:
        number = self._requests.get(id(record))
        if number is None:
            number = self._requests[id(record)] = len(self._request_list)
            self._request_list.append(record)
        return number

    def _shape(self, shape: StepShapeColumns) -> int:
        number = self._shapes.get(id(shape))
        if number is None:
            number = self._shapes[id(shape)] = len(self._shape_list)
            names = [self._names.setdefault(name, len(self._names)) for name in shape.names]
            columns = (np.asarray(names, _I32).tobytes(), shape.tokens, shape.lead, shape.flags)
            self._shape_list.append([self._array(column) for column in columns])
            self._shapes_held.append(shape)
        return number


def _request_fields(record: RequestRecord, rename: TokenRename | None) -> list[Any]:
    values = dict(record.values)
    if rename is not None:
        values["cache_salt"] = rename.salt(values["cache_salt"])
    return [values, record.prompt, record.committed, record.stop, list(record.stop_sets), record.beam]


class _Decoder:
    """Reads one segment."""

    def __init__(self, data: bytes) -> None:
        num_events, num_tables, num_tokens = _HEAD.unpack_from(data)
        middle = _HEAD.size + num_events
        start = middle + num_tables
        if start + num_tokens > len(data):
            raise BadSegment("it is shorter than it says")
        self._document = json.loads(data[_HEAD.size : middle])
        tables = json.loads(data[middle:start])
        self._tokens = data[start : start + num_tokens]
        self._others = data[start + num_tokens :]
        self._requests = [self._request(r) for r in tables["requests"]]
        self._names = tables["names"]
        self._shapes = [self._shape(s) for s in tables["shapes"]]

    def segment(self) -> RecordingSegment:
        """The decoded segment."""
        document = self._document
        objects, tokens, requests = document["snapshot"]
        taken = CoreSnapshot(self._bytes(objects), self._ids(tokens), [self._requests[n] for n in requests])
        events = [self._event(*event) for event in document["events"]]
        about = document["about"]
        return RecordingSegment(
            number=document["number"],
            first_step=document["first_step"],
            about=about,
            goes_on=document["goes_on"],
            snapshot=taken,
            events=events,
            num_steps=document["num_steps"],
        )

    def _ids(self, place: list[int]) -> Tokens:
        return Tokens(self._tokens[place[0] : place[1]])

    def _bytes(self, place: list[int]) -> bytes:
        return self._others[place[0] : place[1]]

    def _request(self, values: list[Any]) -> RequestRecord:
        plain, prompt, committed, stop, stop_sets, beam = values
        sets = tuple(self._ids(place) for place in stop_sets)
        return RequestRecord(plain, self._ids(prompt), self._ids(committed), stop, sets, beam)

    def _shape(self, places: list[list[int]]) -> StepShapeColumns:
        names, *columns = (self._bytes(place) for place in places)
        numbers = np.frombuffer(names, _I32).tolist()
        return StepShapeColumns(tuple([self._names[n] for n in numbers]), *columns)

    def _event(self, number: int, *values: Any) -> Event:
        kind = EVENTS[number]
        read = _READERS.get(kind)
        event: Event = kind(*(values if read is None else read(self, *values)))
        return event

    def _added(self, at: float, request: int, *rest: Any) -> tuple[Any, ...]:
        return at, self._requests[request], *rest

    def _planned(self, at: float, decisions: list[list[Any]], *rest: Any) -> tuple[Any, ...]:
        return at, [self._decision(*values) for values in decisions], *rest

    def _decision(self, step: int, lane: int, shape: int, *rest: Any) -> PlanRecord:
        return PlanRecord(step, lane, self._shapes[shape], *rest)

    def _returned(self, at: float, now: float | None, result: list[Any], *rest: Any) -> tuple[Any, ...]:
        (
            step,
            names,
            counts,
            tokens,
            duration_s,
            queued_s,
            logprobs,
            logprobs_of,
            failed,
            children,
            candidates,
            mask_s,
        ) = result
        record = ResultRecord(
            step=step,
            names=names,
            counts=self._bytes(counts),
            tokens=self._ids(tokens),
            duration_s=duration_s,
            queued_s=queued_s,
            logprobs=self._bytes(logprobs),
            logprobs_of=logprobs_of,
            failed=failed,
            children={name: self._ids(place) for name, place in children.items()},
            candidates={name: (self._ids(ids), self._bytes(x)) for name, (ids, x) in candidates.items()},
            mask_s=mask_s,
        )
        return at, now, record, *rest

    def _drafted(self, at: float, names: list[str], counts: list[int], tokens: list[int]) -> tuple[Any, ...]:
        return at, names, self._bytes(counts), self._ids(tokens)


_NUMBERS = {kind: number for number, kind in enumerate(EVENTS)}
_FIELDS = {kind: tuple(f.name for f in fields(kind)) for kind in EVENTS}
_READERS: dict[type[Any], Callable[..., tuple[Any, ...]]] = {
    Added: _Decoder._added,
    PlanEvent: _Decoder._planned,
    Returned: _Decoder._returned,
    Drafted: _Decoder._drafted,
}
