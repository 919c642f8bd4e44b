"""The one thread that calls the engine. Jobs enter by a queue; results reach the event loop in job order.

A job may return a result that is still to come (`Later`): the thread runs the next job while a second thread
waits. The second thread starts with the first `Later`. Both are daemon threads: an engine that hangs cannot
keep the process from exiting.
"""

import asyncio
import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar, runtime_checkable

T = TypeVar("T")


@runtime_checkable
class Later(Protocol):
    """A job's pending result: waited for on another thread, finished on the engine's thread."""

    def wait(self) -> None:
        """Block until `finish` can run. Called on the waiting thread; an error becomes the job's."""
        ...

    def finish(self) -> Any:
        """Return the job's result or raise its error. Called on the engine's thread."""
        ...


@dataclass(frozen=True, slots=True)
class _Done:
    """A completed job that waits for the results of earlier jobs."""

    result: Any
    error: BaseException | None

    def wait(self) -> None:
        """See Later."""

    def finish(self) -> Any:
        """See Later."""
        if self.error is not None:
            raise self.error
        return self.result


@dataclass(frozen=True, slots=True)
class _Job:
    """A call with its future. `is_first`: False if it is the finish of a `Later`."""

    call: Callable[[], Any]
    future: asyncio.Future[Any]
    is_first: bool = True


class EngineThread:
    """Owner of the threads. Runs jobs one at a time, in submission order. Used from one event loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._waits: queue.SimpleQueue[tuple[Later, asyncio.Future[Any]] | None] = queue.SimpleQueue()
        self._num_waits = 0
        self._waiter: threading.Thread | None = None
        self._thread = threading.Thread(target=self._work, name="engine", daemon=True)
        self._thread.start()

    def submit(self, job: Callable[[], T | Later]) -> asyncio.Future[T]:
        """Queue a job, which may return a `Later`.

        The future resolves on the loop, after those of all earlier jobs; cancelling it before the job begins
        makes the job a no-op.
        """
        future: asyncio.Future[T] = self._loop.create_future()
        self._jobs.put(_Job(job, future))
        return future

    def follow(self, job: Callable[[], T | Later], on_done: "Callable[[asyncio.Future[T]], None]") -> None:
        """Queue a job from within a job, without a turn of the event loop. `on_done` is called as the future's callback."""
        future: asyncio.Future[T] = self._loop.create_future()
        future.add_done_callback(on_done)
        self._jobs.put(_Job(job, future))

    async def stop(self, timeout_s: float) -> bool:
        """End the threads after the queued jobs. Returns False if they have not ended in time."""
        self._jobs.put(None)
        deadline = self._loop.time() + timeout_s
        while self._thread.is_alive() and self._loop.time() < deadline:
            await asyncio.sleep(0.01)
        return not self._thread.is_alive()

    # --- the engine's thread -----------------------------------------------------------------------------------------

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            self._run(job)
            del job
        while self._num_waits:
            last = self._jobs.get()
            if last is not None:
                self._run(last)
        self._waits.put(None)

    def _run(self, job: _Job) -> None:
        if job.is_first and job.future.cancelled():
            return
        self._num_waits -= not job.is_first
        result, error = None, None
        try:
            result = job.call()
        except BaseException as raised:
            error = raised
        if job.is_first and (isinstance(result, Later) or self._num_waits):
            self._wait_for(result if isinstance(result, Later) else _Done(result, error), job.future)
        elif error is not None:
            self._post(_set_error, job.future, error)
        else:
            self._post(_set_result, job.future, result)

    def _wait_for(self, later: Later, future: asyncio.Future[Any]) -> None:
        if self._waiter is None:
            self._waiter = threading.Thread(target=self._wait, name="engine-results", daemon=True)
            self._waiter.start()
        self._num_waits += 1
        self._waits.put((later, future))

    def _post(
        self, resolve: Callable[[asyncio.Future[Any], Any], None], future: asyncio.Future[Any], value: Any
    ) -> None:
        try:
            self._loop.call_soon_threadsafe(resolve, future, value)
        except RuntimeError:
            # The loop is closed: no future is awaited any more.
            return

    # --- the waiting thread ------------------------------------------------------------------------------------------

    def _wait(self) -> None:
        while (item := self._waits.get()) is not None:
            later, future = item
            try:
                later.wait()
            except BaseException as error:
                later = _Done(None, error)
            self._jobs.put(_Job(later.finish, future, is_first=False))
            del item, later, future


def _set_result(future: asyncio.Future[Any], value: Any) -> None:
    if not future.done():
        future.set_result(value)


def _set_error(future: asyncio.Future[Any], error: BaseException) -> None:
    if not future.done():
        future.set_exception(error)
