"""Serialization of an object graph as one JSON document: classes and attributes by name, references by number.

Long lists of integers, and of digests of one length, are written as bytes: pools have some for each block.
Reading makes blank objects and sets attributes; it calls no constructor and no function except `specials`.
Classes and functions must be those of the scheduler core and the block manager, which have no side effects.
"""

import importlib
import json
from array import array
from base64 import b64decode, b64encode
from collections import ChainMap, Counter, OrderedDict, deque
from collections.abc import Callable, Iterable
from enum import Enum
from operator import attrgetter
from types import FunctionType
from typing import Any

import numpy as np

_OURS = ("block_manager.", "scheduler_svc.core.")
_OTHERS: dict[tuple[str, str], type[Any]] = {("collections", "ChainMap"): ChainMap}
_ATOMS = frozenset({type(None), bool, int, float, str})
_DICTS: dict[str, type[Any]] = {kind.__name__: kind for kind in (dict, Counter, OrderedDict)}
_LISTS: dict[str, type[Any]] = {kind.__name__: kind for kind in (list, deque, set)}
_TUPLE, _NAMED, _BYTES, _ENUM, _GLOBAL, _FROZENSET = "t", "n", "b", "e", "g", "f"
_LIST, _DICT, _OBJECT = "l", "d", "o"
_LONG, _INTS = 64, "i"

Make = Callable[..., Any]
Special = tuple[Make | None, Callable[..., Any] | None]
"""(make, fill): `make` creates a blank object from the written parts, `fill` sets its state from their
values. Parts inside a JSON object stay as they are. If `make` is None, `fill` creates the object from the
values; if `fill` is None, `make` completes it."""


class GraphError(ValueError):
    """The document is malformed, or refers to something that does not exist."""


class GraphWriter:
    """Numbering of objects in one document.

    `specials`: by type, what is written in place of an object. `nothing`: objects of these types are written as
    None.
    """

    def __init__(self, specials: dict[type[Any], Callable[[Any], list[Any]]], nothing: tuple[type[Any], ...]) -> None:
        self._specials = specials
        self._nothing = nothing
        self._numbers: dict[int, int] = {}
        self._items: list[Any] = []
        self._classes: dict[tuple[type[Any], tuple[str, ...]], tuple[int, Callable[[Any], Any]]] = {}

    def document(self, root: Any) -> bytes:
        """The graph reachable from `root`."""
        self.value(root)
        written: list[Any] = []
        while len(written) < len(self._items):
            written.append(self._written(self._items[len(written)]))
        classes = [[*_name_of(kind), list(names)] for kind, names in self._classes]
        return json.dumps({"classes": classes, "objects": written}, separators=(",", ":")).encode()

    def value(self, item: Any) -> Any:
        """JSON form of an item: itself, a list that begins with a tag, or the number of an object in a list of its own."""
        kind = type(item)
        if kind in _ATOMS:
            return item
        number = self._numbers.get(id(item))
        if number is not None:
            return [number]
        if kind in self._nothing or isinstance(item, np.generic):
            return None if kind in self._nothing else item.item()
        inline = None if kind in self._specials else self._inline(item)
        if inline is not None:
            return inline
        number = self._numbers[id(item)] = len(self._items)
        self._items.append(item)
        return [number]

    def _inline(self, item: Any) -> list[Any] | None:
        """JSON form of values without identity; None for others."""
        if isinstance(item, bytes):
            return [_BYTES, item.hex()]
        if isinstance(item, tuple):
            named = () if type(item) is tuple else _name_of(type(item))
            return [_NAMED if named else _TUPLE, *named, *map(self.value, item)]
        if isinstance(item, Enum):
            return [_ENUM, *_name_of(type(item)), item.value]
        if isinstance(item, FunctionType | type):
            return [_GLOBAL, *_name_of(item)]
        if isinstance(item, frozenset):
            return [_FROZENSET, *map(self.value, sorted(item))]
        return None

    def _written(self, item: Any) -> list[Any]:
        kind = type(item)
        if kind in self._specials:
            return self._specials[kind](item)
        if kind.__name__ in _LISTS and _LISTS[kind.__name__] is kind:
            return [_LIST, kind.__name__, self._values(sorted(item) if kind is set else item)]
        if kind.__name__ in _DICTS and _DICTS[kind.__name__] is kind:
            return [_DICT, kind.__name__, self._values(item), self._values(item.values())]
        number, read = self._class_of(item)
        return [_OBJECT, number, *map(self.value, read(item))]

    def _values(self, items: Iterable[Any]) -> list[Any] | dict[str, Any]:
        """JSON form of items: a list of theirs, or an object for a column."""
        found = list(items)
        kinds = set(map(type, found))
        column = _column(found, kinds) if len(found) >= _LONG else None
        if column is not None:
            return column
        return found if _ATOMS.issuperset(kinds) else [self.value(item) for item in found]

    def _class_of(self, item: Any) -> tuple[int, Callable[[Any], Any]]:
        kind = type(item)
        slots = (name for base in kind.__mro__ for name in vars(base).get("__slots__", ()))
        names = (*(name for name in slots if hasattr(item, name)), *getattr(item, "__dict__", ()))
        known = self._classes.get((kind, names))
        if known is None:
            read = attrgetter(*names) if len(names) > 1 else lambda item: tuple(getattr(item, n) for n in names)
            known = self._classes[kind, names] = (len(self._classes), read)
        return known


