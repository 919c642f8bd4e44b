"""Sends a plan to a target: open loop (each request at its time) or closed loop (clients wait for their responses)."""

import asyncio
import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from quire_tools.bench.measure import Record, finish
from quire_tools.bench.targets import LoadTarget, error_name
from quire_tools.bench.workloads import PlannedRequest

Tick = Callable[[], None]


class Runner:
    """One run over one open target. `max_in_flight` None = no limit (a true open loop)."""

    def __init__(self, target: LoadTarget, *, max_in_flight: int | None = None, tick: Tick = lambda: None) -> None:
        self._target = target
        self._gate = asyncio.Semaphore(max_in_flight) if max_in_flight else contextlib.nullcontext()
        self._tick = tick
        self._start = 0.0

    def _now(self) -> float:
        return time.perf_counter() - self._start

    async def run(self, plan: Sequence[PlannedRequest]) -> list[Record]:
        """Send all requests at their times; returns one record per request, in the order of the plan.
        Errors are in the records."""
        self._start = time.perf_counter()
        tasks = [asyncio.create_task(self._one(planned)) for planned in plan]
        try:
            return list(await asyncio.gather(*tasks))
        finally:
            for task in tasks:
                task.cancel()

    async def run_closed(self, plan: Sequence[PlannedRequest], num_clients: int) -> list[Record]:
        """Closed loop: each of `num_clients` clients sends the plan's next request when its last response has ended.

        A request counts as planned when its client becomes free. Records are in the order of the plan.
        """
        self._start = time.perf_counter()
        waiting = iter(plan)
        records: list[Record] = []

        async def client() -> None:
            for planned in waiting:
                records.append(await self._one(replace(planned, at_s=self._now())))

        async with asyncio.TaskGroup() as clients:
            for _ in range(num_clients):
                clients.create_task(client())
        return sorted(records, key=lambda record: record.index)

    async def _one(self, planned: PlannedRequest) -> Record:
        record = Record(planned.index, planned.at_s)
        await asyncio.sleep(max(0.0, planned.at_s - self._now()))
        async with self._gate:
            await self._stream(planned, record)
        self._tick()
        return record

    async def _stream(self, planned: PlannedRequest, record: Record) -> None:
        record.sent_s = self._now()
        try:
            await self._target.stream(planned, record, self._now)
        except asyncio.CancelledError:
            raise
        except Exception as error:  # a failed request is a result, not the end of the run
            record.error = error_name(error)
        record.ended_s = self._now()
        finish(record, max_tokens=planned.max_tokens)
