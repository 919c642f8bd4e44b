"""GET /metrics of a worker, beside the step log of the scheduler that drove it."""

import contextlib
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any

from quire_tools.simulated_worker.engine import SimulatedEngine
from quire_tools.simulated_worker.settings import SimulatedWorkerSettings
from tests.scheduler.workers.test_worker_loss import FailingEngine
from tests.support.scraping import Scrape, check_names, scrape
from tests.support.services.harness import Admin, Gateway, eventually, run_async, scheduler, service
from worker_svc.app import Watchers, serve_engine
from worker_svc.engine import Engine
from worker_svc.shell.metric_definitions import METRICS, PARTS


@dataclass
class Driven:
    """A worker with a scheduler and a gateway. `metrics`: where the worker's are."""

    gateway: Gateway
    admin: Admin
    metrics: str


@contextlib.asynccontextmanager
async def driven(
    make_engine: Callable[[SimulatedWorkerSettings], Engine] = SimulatedEngine, **values: Any
) -> AsyncIterator[Driven]:
    settings = SimulatedWorkerSettings.of(step_base_s=0.002, owner_lease_s=0.5, num_gpu_blocks=24, block_size=4)
    places: list[str] = []
    watchers = Watchers(on_budget=lambda readable: None, on_metrics=places.append)
    async with (
        service(
            lambda ready, stop: serve_engine(
                settings, lambda: make_engine(settings), on_ready=ready, watchers=watchers, stop=stop
            )
        ) as (address,),
        scheduler(address, **values) as (at, admin_at),
        Admin(admin_at) as admin,
        Gateway(at) as gateway,
    ):
        await eventually(lambda: gateway.states[-1].serving, "the worker is ready")
        yield Driven(gateway, admin, places[0])


def _is_between_steps(told: Scrape) -> bool:
    """True if each part of every counted step is in its histogram; a scrape within a step's end sees some of them only."""
    counts = {told.value("quire_worker_step_seconds_count", part=part) for part in PARTS}
    return counts == {told.value("quire_worker_steps_total")}


@run_async
async def test_they_are_what_the_scheduler_was_told() -> None:
    """R5: tokens, moved blocks and times of all steps; rows come and go; names are Prometheus'."""
    async with driven(policy="vllm-v0", policy_set=("preemption_mode=swap",)) as d:
        handles = [await d.gateway.submit([first, *range(20, 40)], max_tokens=24) for first in range(1, 7)]
        running = await scrape(d.metrics)
        while not running.value("quire_worker_rows"):
            running = await scrape(d.metrics)
        for handle in handles:
            await d.gateway.end_of(handle)
        told = await scrape(d.metrics)
        while told.value("quire_worker_rows") or not _is_between_steps(told):
            told = await scrape(d.metrics)
        steps = await d.admin.steps()
        check_names(told.families, METRICS)
    assert told.value("quire_worker_ready") == 1
    assert told.value("quire_worker_tokens_total", kind="computed") == sum(step.computed_tokens for step in steps)
    num_sampled = sum(len(one.tokens) for step in steps for one in step.sampled)
    assert told.value("quire_worker_tokens_total", kind="sampled") == num_sampled == 6 * 24
    moved = {kind: sum(len(getattr(step, kind)) for step in steps) for kind in ("swap_in", "swap_out", "copy")}
    assert {kind: told.value("quire_worker_blocks_moved_total", kind=kind) for kind in moved} == moved
    assert moved["swap_out"] > 0
    # Steps by which rows leave and nothing is computed are no steps to the scheduler.
    assert told.value("quire_worker_steps_total") >= len(steps)
    for part in PARTS:
        logged_s = sum(getattr(step.times, f"{part}_ns") for step in steps) / 1e9
        assert told.value("quire_worker_step_seconds_sum", part=part) >= logged_s * (1 - 1e-9)


@run_async
async def test_failures() -> None:
    """A step that failed by its reason; rows with NaN; neither is counted as what went well."""
    async with driven(FailingEngine, overlap=False) as d:
        for first in (98, 99):
            assert (await d.gateway.end_of(await d.gateway.submit([first, 1, 2, 3], max_tokens=4))).failed
        told = await scrape(d.metrics)
    assert told.value("quire_worker_not_finite_rows_total") == 1
    assert told.value("quire_worker_failed_steps_total", reason="OTHER") == 1
