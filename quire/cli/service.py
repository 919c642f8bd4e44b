"""Running one service in this process: its `service` line, its log, and its end when the parent goes."""

import asyncio
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Coroutine
from typing import Any

STOP_GRACE_S = 10.0
LOG_LEVEL_VARIABLE = "QUIRE_LOG_LEVEL"


def announce(name: str, address: str) -> None:
    """Says on standard output where the service listens; flushed, so that a parent reads it at once."""
    sys.stdout.write(f"service {name} pid={os.getpid()} address={address}\n")
    sys.stdout.flush()


def run(service: Coroutine[Any, Any, None], *, stop_with_stdin: bool) -> None:
    """Runs the service until SIGTERM or SIGINT ends it, or its standard input closes if asked."""
    level = os.environ.get(LOG_LEVEL_VARIABLE, "WARNING").upper()
    logging.basicConfig(level=level, format="%(levelname)s %(name)s: %(message)s", stream=sys.stderr)
    if stop_with_stdin:
        threading.Thread(target=_stop_when_stdin_closes, name="stop-with-stdin", daemon=True).start()
    asyncio.run(service)


def _stop_when_stdin_closes() -> None:
    # Unbuffered: the pipe never carries anything, it only closes when the parent ends, however it ends.
    while os.read(0, 4096):
        pass
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(STOP_GRACE_S)
    os._exit(1)
