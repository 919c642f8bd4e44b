"""How a service is asked to stop: SIGTERM and Ctrl-C set an event; what stopping means is each service's own. And SIGHUP."""

import asyncio
import contextlib
import signal
import threading
from collections.abc import Callable, Iterator


@contextlib.contextmanager
def stop_on_signals(stop: asyncio.Event) -> Iterator[None]:
    """Inside, SIGTERM and SIGINT set `stop`. Only a main thread gets signals; in another, only the caller's own `stop` ends it."""
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
    """Inside, SIGHUP calls `act` on the event loop; by custom it means: read the configuration again. In a main thread alone."""
    loop = asyncio.get_running_loop()
    is_main = threading.current_thread() is threading.main_thread()
    if is_main:
        loop.add_signal_handler(signal.SIGHUP, act)
    try:
        yield
    finally:
        if is_main:
            loop.remove_signal_handler(signal.SIGHUP)
