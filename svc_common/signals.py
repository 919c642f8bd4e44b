"""Signal handling of the services: SIGTERM and Ctrl-C set a stop event, SIGHUP reloads."""

import asyncio
import contextlib
import signal
import threading
from collections.abc import Callable, Iterator


@contextlib.contextmanager
def stop_on_signals(stop: asyncio.Event) -> Iterator[None]:
    """Context in which SIGTERM and SIGINT set `stop`. No-op outside the main thread, which alone receives signals."""
    loop = asyncio.get_running_loop()
    is_main = threading.current_thread() is threading.main_thread()
    signals = (signal.SIGTERM, signal.SIGINT) if is_main else ()
    for number in signals:
        loop.add_signal_handler(number, stop.set)
    try:
        yield
    finally:
        for number in signals:
            loop.remove_signal_handler(number)


@contextlib.contextmanager
def on_hangup(act: Callable[[], None]) -> Iterator[None]:
    """Context in which SIGHUP calls `act` on the event loop, by custom to reload the configuration. Main thread only."""
    loop = asyncio.get_running_loop()
    is_main = threading.current_thread() is threading.main_thread()
    if is_main:
        loop.add_signal_handler(signal.SIGHUP, act)
    try:
        yield
    finally:
        if is_main:
            loop.remove_signal_handler(signal.SIGHUP)
