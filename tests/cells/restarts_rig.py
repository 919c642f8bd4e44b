"""Rolling restarts: each service of a cell behind Envoy ended and started again ten times under load, with times to first token."""

import asyncio
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks import report
from quire.operators.admin import AdminClient
from tests.cells.envoy_rig import Rig, behind_envoy, cells_on_hosts, endpoint, leave_and_return, wait
from tests.cells.load import RouterLoad
from tests.support.commands import Failure, Progress
from tests.support.stack.supervised import Supervised, is_serving

TIMES = 10
AT_ONCE = 4
"""Requests: fewer than the cells can serve, so that waiting is due to restarts."""


def worker(rig: Rig, cell: Supervised) -> None:
    """Drained with its requests moved to the other worker, as the preStop hook of deploy/kubernetes does, then ended."""
    name, address = cell.stack.options.worker_names[0], cell.stack.worker_addresses[0]
    with AdminClient(cell.stack.admin_address) as admin:
        admin.drain(worker=address, move=True)
        wait(lambda: admin.drain(worker=address, move=True) == 0, "the worker is not drained")
    _restart(cell, name, address)
    # It serves once the scheduler has connected: then the next one may be drained.
    time.sleep(0.5)


def scheduler(rig: Rig, cell: Supervised) -> None:
    """Ended; the gateway holds the requests meanwhile."""
    _restart(cell, "scheduler", cell.stack.scheduler_address)
    rig.picker.wait_ready(endpoint(cell))


def gateway(rig: Rig, cell: Supervised) -> None:
    """Taken out of the pool, ended, and back."""
    leave_and_return(rig, cell)


def _restart(cell: Supervised, name: str, address: str) -> None:
    num_deaths = len(cell.deaths)
    pid = cell.kill(name, signal.SIGTERM)
    wait(lambda: len(cell.deaths) > num_deaths, f"the {name} does not end")
    wait(lambda: cell.stack.pids[name] != pid and is_serving(address), f"the {name} does not serve again")


def measure(rig: Rig, meanwhile: Callable[[], None]) -> tuple[RouterLoad, dict[str, float]]:
    """Load of streams and others until `meanwhile` is over; seconds to the first token of the streams."""
    load = RouterLoad(rig.url, rig.answers, random.Random(3), at_once=AT_ONCE)

    async def run() -> None:
        over = asyncio.create_task(asyncio.to_thread(meanwhile))
        while not over.done():
            await load.run(2 * AT_ONCE)
        await load.close()
        await over

    asyncio.run(run())
    return load, report.spread(load.first_s)


def check(times: int, home: Path, progress: Progress) -> None:
    """Nothing, then each service `times` times. Failure where a request failed; figures go to benchmarks/results."""
    with cells_on_hosts(workers=2) as cells, behind_envoy(home, cells) as rig:
        measure(rig, lambda: time.sleep(10))
        calm, before = measure(rig, lambda: time.sleep(60))
        figures: dict[str, Any] = {"nothing": {"requests": calm.ended.total(), "first_token_s": before}}
        progress.say(f"nothing restarted: {calm.ended.total()} requests, seconds to the first token {before}")
        for restart in (worker, scheduler, gateway):
            load, found = measure(rig, lambda what=restart: _repeat(what, times, rig))  # type: ignore[misc]
            ratio = round(found["p99"] / before["p99"], 2)
            said = (
                f"{restart.__name__} restarted {times} times: {load.ended.total()} requests, {load.num_failed} failed"
            )
            progress.say(f"{said}, seconds to the first token {found}, p99 {ratio} times that without")
            if load.num_failed:
                raise Failure(f"{said}; {load.errors[:5]}")
            figures[restart.__name__] = {
                "restarts": times,
                "requests": load.ended.total(),
                "failed": load.num_failed,
                "first_token_s": found,
                "p99_to_nothing": ratio,
            }
    path = report.save("rolling-restarts", {"benchmark": "rolling-restarts", "at_once": AT_ONCE, "figures": figures})
    progress.say(f"written: {path.name}")


def _repeat(restart: Callable[[Rig, Supervised], None], times: int, rig: Rig) -> None:
    for _ in range(times):
        restart(rig, rig.cells[1])
