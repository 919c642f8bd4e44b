"""Addresses of workers, given ones and those behind DNS names, and the lanes to them, which follow.

`dns:///NAME:PORT` stands for a worker at each address of NAME, as of a headless Kubernetes service. A name that cannot be
resolved at the moment keeps the addresses that it had.
"""

import asyncio
import logging
import socket
from collections.abc import Callable, Iterable

from scheduler_svc.settings import DNS_SCHEME
from scheduler_svc.workers.lane import WorkerLane

log = logging.getLogger(__name__)


class WorkerDirectory:
    """Owner of the current addresses, in order: given ones, then those of each name, sorted.

    `every_s`: seconds between two lookups. `on_change` is called on the event loop after a change.
    """

    def __init__(self, workers: Iterable[str], every_s: float) -> None:
        given = tuple(workers)
        self._fixed = [worker for worker in given if not worker.startswith(DNS_SCHEME)]
        self._found = {worker: list[str]() for worker in given if worker.startswith(DNS_SCHEME)}
        self._every_s = every_s
        self._task: asyncio.Task[None] | None = None
        self.on_change: Callable[[], None] = lambda: None

    @property
    def addresses(self) -> list[str]:
        """The addresses as of the last lookup, each once."""
        return list(dict.fromkeys([*self._fixed, *(address for found in self._found.values() for address in found)]))

    def start(self) -> None:
        """Look the names up from now on, if there are any."""
        if self._found:
            self._task = asyncio.create_task(self._keep_looking(), name="worker-lookup")

    async def close(self) -> None:
        """Stop looking names up."""
        if self._task is not None:
            self._task.cancel()

    async def _keep_looking(self) -> None:
        while True:
            before = self.addresses
            for name in self._found:
                await self._look_up(name)
            if self.addresses != before:
                log.info("workers are now at %s", ", ".join(self.addresses) or "no address")
                self.on_change()
            await asyncio.sleep(self._every_s)

    async def _look_up(self, name: str) -> None:
        host, _, port = name.removeprefix(DNS_SCHEME).rpartition(":")
        try:
            answers = await asyncio.get_running_loop().getaddrinfo(host, int(port), type=socket.SOCK_STREAM)
        except OSError as error:
            log.warning("%s cannot be resolved, and keeps its addresses: %s", name, error)
            return
        self._found[name] = sorted({_written(*answer[4][:2]) for answer in answers})


def _written(host: str | int, port: str | int) -> str:
    """HOST:PORT, an IPv6 address in brackets."""
    return f"[{host}]:{port}" if ":" in str(host) else f"{host}:{port}"


LaneMaker = Callable[[int, str], WorkerLane]


class WorkerRoster:
    """Owner of `lanes`, one for each address ever seen; a lane keeps its number when its address vanishes and comes back.

    `make(number, address)`: makes a lane.
    """

    def __init__(self, directory: WorkerDirectory, make: LaneMaker) -> None:
        self.lanes: list[WorkerLane] = []
        self._directory = directory
        self._make = make
        self._addresses: list[str] | None = None
        self._on_news: Callable[[], None] = lambda: None

    def listen(self, on_news: Callable[[], None]) -> None:
        """Call `on_news` when a lane has something to take, and when addresses change."""
        self._on_news = self._directory.on_change = on_news
        self.follow()

    @property
    def wanted(self) -> list[WorkerLane]:
        """The lanes that are not removed."""
        return [lane for lane in self.lanes if not lane.is_gone]

    def follow(self) -> list[WorkerLane]:
        """Take up the addresses as they are now. Returns the lanes that were made."""
        addresses = self._directory.addresses
        if addresses == self._addresses:
            return []
        self._addresses = addresses
        known = {lane.address: lane for lane in self.lanes}
        for address in addresses:
            if address in known:
                known[address].is_gone = False
        new = [self._make(len(self.lanes) + i, a) for i, a in enumerate(a for a in addresses if a not in known)]
        for lane in new:
            lane.listen(self._on_news)
        self.lanes += new
        return new

    def vanished(self) -> list[WorkerLane]:
        """The lanes to remove: their addresses are no worker's any more."""
        return [lane for lane in self.wanted if lane.address not in (self._addresses or ())]