def _column(items: list[Any], kinds: set[type[Any]]) -> dict[str, Any] | None:
    """Integers, or digests of one length and None, as bytes; None for other items."""
    if kinds == {int} and _fits(items):
        return {"type": _INTS, "data": b64encode(array(_INTS, items)).decode()}
    if kinds == {bytes} or kinds == {bytes, type(None)}:
        digests = [item for item in items if item is not None]
        size = len(digests[0])
        if size and set(map(len, digests)) == {size}:
            present = [] if len(digests) == len(items) else [item is not None for item in items]
            return {"type": size, "data": b64encode(b"".join(digests)).decode(), "present": bytes(present).hex()}
    return None


def _fits(items: list[int]) -> bool:
    return min(items) >= -(2**31) and max(items) < 2**31


def _items_of(column: dict[str, Any]) -> Iterable[Any]:
    """The items of a column."""
    data = b64decode(column["data"], validate=True)
    if column["type"] == _INTS:
        return array(_INTS, data).tolist()
    size = int(column["type"])
    digests = [data[i : i + size] for i in range(0, len(data), size)]
    if not column["present"]:
        return digests
    present, following = bytes.fromhex(column["present"]), iter(digests)
    if len(present) - present.count(0) != len(digests):
        raise GraphError(f"a column of {len(digests)} digests has places for other numbers of them")
    return [next(following) if is_there else None for is_there in present]


def _name_of(item: type[Any] | FunctionType) -> tuple[str, str]:
    return item.__module__, item.__qualname__


