"""Names and ids of LoRA adapters, without I/O; `workers.adapter_registry` tracks which workers have them.

Requests use names; workers and the core use ids, which are never reused, so that a prefix cached with one
adapter is never taken for another's. `quire.LLM` uses this class in process.
"""

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from svc_common.errors import AlreadyExists, ConfigError, FailedPrecondition, InvalidArgument, NotFound

MAX_NAME_LENGTH = 128
MAX_PATH_BYTES = 4095


@dataclass(slots=True)
class AdapterEntry:
    """A LoRA adapter. `num_bytes` and `rank` as a worker reported them, 0 before. `problems`: load errors by
    worker; while there is one, no request may use the adapter."""

    name: str
    adapter_id: int
    path: str
    num_bytes: int = 0
    rank: int = 0
    problems: dict[object, str] = field(default_factory=dict)

    @property
    def problem(self) -> str:
        """Why requests cannot use it now, for people; empty = they can."""
        return "; ".join(self.problems.values())


def name_problem(name: str) -> str:
    """What is wrong with a name; empty = nothing."""
    good = 0 < len(name) <= MAX_NAME_LENGTH and name.isprintable()
    return "" if good else f"must have 1 to {MAX_NAME_LENGTH} printable characters"


def path_problem(path: str) -> str:
    """What is wrong with a path on any file system; empty = nothing."""
    if not path:
        return "is empty"
    if "\0" in path:
        return "has a NUL in it"
    num_bytes = len(path.encode())
    return f"has {num_bytes} bytes, and at most {MAX_PATH_BYTES} are possible" if num_bytes > MAX_PATH_BYTES else ""


class AdapterNames:
    """Table of adapters; assigns their ids."""

    def __init__(self) -> None:
        self._by_name: dict[str, AdapterEntry] = {}
        self._ids = itertools.count(1)

    def __iter__(self) -> Iterator[AdapterEntry]:
        """Adapters by name; the table may change while iterating."""
        return iter([self._by_name[name] for name in self.names])

    @property
    def names(self) -> list[str]:
        """Names that requests may use, sorted."""
        return sorted(self._by_name)

    def get(self, name: str) -> AdapterEntry | None:
        """The adapter with that name, or None."""
        return self._by_name.get(name)

    def find(self, name: str) -> AdapterEntry:
        """The adapter with that name. Raises NotFound."""
        adapter = self._by_name.get(name)
        if adapter is None:
            known = ", ".join(self.names) or "none is loaded"
            raise NotFound(
                f"there is no adapter {name}; there are: {known}",
                reason="UNKNOWN_ADAPTER",
                resource_type="adapter",
                resource_name=name,
            )
        return adapter

    def id_of(self, name: str) -> int:
        """The adapter's id, 0 for an empty name. Raises NotFound, or FailedPrecondition while a worker lacks it."""
        if not name:
            return 0
        adapter = self.find(name)
        if adapter.problem:
            raise FailedPrecondition(
                f"adapter {name} is not available: {adapter.problem}; put that right and repeat "
                f"`quire adapters load {name} {adapter.path}`, or unload it",
                reason="ADAPTER_UNAVAILABLE",
                metadata={"adapter": name, "path": adapter.path},
            )
        return adapter.adapter_id

    def new(self, name: str, path: str) -> AdapterEntry:
        """Create an adapter with an id of its own, not in the table before `put`. Raises InvalidArgument or AlreadyExists."""
        if problem := name_problem(name):
            raise InvalidArgument.field("name", problem)
        if problem := path_problem(path):
            raise InvalidArgument.field("path", f"{problem}: the folder of the adapter on the workers' file systems")
        known = self._by_name.get(name)
        if known is not None:
            raise AlreadyExists(
                f"adapter {name} is loaded from {known.path}; unload it first, or choose another name",
                reason="ADAPTER_EXISTS",
            )
        return AdapterEntry(name, next(self._ids), path)

    def put(self, adapter: AdapterEntry) -> None:
        """Add an adapter, so that requests may name it."""
        self._by_name[adapter.name] = adapter

    def remove(self, name: str) -> None:
        """Remove an adapter."""
        del self._by_name[name]


def adapter_paths(texts: Iterable[str]) -> dict[str, str]:
    """Parse "NAME=PATH" texts to folders by name. Raises ConfigError for malformed texts, invalid names and duplicates."""
    paths: dict[str, str] = {}
    for text in texts:
        name, _, path = text.partition("=")
        problem = name_problem(name) and f"its name {name_problem(name)}"
        problem = problem or ("" if path else "write NAME=PATH, for example sql=/adapters/sql")
        problem = problem or ("is given twice; choose another name for one of them" if name in paths else "")
        if problem:
            raise ConfigError(f"--adapter {text!r}: {problem}", reason="ADAPTER_OPTION", metadata={"adapter": name})
        paths[name] = path
    return paths
