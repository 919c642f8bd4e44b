"""The LoRA adapters that requests may name: their numbers, and that every worker has them (design.md 6).

Names are for people and requests; workers and the core go by numbers, which are never given twice, so that a prefix computed with
one adapter is never taken for another's. An operator's call loads at the workers that are there; a worker that starts later gets
all of them before its first step.
"""

import asyncio
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from svc_common.errors import AlreadyExists, FailedPrecondition, InvalidArgument, NotFound

MAX_NAME_LENGTH = 128


@dataclass(slots=True)
class Adapter:
    """`num_bytes` and `rank` as a worker found them, 0 before any did."""

    name: str
    adapter_id: int
    path: str
    num_bytes: int = 0
    rank: int = 0


class AdapterHost(Protocol):
    """A worker that can be told."""

    async def load_adapter(self, adapter_id: int, path: str) -> tuple[int, int]:
        """Loads one: (bytes, rank). The worker's typed error where it does not fit."""
        ...

    async def unload_adapter(self, adapter_id: int) -> None:
        """Forgets one."""
        ...


class AdapterTable:
    """Owner of names and numbers. `on_change`: the names are others now; `num_users(id)`: requests that use one.

    One change at a time: a worker that comes while an adapter is loaded gets that one, too.
    """

    def __init__(self, on_change: Callable[[], None], num_users: Callable[[int], int]) -> None:
        self._on_change = on_change
        self._num_users = num_users
        self._by_name: dict[str, Adapter] = {}
        self._ids = itertools.count(1)
        self._changing = asyncio.Lock()
        self.hosts: list[AdapterHost] = []

    @property
    def names(self) -> list[str]:
        """What requests may name."""
        return sorted(self._by_name)

    def all(self) -> list[tuple[Adapter, int]]:
        """Adapters by name, with how many requests use each."""
        return [(self._by_name[name], self._num_users(self._by_name[name].adapter_id)) for name in self.names]

    def id_of(self, name: str) -> int:
        """The number of an adapter, 0 for none. NotFound."""
        if not name:
            return 0
        adapter = self._by_name.get(name)
        if adapter is None:
            known = ", ".join(self.names) or "none is loaded"
            raise NotFound(
                f"there is no adapter {name}; there are: {known}",
                reason="UNKNOWN_ADAPTER",
                resource_type="adapter",
                resource_name=name,
            )
        return adapter.adapter_id

    async def load(self, name: str, path: str) -> Adapter:
        """Loads at all workers that are there, then requests may name it. InvalidArgument, AlreadyExists, or a worker's error; then
        no worker keeps it."""
        async with self._changing:
            known = self._by_name.get(name)
            return known if known is not None and known.path == path else await self._load(self._new(name, path))

    async def _load(self, adapter: Adapter) -> Adapter:
        told: list[AdapterHost] = []
        try:
            for host in self.hosts:
                told.append(host)
                adapter.num_bytes, adapter.rank = await host.load_adapter(adapter.adapter_id, adapter.path)
        except BaseException:
            for host in told[:-1]:
                await host.unload_adapter(adapter.adapter_id)
            raise
        self._by_name[adapter.name] = adapter
        self._on_change()
        return adapter

    async def unload(self, name: str) -> None:
        """Requests may not name it any more, and no worker has it. InvalidArgument, NotFound; FailedPrecondition while in use."""
        if not name:
            raise InvalidArgument.field("name", "is empty: which adapter?")
        async with self._changing:
            await self._unload(name, self.id_of(name))

    async def _unload(self, name: str, adapter_id: int) -> None:
        num_users = self._num_users(adapter_id)
        if num_users:
            raise FailedPrecondition(
                f"{num_users} requests use adapter {name}; wait for them or cancel them first",
                reason="ADAPTER_IN_USE",
                metadata={"requests": str(num_users)},
            )
        del self._by_name[name]
        self._on_change()
        for host in self.hosts:
            await host.unload_adapter(adapter_id)

    async def restore(self, host: AdapterHost) -> None:
        """A worker starts anew: it gets all of them."""
        async with self._changing:
            for adapter in self._by_name.values():
                adapter.num_bytes, adapter.rank = await host.load_adapter(adapter.adapter_id, adapter.path)

    def _new(self, name: str, path: str) -> Adapter:
        if not 0 < len(name) <= MAX_NAME_LENGTH or not name.isprintable():
            raise InvalidArgument.field("name", f"must have 1 to {MAX_NAME_LENGTH} printable characters")
        if not path:
            raise InvalidArgument.field("path", "is empty: the folder of the adapter on the workers' file systems")
        known = self._by_name.get(name)
        if known is not None:
            raise AlreadyExists(
                f"adapter {name} is loaded from {known.path}; unload it first, or choose another name",
                reason="ADAPTER_EXISTS",
            )
        return Adapter(name, next(self._ids), path)
