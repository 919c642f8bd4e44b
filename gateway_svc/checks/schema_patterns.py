"""Count the regular expressions that a JSON schema requires of one string.

Each doubles the grammar engine's compile work.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from svc_common.grammars import GrammarError

MAX_CONJOINED = 10
MAX_DEPTH = 100
_REGEXES = ("pattern", "format")
_ONE_OF = ("anyOf", "oneOf")
_MAX_NODES = 100_000


def most_conjoined(schema: Any) -> int:
    """Largest number of `pattern`s and `format`s that any one value must match. Follows `allOf` and local `$ref`s.

    Raises GrammarError if the schema of one value consists of more than 100 levels of `allOf`, `anyOf`, `oneOf` and `$ref`.
    """
    counter, most, left = _Counter(schema), 0, [[schema]]
    while left:
        most = max(most, counter.most_of(left.pop(), left))
    return most


class _Counter:
    """Walks one schema. Visits at most 100,000 places; a larger schema is refused for its size."""

    def __init__(self, root: Any) -> None:
        self._root = root
        self._nodes_left = _MAX_NODES
        self._seen: set[tuple[int, ...]] = set()

    def most_of(self, schemas: Sequence[Any], inside: list[list[Any]], depth: int = 0) -> int:
        """Count for the value that all `schemas` describe. The schemas of each value in it are added to `inside`."""
        parts = [part for schema in schemas for part in self._parts(schema, frozenset(), depth)]
        key = tuple(id(part) for part in parts)
        if key in self._seen or self._nodes_left <= 0:
            return 0
        self._seen.add(key)
        here = sum(name in part for part in parts for name in _REGEXES)
        for part in parts:
            for name in _ONE_OF:
                here += max((self.most_of([option], inside, depth + 1) for option in _items(part.get(name))), default=0)
        inside += _children(parts)
        return here

    def _parts(self, schema: Any, refs: frozenset[str], depth: int) -> Iterator[Mapping[str, Any]]:
        """Yield the schemas that a value must satisfy: this one and those it includes."""
        if depth > MAX_DEPTH:
            raise GrammarError(f"has a value of more than {MAX_DEPTH} levels of allOf, anyOf, oneOf and $ref")
        self._nodes_left -= 1
        if not isinstance(schema, Mapping) or self._nodes_left <= 0:
            return
        yield schema
        for part in _items(schema.get("allOf")):
            yield from self._parts(part, refs, depth + 1)
        ref = schema.get("$ref")
        if isinstance(ref, str) and ref not in refs:
            yield from self._parts(self._target(ref), refs | {ref}, depth + 1)

    def _target(self, ref: str) -> Any:
        """Resolve a reference; None if it is outside this schema."""
        found = self._root
        for name in ref.removeprefix("#").split("/")[1:] if ref.startswith("#") else ["#"]:
            found = found.get(name.replace("~1", "/").replace("~0", "~")) if isinstance(found, Mapping) else None
        return found


def _children(parts: Sequence[Mapping[str, Any]]) -> Iterator[list[Any]]:
    """Schemas of the inner values, grouped by value."""
    properties: dict[str, list[Any]] = {}
    for part in parts:
        given = part.get("properties")
        for name, schema in given.items() if isinstance(given, Mapping) else ():
            properties.setdefault(name, []).append(schema)
    yield from properties.values()
    for name in ("items", "additionalProperties"):
        yield [part[name] for part in parts if name in part]


def _items(value: Any) -> Sequence[Any]:
    return value if isinstance(value, list) else ()