class GraphReader:
    """Reads one document. Raises GraphError, or other exceptions, for malformed ones."""

    def __init__(self, document: bytes, specials: dict[str, Special]) -> None:
        read = json.loads(document)
        self._specials = specials
        self._written: list[list[Any]] = read["objects"]
        self._classes = [(_class(module, name), _names(names)) for module, name, names in read["classes"]]
        self._items: list[Any] = [self._blank(*written) for written in self._written]

    def root(self) -> Any:
        """The root object."""
        for number, (tag, *parts) in enumerate(self._written):
            if tag in self._specials and self._specials[tag][0] is None:
                make = self._specials[tag][1]
                self._items[number] = make(*map(self._value, parts)) if make is not None else None
        # Fill dicts and sets last, because their keys are hashed by value.
        for hashed in (False, True):
            for item, (tag, *parts) in zip(self._items, self._written, strict=True):
                if (tag == _DICT or (tag == _LIST and parts[0] == "set")) is hashed:
                    self._fill(item, tag, *parts)
        return self._items[0]

    def _blank(self, tag: str, *parts: Any) -> Any:
        if tag in self._specials:
            make = self._specials[tag][0]
            return None if make is None else make(*parts)
        if tag == _LIST:
            return _LISTS[parts[0]]()
        if tag == _DICT:
            return _DICTS[parts[0]]()
        if tag != _OBJECT:
            raise GraphError(f"there are no objects of kind {tag!r}")
        kind, _ = self._classes[parts[0]]
        return object.__new__(kind)

    def _fill(self, item: Any, tag: str, *parts: Any) -> None:
        if tag in self._specials:
            make, fill = self._specials[tag]
            if make is not None and fill is not None:
                fill(item, *map(self._value, parts))
        elif tag == _LIST:
            (item.update if isinstance(item, set) else item.extend)(self._values(parts[1]))
        elif tag == _DICT:
            # Not `update`, by which a Counter counts pairs.
            for key, value in zip(self._values(parts[1]), self._values(parts[2]), strict=True):
                item[key] = value
        else:
            _, names = self._classes[parts[0]]
            for name, value in zip(names, parts[1:], strict=True):
                object.__setattr__(item, name, self._value(value))

    def _values(self, written: list[Any] | dict[str, Any]) -> Iterable[Any]:
        return _items_of(written) if isinstance(written, dict) else map(self._value, written)

    def _value(self, written: Any) -> Any:
        if type(written) is not list:
            return written
        tag = written[0]
        if type(tag) is int:
            return self._items[tag]
        if tag == _TUPLE:
            return tuple([self._value(item) for item in written[1:]])
        return _INLINE[tag](self, *written[1:])

    def _named(self, module: str, name: str, *items: Any) -> Any:
        kind = _own(module, name)
        if not (isinstance(kind, type) and issubclass(kind, tuple)):
            raise GraphError(f"{module}.{name} is no tuple")
        return tuple.__new__(kind, map(self._value, items))

    def _enum(self, module: str, name: str, value: Any) -> Any:
        kind = _own(module, name)
        if not (isinstance(kind, type) and issubclass(kind, Enum)):
            raise GraphError(f"{module}.{name} is no enum")
        return kind(value)


_INLINE: dict[str, Callable[..., Any]] = {
    _NAMED: GraphReader._named,
    _ENUM: GraphReader._enum,
    _BYTES: lambda reader, text: bytes.fromhex(text),
    _GLOBAL: lambda reader, module, name: _own(module, name),
    _FROZENSET: lambda reader, *items: frozenset(map(reader._value, items)),
}


def _class(module: str, name: str) -> type[Any]:
    """A class that may be instantiated."""
    kind = _OTHERS.get((module, name)) or _own(module, name)
    if not isinstance(kind, type) or issubclass(kind, Enum | tuple | BaseException):
        raise GraphError(f"no objects are made of {module}.{name}")
    return kind


def _names(names: list[str]) -> list[str]:
    for name in names:
        if name.startswith("__"):
            raise GraphError(f"{name} is no attribute of a part")
    return names


def _own(module: str, name: str) -> Any:
    """A class or function defined in that module, or a method of such a class; never something it imports."""
    if not module.startswith(_OURS):
        raise GraphError(f"it wants {module}.{name}, which is no part of a scheduler core")
    outer, _, inner = name.partition(".")
    try:
        found = vars(importlib.import_module(module)).get(outer)
    except ImportError:
        found = None
    if isinstance(found, type | FunctionType) and found.__module__ == module:
        method = vars(found).get(inner) if isinstance(found, type) else None
        if not inner or isinstance(method, FunctionType):
            return method if inner else found
    raise GraphError(f"it wants {module}.{name}, which there is not; was it made by another version?")
