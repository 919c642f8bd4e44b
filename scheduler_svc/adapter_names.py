"""Names and numbers of the LoRA adapters that requests may name. Pure; which workers have them is the business of `adapters`.

Names are for people and requests; workers and the core go by numbers, which are never given twice, so that a prefix computed with
one adapter is never taken for another's (design.md 6). Used in process by `quire.LLM` as well.
"""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field

from svc_common.errors import AlreadyExists, FailedPrecondition, InvalidArgument, NotFound

MAX_NAME_LENGTH = 128
MAX_PATH_BYTES = 4095


@dataclass(slots=True)
class Adapter:
    """`num_bytes` and `rank` as a worker found them, 0 before any did. `problems`: of workers that could not load it, by worker;
    while there is one, no request may use it."""

    name: str
    adapter_id: int
    path: str
    num_bytes: int = 0
    rank: int = 0
    problems: dict[object, str] = field(default_factory=dict)

    @property
    def problem(self) -> str:
        """Why no request may use it now, for people; empty = they may."""
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
    """Owner of which adapters there are."""

    def __init__(self) -> None:
        self._by_name: dict[str, Adapter] = {}
        self._ids = itertools.count(1)

    def __iter__(self) -> Iterator[Adapter]:
        """By name; the names may change while iterating."""
        return iter([self._by_name[name] for name in self.names])

    @property
    def names(self) -> list[str]:
        """What requests may name."""
        return sorted(self._by_name)

    def get(self, name: str) -> Adapter | None:
        """The adapter of that name, if there is one."""
        return self._by_name.get(name)

    def find(self, name: str) -> Adapter:
        """The adapter of that name. NotFound."""
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
        """The number by which rows name it, 0 for no name. NotFound; FailedPrecondition while a worker is without it."""
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

    def new(self, name: str, path: str) -> Adapter:
        """One with a number of its own, which requests may name after `put`. InvalidArgument, AlreadyExists."""
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
        return Adapter(name, next(self._ids), path)

    def put(self, adapter: Adapter) -> None:
        """Requests may name it from now on."""
        self._by_name[adapter.name] = adapter

    def remove(self, name: str) -> None:
        """Requests may not name it any more."""
        del self._by_name[name]
