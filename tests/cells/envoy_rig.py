"""Envoy with an endpoint picker in front of two cells in network namespaces, which are drained, rolled and killed under load."""

import asyncio
import random
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from quire.client.sampling_params import SamplingParams
from quire.client.sync_client import Client
from tests.cells.load import AT_ONCE, RouterLoad
from tests.cells.smg_rig import counters, expected
from tests.support.commands import Failure, Progress
from tests.support.network_hosts import NetworkHost, network_hosts
from tests.support.routers.inference_gateway import INTERVAL_S, PickerProcess, envoy, picker
from tests.support.stack.supervised import Supervised, supervised

NUM_CELLS = 2
OPTIONS = {
    "worker": ("--dtype", "float32"),
    "scheduler": ("--no-worker-timeout-s", "300", "--frontend-grace-s", "60"),
    "gateway": ("--drain-s", "60", "--scheduler-away-s", "300"),
}
"""Of the services of each cell, by kind."""
_AGE_S = 0.1
"""A cell's values are at most so old."""
PAUSE_S = 1.0
"""From a pod's leaving of the pool to its end: what a preStop hook waits for."""
_BURST, _LONG = 12, 900
"""Requests at once, and their tokens: they run for longer than the picker's interval."""


@dataclass(frozen=True)
class Rig:
    """What runs. `endpoints`: of all cells. `cells`: those of this release. `answers`: of a cell without a router, by prompt."""

    url: str
    picker: PickerProcess
    endpoints: list[str]
    cells: list[Supervised]
    answers: Mapping[str, str]

    def without(self, endpoint: str) -> list[str]:
        """The endpoints of the others."""
        return [one for one in self.endpoints if one != endpoint]

    def loaded(self, meanwhile: Callable[[], None]) -> RouterLoad:
        """Load until `meanwhile` is over, which runs on a thread."""
        return asyncio.run(self._loaded(meanwhile))

    async def _loaded(self, meanwhile: Callable[[], None]) -> RouterLoad:
        load = RouterLoad(self.url, self.answers, random.Random(1))
        over = asyncio.create_task(asyncio.to_thread(meanwhile))
        while not over.done():
            await load.run(2 * AT_ONCE)
        await load.close()
        await over
        return load


def endpoint(cell: Supervised) -> str:
    """Its HTTP port, as IP:PORT."""
    return cell.stack.http_url.removeprefix("http://")


@contextmanager
def cell_on(host: NetworkHost, workers: int = 1) -> Iterator[Supervised]:
    """A cell of this release, which waits for its parts as long as a loaded machine may need."""
    with ExitStack() as held:
        with host.entered():
            cell = held.enter_context(
                supervised(
                    host=host.address,
                    insecure=True,
                    workers=workers,
                    worker_args=OPTIONS["worker"],
                    scheduler_args=OPTIONS["scheduler"],
                    gateway_args=OPTIONS["gateway"],
                )
            )
        yield cell


@contextmanager
def behind_envoy(home: Path, cells: list[Supervised], others: Sequence[str] = ()) -> Iterator[Rig]:
    """Cells, and the endpoints of others, that are in the picker's pool, behind Envoy."""
    endpoints = [*map(endpoint, cells), *others]
    with picker() as found:
        found.want(endpoints)
        for one in endpoints:
            found.wait_ready(one)
        with envoy(found.port, home) as url:
            yield Rig(url, found, endpoints, cells, expected(cells[0].stack, random.Random(0)))


@contextmanager
def cells_on_hosts(workers: int = 1) -> Iterator[list[Supervised]]:
    """NUM_CELLS cells."""
    with ExitStack() as held:
        hosts = held.enter_context(network_hosts(NUM_CELLS))
        yield [held.enter_context(cell_on(host, workers)) for host in hosts]


# --- what befalls a cell -----------------------------------------------------------------------------------------------


def leave_and_return(rig: Rig, cell: Supervised) -> None:
    """Its gateway's pod is deleted: it leaves the pool, is told to end a moment later, and comes back."""
    rig.picker.want(rig.without(endpoint(cell)))
    time.sleep(PAUSE_S)
    num_deaths = len(cell.deaths)
    cell.kill("gateway", signal.SIGTERM)
    wait(lambda: len(cell.deaths) > num_deaths, "the gateway does not end")
    rig.picker.want(rig.endpoints)
    rig.picker.wait_ready(endpoint(cell))


