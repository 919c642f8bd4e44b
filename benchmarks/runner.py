"""Sends a plan to a target, open loop: each request leaves at its own time, whatever became of the others."""

import asyncio
import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from benchmarks.measure import Record, finish
from benchmarks.targets import Target, error_name
from benchmarks.workloads import Planned

Tick = Callable[[], None]


class Runner:
    """One run over one open target. `max_in_flight` None = no limit (a true open loop)."""

    def __init__(self, target: Target, *, max_in_flight: int | None = None, tick: Tick = lambda: None) -> None:
        self._target = target
        self._gate = asyncio.Semaphore(max_in_flight) if max_in_flight else contextlib.nullcontext()
        self._tick = tick
        self._start = 0.0

    def _now(self) -> float:
        return time.perf_counter() - self._start

    async def run(self, plan: Sequence[Planned]) -> list[Record]:
        """One record per request, in the order of the plan. Errors are in the records."""
        self._start = time.perf_counter()
        tasks = [asyncio.create_task(self._one(planned)) for planned in plan]
        try:
            return list(await asyncio.gather(*tasks))
        finally:
            for task in tasks:
                task.cancel()

    async def run_one_at_a_time(self, plan: Sequence[Planned]) -> list[Record]:
        """Closed loop with one client: each request is planned for the moment the one before ended."""
        self._start = time.perf_counter()
        return [await self._one(replace(planned, at_s=self._now())) for planned in plan]

    async def _one(self, planned: Planned) -> Record:
        record = Record(planned.index, planned.at_s)
        await asyncio.sleep(max(0.0, planned.at_s - self._now()))
        async with self._gate:
            await self._stream(planned, record)
        self._tick()
        return record

    async def _stream(self, planned: Planned, record: Record) -> None:
        record.sent_s = self._now()
        try:
            await self._target.stream(planned, record, self._now)
        except asyncio.CancelledError:
            raise
        except Exception as error:  # any failure of a request is a figure, not an end
            record.error = error_name(error)
        record.ended_s = self._now()
        finish(record, max_tokens=planned.max_tokens)
