"""Running one service in this process: its `service` line, its log, and its end when the parent goes."""

import asyncio
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Coroutine
from typing import Any, NoReturn

from svc_common import garbage
from svc_common.observability import log_format
from svc_common.observability.log_format import LogFormat

try:
    from uvloop import new_event_loop
except ImportError:  # on Windows, which it does not support
    new_event_loop = asyncio.new_event_loop  # type: ignore[assignment]

STOP_GRACE_S = 10.0
LOG_LEVEL_VARIABLE = "QUIRE_LOG_LEVEL"


def announce(name: str, address: str, **others: str) -> None:
    """Print the service's address, and `others` by name, to standard output; flushed, so that a parent reads it at once.

    The objects of its start are excluded from garbage collection.
    """
    words = [
        f"service {name} pid={os.getpid()} address={address}",
        *(f"{door}={place}" for door, place in others.items()),
    ]
    sys.stdout.write(" ".join(words) + "\n")
    sys.stdout.flush()
    garbage.exclude()


def run(
    service: Coroutine[Any, Any, None],
    *,
    stop_with_stdin: bool,
    name: str = "",
    log_form: LogFormat = LogFormat.TEXT,
) -> NoReturn:
    """Run the service until SIGTERM or SIGINT, or until standard input closes if asked. `name`: its name in JSON logs.

    Ends the process with status 0, or raises what the service raises.
    """
    level = os.environ.get(LOG_LEVEL_VARIABLE)
    log_format.set_up(level.upper() if level else None, log_form, name)
    if stop_with_stdin:
        threading.Thread(target=_stop_when_stdin_closes, name="stop-with-stdin", daemon=True).start()
    try:
        with asyncio.Runner(loop_factory=new_event_loop) as runner:
            runner.run(_quietly(service))
    except BaseException:
        garbage.unsettle()
        raise
    _leave()


def _leave() -> NoReturn:
    """Exit with status 0, neither waiting for other threads nor freeing objects: torch's alone are a second of work."""
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


async def _quietly(service: Coroutine[Any, Any, None]) -> None:
    asyncio.get_running_loop().set_exception_handler(log_format.on_loop_error)
    await service


def _stop_when_stdin_closes() -> None:
    # Unbuffered: the pipe never carries anything, it only closes when the parent ends, however it ends.
    while os.read(0, 4096):
        pass
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(STOP_GRACE_S)
    os._exit(1)