def roll(rig: Rig, cell: Supervised) -> None:
    """Each of its services is replaced, one at a time."""
    for name in ("worker", "scheduler"):
        num_deaths = len(cell.deaths)
        cell.kill(name, signal.SIGTERM)
        wait(lambda number=num_deaths: len(cell.deaths) > number, f"the {name} does not end")  # type: ignore[misc]
        time.sleep(INTERVAL_S)
        rig.picker.wait_ready(endpoint(cell))
    leave_and_return(rig, cell)


def kill(rig: Rig, cell: Supervised) -> None:
    """All of its processes, without a word, while it has requests; it comes back by itself."""
    rig.picker.wait_for(lambda reading: reading["loads"].get(endpoint(cell)))
    cell.stack.kill()
    rig.picker.wait_for(lambda reading: reading["loads"].get(endpoint(cell)) is None)
    rig.picker.wait_ready(endpoint(cell))


def wait(is_so: Callable[[], bool], otherwise: str) -> None:
    """Wait for it; Failure after two minutes."""
    deadline = time.monotonic() + 120
    while not is_so():
        if time.monotonic() > deadline:
            raise Failure(otherwise)
        time.sleep(0.02)


# --- the checks --------------------------------------------------------------------------------------------------------


def spread(rig: Rig, count: int) -> str:
    """Load over both cells."""
    before = [counters(cell.stack) for cell in rig.cells]
    load = RouterLoad(rig.url, rig.answers, random.Random(2))

    async def run() -> None:
        await load.run(count)
        await load.close()

    asyncio.run(run())
    used = [counters(cell.stack) - start for cell, start in zip(rig.cells, before, strict=True)]
    requests = [one["vllm:e2e_request_latency_seconds_count"] for one in used]
    said = f"envoy: {count} requests, {load.num_failed} failed, {requests} at each cell"
    if load.num_failed or not all(requests):
        raise Failure(f"{said}; {load.errors[:5]}")
    return said


def seen(rig: Rig) -> str:
    """Requests that reach a cell past Envoy are in the picker's next reading."""
    cell = rig.cells[1]
    params = SamplingParams(max_tokens=_LONG, ignore_eos=True, temperature=0)
    with ExitStack() as held:
        client = held.enter_context(Client(cell.stack.grpc_address, credentials=cell.stack.credentials))
        streams = [held.enter_context(client.generate_stream("import ", params)) for _ in range(_BURST)]
        texts = [iter(stream) for stream in streams]
        for text in texts:
            next(text)
        began_s = time.time()
        reading = rig.picker.wait_for(lambda one: one["began"] >= began_s + _AGE_S)
    load = reading["loads"][endpoint(cell)]
    said = f"envoy: the picker's reading {reading['began'] - began_s:.2f} s after {_BURST} requests began has {load:.0f} of them"
    if not load:
        raise Failure(said)
    return said


def undisturbed(rig: Rig, befall: Callable[[Rig, Supervised], None]) -> str:
    """No request fails while that befalls a cell."""
    return none_fails(rig, befall.__name__, lambda: befall(rig, rig.cells[1]))


def none_fails(rig: Rig, what: str, meanwhile: Callable[[], None]) -> str:
    """How many requests ended meanwhile. Failure where one failed."""
    load = rig.loaded(meanwhile)
    said = f"envoy, {what}: {load.ended.total()} requests meanwhile, {load.num_failed} failed"
    if load.num_failed:
        raise Failure(f"{said}; {dict(load.ended)} {load.errors[:5]}")
    return said


def lost(rig: Rig, count: int) -> str:
    """A kill costs what is in flight at the cell, and what is sent there until the picker notices; nothing later."""
    during = rig.loaded(lambda: kill(rig, rig.cells[1]))
    failed = Counter(error.partition(":")[0] for error in during.errors)
    said = f"envoy, a cell killed: {dict(failed)} of {during.ended.total()} requests failed; {spread(rig, count)}"
    wrong = [key for key in during.ended if key[1] == "wrong"]
    if wrong or during.num_failed > 4 * AT_ONCE:
        raise Failure(f"{said}; {wrong}")
    return said


def check(count: int, home: Path, progress: Progress) -> None:
    """The whole of it; `count` requests where nothing befalls a cell."""
    with cells_on_hosts() as cells, behind_envoy(home, cells) as running:
        progress.say(spread(running, count))
        progress.say(seen(running))
        for befall in (leave_and_return, roll):
            progress.say(undisturbed(running, befall))
        progress.say(lost(running, count))
