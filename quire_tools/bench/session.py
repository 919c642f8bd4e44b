"""A whole measurement: warm-up, then each shape of load in turn, with progress. Statistics: quire_tools.bench.measure.

Open loop: each request is sent at its time; closed loop: clients wait for their responses.
"""

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from quire_tools.bench.measure import Record, finish
from quire_tools.bench.targets import LoadTarget, error_name
from quire_tools.bench.workloads import LoadShape, PlannedRequest

Tick = Callable[[], None]
Planner = Callable[[LoadShape], list[PlannedRequest]]
_WARM_UP_SEED = 1_000_003


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


@dataclass(slots=True, frozen=True)
class LoadPlan:
    """What to measure. `plan`: the requests of a shape; `warmup`: unmeasured requests before each shape.

    `max_in_flight`: limit of concurrent requests; `num_clients`: number of clients of a closed loop (None =
    open loop, unless the shape requires a closed one).
    """

    shapes: Sequence[LoadShape]
    target: LoadTarget
    plan: Planner
    warmup: int
    max_in_flight: int | None
    show_progress: bool
    num_clients: int | None = None

    async def run(self) -> dict[str, list[Record]]:
        """Run warm-up and measurement of each shape in turn; returns records by workload."""
        runs: dict[str, list[Record]] = {}
        async with self.target:
            for shape in self.shapes:
                await self._warm_up(shape)
                runs[shape.kind.value] = await self._measure(shape)
        return runs

    async def _warm_up(self, shape: LoadShape) -> None:
        if self.warmup:
            # A different seed, so that the measured run does not find its prompts in the prefix cache.
            warm = replace(shape, num_requests=self.warmup, seed=shape.seed + _WARM_UP_SEED, rate=None)
            await Runner(self.target, max_in_flight=self.max_in_flight).run(self.plan(warm))

    async def _measure(self, shape: LoadShape) -> list[Record]:
        planned = self.plan(shape)
        with progress(shape.kind.value, len(planned), show=self.show_progress) as tick:
            runner = Runner(self.target, max_in_flight=self.max_in_flight, tick=tick)
            clients = 1 if shape.one_at_a_time else self.num_clients
            return await (runner.run(planned) if clients is None else runner.run_closed(planned, clients))


@contextlib.contextmanager
def progress(name: str, total: int, *, show: bool) -> Iterator[Tick]:
    """Yield a function to call after each of `total` parts; progress is drawn on standard error."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), disable=not show) as bar:
        task = bar.add_task(name, total=total)
        yield lambda: bar.advance(task)
