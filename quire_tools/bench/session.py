"""A whole measurement: warm-up, then each shape of load in turn, with progress. Statistics: quire_tools.bench.measure."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from quire_tools.bench.measure import Record
from quire_tools.bench.runner import Runner, Tick
from quire_tools.bench.targets import LoadTarget
from quire_tools.bench.workloads import LoadShape, PlannedRequest

Planner = Callable[[LoadShape], list[PlannedRequest]]
_WARM_UP_SEED = 1_000_003


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
