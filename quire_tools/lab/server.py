"""Serves the lab of a recording on a port of this machine until it is stopped."""

import asyncio
from collections.abc import Callable

from gateway_svc.calls import DefaultTenantOnly
from gateway_svc.http.server import HttpServer
from gateway_svc.lab.app import lab_app
from gateway_svc.lab.guard import LabGuard
from gateway_svc.lab.source import LabSource
from svc_common.signals import stop_on_signals

HOST = "127.0.0.1"
_GRACE_S = 1.0


async def serve(source: LabSource, port: int, on_ready: Callable[[str], None], stop: asyncio.Event) -> None:
    """Serve until SIGTERM, SIGINT or `stop`. `on_ready(url)` is called once it listens; port 0 = any free one.

    Raises ConfigError for a port in use.
    """
    server = HttpServer(LabGuard(lab_app(source), DefaultTenantOnly()), _GRACE_S)
    bound = server.bind(HOST, port, option="--port")
    try:
        with stop_on_signals(stop):
            serving = asyncio.create_task(server.run_bound())
            on_ready(f"http://{HOST}:{bound}")
            await stop.wait()
            server.stop()
            await serving
    finally:
        server.close()
