"""Workers that join and vanish behind a DNS name while requests run.

    python -m tests.support.dns.churn ADDS REMOVES LIFE_S LOOKUP_S      # in a namespace, as `server.run_inside` makes one

One change follows another until there were so many additions and removals, evenly mixed, in LIFE_S seconds. Half of the removed
workers are stopped, the others go on running. Prints figures as JSON.
"""

import asyncio
import itertools
import json
import sys
import time
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import Any

from protos.worker.v1 import worker_pb2
from quire_tools.simulated_worker.engine import SimulatedEngine
from quire_tools.simulated_worker.settings import SimulatedWorkerSettings
from svc_common.net.tls_settings import PeerSettings
from tests.support.dns.server import Zone, serving
from tests.support.services.harness import Gateway, eventually, scheduler, worker

NAME, PORT = "workers.test", 50061
MAX_STALE_LOOKUPS = 2
"""Lookups that answer without an address, after which no request may start there: one may begin before the change. When connections
end, lookups follow each other at once; then as many intervals between lookups count."""
_FIRST_WORKERS = 3


@dataclass
class Removal:
    """A worker that vanished from the name: when, and how many lookups had been answered."""

    at_s: float
    answers: int


@dataclass
class Churn:
    """The state of the test. `stale_s`: how long after its removal a request started on a worker, for each that did."""

    zone: Zone
    lookup_s: float
    removed: dict[str, Removal] = field(default_factory=dict)
    stale_s: list[float] = field(default_factory=list)
    violations: list[str] = field(default_factory=list)
    stops: dict[str, AsyncExitStack] = field(default_factory=dict)

    def started(self, host: str) -> None:
        """A request starts on this worker."""
        removal = self.removed.get(host)
        if removal is None:
            return
        self.stale_s.append(time.monotonic() - removal.at_s)
        lookups = self.zone.answers[NAME] - removal.answers
        if lookups > MAX_STALE_LOOKUPS and self.stale_s[-1] > MAX_STALE_LOOKUPS * self.lookup_s:
            self.violations.append(f"{host}: {self.stale_s[-1]:.2f} s and {lookups} lookups after its removal")

    async def add(self, host: str) -> None:
        self.removed.pop(host, None)
        if host not in self.stops:
            stop = self.stops[host] = AsyncExitStack()
            await stop.enter_async_context(
                worker(lambda settings: _Watched(settings, self, host), host=host, port=PORT, num_gpu_blocks=256)
            )
        self.zone.addresses[NAME] = [*self.zone.addresses[NAME], host]

    async def remove(self, host: str, *, stops: bool) -> None:
        self.zone.addresses[NAME] = [other for other in self.zone.addresses[NAME] if other != host]
        self.removed[host] = Removal(time.monotonic(), self.zone.answers[NAME])
        if stops:
            await self.stops.pop(host).aclose()

    async def stop_all(self) -> None:
        for stop in self.stops.values():
            await stop.aclose()


class _Watched(SimulatedEngine):
    """Reports steps with new rows."""

    def __init__(self, settings: SimulatedWorkerSettings, churn: Churn, host: str) -> None:
        super().__init__(settings)
        self._churn, self._host = churn, host

    def execute(self, outputs: worker_pb2.SchedulerOutputs) -> worker_pb2.WorkerOutputs:
        if outputs.added.ByteSize():
            self._churn.started(self._host)
        return super().execute(outputs)


async def _requests(gateway: Gateway, stop: asyncio.Event) -> list[int]:
    handles = []
    for i in itertools.count():
        if stop.is_set():
            return handles
        handles.append(await gateway.submit([5 + i % 50, 6, 7, 8], max_tokens=12))
        await asyncio.sleep(0.05)
    raise AssertionError


def _changes(adds: int, removes: int) -> list[bool]:
    """True for an addition; evenly mixed, additions first."""
    order = [(i / adds, True) for i in range(adds)] + [((i + 1) / removes, False) for i in range(removes)]
    return [is_addition for _, is_addition in sorted(order, key=lambda change: change[0])]


async def _churn(adds: int, removes: int, life_s: float, lookup_s: float) -> dict[str, Any]:
    # Addresses come back after a while, as those of pods do.
    hosts = itertools.cycle(
        [f"127.1.{i // 200}.{1 + i % 200}" for i in range(max(_FIRST_WORKERS + adds - removes, 8) + 40)]
    )
    async with serving() as zone, AsyncExitStack() as exits:
        churn = Churn(zone, lookup_s)
        exits.push_async_callback(churn.stop_all)
        zone.addresses[NAME] = []
        for _ in range(_FIRST_WORKERS):
            await churn.add(next(hosts))
        private = PeerSettings(insecure=True)
        made = scheduler(f"dns:///{NAME}:{PORT}", worker_lookup_s=lookup_s, integrity_check_every=100, peers=private)
        address, _ = await exits.enter_async_context(made)
        gateway = await exits.enter_async_context(Gateway(address))
        await eventually(lambda: gateway.states[-1].serving, "a worker is ready")
        stop = asyncio.Event()
        requests = asyncio.create_task(_requests(gateway, stop))
        for number, is_addition in enumerate(_changes(adds, removes)):
            present = zone.addresses[NAME]
            if is_addition:
                await churn.add(next(host for host in hosts if host not in present))
            else:
                await churn.remove(present[0], stops=number % 2 == 0)
            await asyncio.sleep(life_s / (adds + removes))
        stop.set()
        ends = [await gateway.end_of(handle) for handle in await requests]
    failed = [end.failed.error.reason for end in ends if end.failed is not None]
    return {
        "adds": adds,
        "removes": removes,
        "lookups": zone.answers[NAME],
        "requests": len(ends),
        "failed": failed,
        "without_all_tokens": sum(len(end.tokens) != 12 for end in ends),
        "stale_starts": len(churn.stale_s),
        "max_stale_s": round(max(churn.stale_s, default=0.0), 3),
        "violations": churn.violations,
    }


if __name__ == "__main__":
    adds, removes, life_s, lookup_s = sys.argv[1:]
    print(json.dumps(asyncio.run(_churn(int(adds), int(removes), float(life_s), float(lookup_s)))))
