"""Serve the simulated engine as a worker process."""

import asyncio
from collections.abc import Callable

from quire_tools.simulated_worker.engine import SimulatedEngine
from quire_tools.simulated_worker.settings import SimulatedWorkerSettings
from worker_svc.app import Watchers, serve_engine


async def serve_simulated(
    settings: SimulatedWorkerSettings,
    *,
    on_ready: Callable[[str], None],
    watchers: Watchers | None = None,
    stop: asyncio.Event | None = None,
) -> None:
    """Run a worker with the simulated engine, as `worker_svc.app.serve` does with a model. Does not import torch."""
    await serve_engine(settings, lambda: SimulatedEngine(settings), on_ready=on_ready, watchers=watchers, stop=stop)
