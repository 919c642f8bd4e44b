"""Loaded adapters by id, and the rules of loading and unloading. Free of torch: the simulated engine uses it too."""

from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, Protocol, TypeVar

import numpy as np

from svc_common.errors import FailedPrecondition, InvalidArgument, ResourceExhausted
from worker_svc.rows.columns import RowColumns
from worker_svc.rows.options import IntArray, OptionColumns


class Adapter(Protocol):
    """What the table needs of an adapter."""

    @property
    def digest(self) -> str:
        """Equal for equal content."""
        ...


A = TypeVar("A", bound=Adapter)


@dataclass(frozen=True, slots=True)
class _Source:
    path: Path
    digest: str


class AdapterTable(Generic[A]):
    """Loaded adapters. `read` makes one from a folder and may refuse it.

    Cached keys and values are distinguished by adapter id, so for one owner an id stands for one content for
    ever, even after unloading. A new owner starts with an empty cache and no ids; adapters still loaded stay
    until room is needed.
    """

    def __init__(self, read: Callable[[Path], A], *, max_adapters: int) -> None:
        self._read, self._max = read, max_adapters
        self._loaded: dict[int, A] = {}
        self._sources: dict[int, _Source] = {}

    @property
    def ids(self) -> Collection[int]:
        """Ids that rows may name; a live view."""
        return self._loaded.keys()

    def __getitem__(self, adapter_id: int) -> A:
        return self._loaded[adapter_id]

    def load(self, adapter_id: int, path: str) -> A:
        """Load the adapter, unless this owner has it loaded from there. On an error nothing has changed.

        Raises InvalidArgument for id 0, an empty path or a refusal of `read`; FailedPrecondition if the id
        stands for another path or other content; ResourceExhausted if the maximum number is loaded.
        """
        if adapter_id < 1:
            raise InvalidArgument.field("adapter_id", "must be above 0: 0 means no adapter")
        if not path:
            raise InvalidArgument.field(
                "path", "is empty; give the folder of a PEFT adapter on the worker's file system"
            )
        where, known = _resolved(path), self._sources.get(adapter_id)
        if known is not None and known.path != where:
            raise _taken(adapter_id, f"is the adapter in {known.path}, not {where}")
        if known is not None and adapter_id in self._loaded:
            return self._loaded[adapter_id]
        self._check_room(adapter_id)
        adapter = self._read(where)
        if known is not None and known.digest != adapter.digest:
            raise _taken(adapter_id, f"was loaded from {where} before, and the files have changed since")
        self._make_room(adapter_id)
        self._loaded[adapter_id], self._sources[adapter_id] = adapter, _Source(where, adapter.digest)
        return adapter

    def unload(self, adapter_id: int, rows: RowColumns | None) -> bool:
        """Unload it; False if it was not loaded. Raises FailedPrecondition, naming the rows, if some of `rows` use it."""
        if adapter_id not in self._loaded:
            return False
        users = _users(rows, adapter_id) if rows is not None else []
        if users:
            raise FailedPrecondition(
                f"adapter {adapter_id} is used by {', '.join(users[:8])}{' and others' if len(users) > 8 else ''}; "
                "remove those rows first",
                reason="ADAPTER_IN_USE",
                metadata={"adapter_id": str(adapter_id), "num_rows": str(len(users)), "row": users[0]},
            )
        del self._loaded[adapter_id]
        return True

    def check_rows(self, rows: IntArray, _num_computed: IntArray, options: OptionColumns) -> None:
        """A `rows.options.Guard`: added rows may only name loaded adapters."""
        unknown = np.flatnonzero(~np.isin(options.adapter_ids, [0, *self._loaded]))
        if len(unknown):
            row, adapter_id = int(rows[unknown[0]]), int(options.adapter_ids[unknown[0]])
            raise InvalidArgument.field(
                "added.options.adapter_id", f"row {row}: adapter {adapter_id} is not loaded; call LoadAdapter first"
            )

    def begin_owner(self) -> None:
        """Start a new owner without rows: ids have no meaning yet, loaded adapters stay."""
        self._sources.clear()

    def _check_room(self, adapter_id: int) -> None:
        held = self._sources.keys() & self._loaded.keys() - {adapter_id}
        if len(held) >= self._max:
            raise ResourceExhausted(
                f"this worker has {len(held)} adapters loaded, its limit is {self._max}; unload one first, or start it with a "
                "larger --max-adapters",
                reason="MAX_ADAPTERS",
                metadata={"limit": str(self._max)},
            )

    def _make_room(self, adapter_id: int) -> None:
        """Drop adapters of earlier owners, oldest first."""
        left = [i for i in self._loaded if i not in self._sources and i != adapter_id]
        for old in left[: max(0, len(self._loaded.keys() - {adapter_id}) + 1 - self._max)]:
            del self._loaded[old]


def _resolved(path: str) -> Path:
    """Resolve a path. Raises InvalidArgument if no file system accepts it: a NUL, too long a name, a loop of links."""
    try:
        where = Path(path).resolve()
        where.stat()
    except FileNotFoundError:
        return where
    except (OSError, ValueError, RuntimeError) as error:
        what = error.strerror if isinstance(error, OSError) else str(error)
        raise InvalidArgument.field(
            "path", f"cannot be opened on the worker: {what}; give the folder of a PEFT adapter"
        ) from None
    return where


def _users(rows: RowColumns, adapter_id: int) -> list[str]:
    """Names of the rows that use an adapter."""
    used = np.flatnonzero(rows.occupied & (rows.options.adapter_ids == adapter_id))
    return [rows.names[row] for row in used.tolist()]


def _taken(adapter_id: int, what: str) -> FailedPrecondition:
    return FailedPrecondition(
        f"adapter id {adapter_id} {what}; use a new id: cached blocks of an id must keep their meaning",
        reason="ADAPTER_ID_TAKEN",
        metadata={"adapter_id": str(adapter_id)},
    )
