"""The LoRA adapters of this scheduler, and that every worker has them (design.md 6).

An operator's call loads at the workers that are there; a worker that comes gets all of them before its first step. One that cannot
load an adapter, whose files are gone for example, serves without it: nobody may use that adapter then, and everything else goes on.
"""

import asyncio
import logging
from collections.abc import Callable
from typing import Protocol

from scheduler_svc.adapter_names import Adapter, AdapterNames
from svc_common.errors import AlreadyExists, FailedPrecondition, InvalidArgument, NotFound, ResourceExhausted

log = logging.getLogger(__name__)

_OF_THE_ADAPTER = (AlreadyExists, InvalidArgument, FailedPrecondition, NotFound, ResourceExhausted)
"""Errors that speak of the adapter; others are the worker's, which is tried again."""


class AdapterHost(Protocol):
    """A worker that can be told."""

    @property
    def address(self) -> str:
        """For people."""
        ...

    async def load_adapter(self, adapter_id: int, path: str) -> tuple[int, int]:
        """Loads one, unless it has it: (bytes, rank). The worker's typed error where it does not fit."""
        ...

    async def unload_adapter(self, adapter_id: int) -> None:
        """Forgets one."""
        ...


class AdapterTable:
    """Owner of the adapters, and of which worker could not load one. `on_change`: the names are others now; `num_users(id)`: how
    many requests use one; `model()`: the base model's name, empty while unknown.

    One change at a time: a worker that comes while an adapter is loaded gets that one, too.
    """

    def __init__(
        self, on_change: Callable[[], None], num_users: Callable[[int], int], model: Callable[[], str] = lambda: ""
    ) -> None:
        self._on_change = on_change
        self._model = model
        self._num_users = num_users
        self._adapters = AdapterNames()
        self._hosts: list[AdapterHost] = []
        self._changing = asyncio.Lock()

    @property
    def names(self) -> list[str]:
        """What requests may name."""
        return self._adapters.names

    def all(self) -> list[tuple[Adapter, int]]:
        """Adapters by name, with how many requests use each."""
        return [(adapter, self._num_users(adapter.adapter_id)) for adapter in self._adapters]

    def id_of(self, name: str) -> int:
        """The number of an adapter, 0 for none. NotFound; FailedPrecondition where a worker that is here could not load it."""
        return self._adapters.id_of(name)

    # --- an operator's calls --------------------------------------------------------------------------------------

    def declare(self, name: str, path: str) -> None:
        """At the start, before any worker is here: each loads it when it comes. InvalidArgument, AlreadyExists."""
        assert not self._hosts, "workers that are here would not have it"
        self._adapters.put(self._adapters.new(name, path))
        self._on_change()

    async def load(self, name: str, path: str) -> Adapter:
        """Loads at all workers that are there, then requests may name it. InvalidArgument, AlreadyExists, or a worker's error; then
        no worker keeps it. The same name and path again: once more at the workers that could not."""
        async with self._changing:
            self._check_name(name)
            known = self._adapters.get(name)
            if known is None or known.path != path:
                return await self._load(self._adapters.new(name, path))
            for host in [host for host in self._hosts if host in known.problems]:
                await _load_at(host, known)
            return known

    async def _load(self, adapter: Adapter) -> Adapter:
        told: list[AdapterHost] = []
        try:
            for host in self._hosts:
                told.append(host)
                await _load_at(host, adapter)
        except BaseException:
            for host in told[:-1]:
                await host.unload_adapter(adapter.adapter_id)
            raise
        self._adapters.put(adapter)
        self._on_change()
        return adapter

    async def unload(self, name: str) -> None:
        """Requests may not name it any more, and no worker has it. InvalidArgument, NotFound; FailedPrecondition while in use."""
        if not name:
            raise InvalidArgument.field("name", "is empty: which adapter?")
        async with self._changing:
            await self._unload(self._adapters.find(name))

    async def _unload(self, adapter: Adapter) -> None:
        num_users = self._num_users(adapter.adapter_id)
        if num_users:
            raise FailedPrecondition(
                f"{num_users} requests use adapter {adapter.name}; wait for them or cancel them first",
                reason="ADAPTER_IN_USE",
                metadata={"requests": str(num_users)},
            )
        self._adapters.remove(adapter.name)
        self._on_change()
        for host in self._hosts:
            await host.unload_adapter(adapter.adapter_id)

    # --- workers come and go --------------------------------------------------------------------------------------

    async def join(self, host: AdapterHost) -> None:
        """A worker is here, and gets what it is without. What it cannot load nobody may use until it can, or is gone.

        Its typed error where the worker is at fault and not an adapter.
        """
        async with self._changing:
            if host not in self._hosts:
                self._hosts.append(host)
            for adapter in self._adapters:
                try:
                    self._check_name(adapter.name)
                    await _load_at(host, adapter)
                except _OF_THE_ADAPTER as error:
                    adapter.problems[host] = f"the worker at {host.address} could not load it: {error.message}"
                    log.warning("adapter %s is not available: %s", adapter.name, adapter.problems[host])

    def _check_name(self, name: str) -> None:
        """AlreadyExists where requests that name it would mean the model itself."""
        if name and name == self._model():
            raise AlreadyExists(f"{name} is the name of the model itself; choose another", reason="ADAPTER_EXISTS")

    def leave(self, host: AdapterHost) -> None:
        """It is gone, and so is what it could not do. It may have been gone before."""
        if host in self._hosts:
            self._hosts.remove(host)
        for adapter in self._adapters:
            adapter.problems.pop(host, None)


async def _load_at(host: AdapterHost, adapter: Adapter) -> None:
    adapter.num_bytes, adapter.rank = await host.load_adapter(adapter.adapter_id, adapter.path)
    adapter.problems.pop(host, None)
