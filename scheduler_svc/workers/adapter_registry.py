"""The LoRA adapters of this scheduler, kept loaded at every worker.

An operator's call loads an adapter at all connected workers; a worker that connects loads all adapters before
its first step. A worker that cannot load one (missing files, for example) serves without it: requests then
cannot use that adapter, all else works.
"""

import asyncio
import logging
from collections.abc import Callable
from typing import Protocol

from scheduler_svc.adapter_names import AdapterEntry, AdapterNames
from svc_common.errors import AlreadyExists, FailedPrecondition, InvalidArgument, NotFound, ResourceExhausted

log = logging.getLogger(__name__)

_OF_THE_ADAPTER = (AlreadyExists, InvalidArgument, FailedPrecondition, NotFound, ResourceExhausted)
"""Errors about the adapter; all others are the worker's, and attaching is retried."""


class AdapterHost(Protocol):
    """A worker that can load adapters."""

    @property
    def address(self) -> str:
        """The worker's address, for people."""
        ...

    async def load_adapter(self, adapter_id: int, path: str) -> tuple[int, int]:
        """Load an adapter unless it is loaded; returns (bytes, rank). Raises the worker's typed error."""
        ...

    async def unload_adapter(self, adapter_id: int) -> None:
        """Unload an adapter."""
        ...


class AdapterRegistry:
    """Owner of the adapters and of which worker failed to load one. `on_change`: called when the names change.

    `num_users(id)`: number of requests that use an adapter; `model()`: the base model's name, empty while
    unknown. Changes are serialized, so that a worker that connects while an adapter is loaded gets that one,
    too.
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
        """Names of the adapters."""
        return self._adapters.names

    def all(self) -> list[tuple[AdapterEntry, int]]:
        """Adapters by name, with the number of requests that use each."""
        return [(adapter, self._num_users(adapter.adapter_id)) for adapter in self._adapters]

    def id_of(self, name: str) -> int:
        """The id of an adapter, 0 for no name. Raises NotFound, or FailedPrecondition if a connected worker could not load it."""
        return self._adapters.id_of(name)

    # --- an operator's calls --------------------------------------------------------------------------------------

    def declare(self, name: str, path: str) -> None:
        """Add an adapter at the start, before any worker connects; each loads it then. Raises InvalidArgument or AlreadyExists."""
        assert not self._hosts, "workers that are here would not have it"
        self._adapters.put(self._adapters.new(name, path))
        self._on_change()

    async def load(self, name: str, path: str) -> AdapterEntry:
        """Load an adapter at all connected workers, after which requests may name it.

        Raises InvalidArgument, AlreadyExists or a worker's error; then no worker keeps it. With a known name
        and path, load it again at the workers that failed to.
        """
        async with self._changing:
            self._check_name(name)
            known = self._adapters.get(name)
            if known is None or known.path != path:
                return await self._load(self._adapters.new(name, path))
            for host in [host for host in self._hosts if host in known.problems]:
                await _load_at(host, known)
            return known

    async def _load(self, adapter: AdapterEntry) -> AdapterEntry:
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
        """Remove an adapter here and at all workers. Raises InvalidArgument, NotFound, or FailedPrecondition while it is in use."""
        if not name:
            raise InvalidArgument.field("name", "is empty: which adapter?")
        async with self._changing:
            await self._unload(self._adapters.find(name))

    async def _unload(self, adapter: AdapterEntry) -> None:
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

    # --- workers connecting and failing ---------------------------------------------------------------------------

    async def join(self, host: AdapterHost) -> None:
        """Load all adapters at a connected worker. Requests cannot use one that failed until it loads or the worker is gone.

        Raises the worker's typed error if the fault is not the adapter's.
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
        """Raise AlreadyExists if the name is the base model's, since requests that name it mean the model."""
        if name and name == self._model():
            raise AlreadyExists(f"{name} is the name of the model itself; choose another", reason="ADAPTER_EXISTS")

    def leave(self, host: AdapterHost) -> None:
        """Remove a disconnected worker and its load failures. No-op if it is removed already."""
        if host in self._hosts:
            self._hosts.remove(host)
        for adapter in self._adapters:
            adapter.problems.pop(host, None)


async def _load_at(host: AdapterHost, adapter: AdapterEntry) -> None:
    adapter.num_bytes, adapter.rank = await host.load_adapter(adapter.adapter_id, adapter.path)
    adapter.problems.pop(host, None)
