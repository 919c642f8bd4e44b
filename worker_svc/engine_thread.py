"""The one thread that an engine is called from: jobs in by a queue, results out through the event loop.

A daemon thread: an engine that hangs cannot keep the process from ending.
"""

import asyncio
import queue
import threading
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")

_Job = tuple[Callable[[], Any], asyncio.Future[Any]]


class EngineThread:
    """Owner of the thread. Jobs run one at a time, in the order they were submitted. Used from one event loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name="engine", daemon=True)
        self._thread.start()

    def submit(self, job: Callable[[], T]) -> asyncio.Future[T]:
        """Queues a job. The future resolves on the loop; cancelling it makes a job that has not begun a no-op."""
        future: asyncio.Future[T] = self._loop.create_future()
        self._jobs.put((job, future))
        return future

    async def stop(self, timeout_s: float) -> bool:
        """Ends the thread after the jobs in the queue; False when it has not ended in time."""
        self._jobs.put(None)
        deadline = self._loop.time() + timeout_s
        while self._thread.is_alive() and self._loop.time() < deadline:
            await asyncio.sleep(0.01)
        return not self._thread.is_alive()

    def _work(self) -> None:
        while (item := self._jobs.get()) is not None:
            job, future = item
            if future.cancelled():
                continue
            try:
                result = job()
            except BaseException as error:
                self._post(_set_error, future, error)
            else:
                self._post(_set_result, future, result)
            del item, job, future

    def _post(
        self, resolve: Callable[[asyncio.Future[Any], Any], None], future: asyncio.Future[Any], value: Any
    ) -> None:
        try:
            self._loop.call_soon_threadsafe(resolve, future, value)
        except RuntimeError:
            # The loop is closed: nobody waits any more.
            return


def _set_result(future: asyncio.Future[Any], value: Any) -> None:
    if not future.done():
        future.set_result(value)


def _set_error(future: asyncio.Future[Any], error: BaseException) -> None:
    if not future.done():
        future.set_exception(error)
