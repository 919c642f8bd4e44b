"""Running a worker in this process, with a model or without."""

import logging
from collections.abc import Callable, Coroutine
from dataclasses import replace
from typing import Any

from quire.cli.serving import service
from svc_common import garbage
from svc_common.observability.log_format import MEMORY_LOGGER, LogFormat
from worker_svc.app import Watchers
from worker_svc.settings import ShellSettings


def run(
    serve: Callable[..., Coroutine[Any, Any, None]],
    settings: ShellSettings,
    *,
    stop_with_stdin: bool,
    log_form: LogFormat,
    rank: int = 0,
) -> None:
    """Run `serve` (of worker_svc.app) with these settings until it is stopped. `rank`: in its group."""
    places: dict[str, str] = {"rank": str(rank)} if rank else {}
    watchers = Watchers(on_metrics=lambda address: places.update(metrics=address))
    if log_form is LogFormat.JSON:
        watchers = replace(watchers, on_budget=logging.getLogger(MEMORY_LOGGER).info)

    tell_budget = watchers.on_budget

    def on_budget(readable: str) -> None:
        # What a model leaves behind stays to the end of the process, as what the start left.
        tell_budget(readable)
        garbage.settle()

    watchers = replace(watchers, on_budget=on_budget)

    def ready(address: str) -> None:
        service.announce("worker", address, **places)

    served = serve(settings, on_ready=ready, watchers=watchers)
    service.run(served, stop_with_stdin=stop_with_stdin, name="worker", log_form=log_form)
