"""Blocking and asyncio streams of a request's output; resumable ones continue at another gateway when one is lost."""

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from types import TracebackType
from typing import Any, Protocol, Self

from quire.client.calls import GATEWAY, typed_errors
from quire.client.messages import EventMerger
from quire.client.outputs import Delta, RequestOutput
from svc_common.errors import Cancelled, QuireError


class Opening(Protocol):
    """Opens the call behind a stream, first and again after a failure."""

    @property
    def target(self) -> str:
        """Address of the gateway of the latest call."""

    def open(self, merger: EventMerger) -> Any:
        """Open a call that continues from what `merger` has received."""

    def pause_s(self, error: QuireError, merger: EventMerger) -> float | None:
        """Seconds to wait before reopening after `error`; None = the stream has failed."""

    def succeeded(self) -> None:
        """Note that data was received."""

    def interrupted(self) -> None:
        """Note that Ctrl-C interrupted a wait for the call."""

    def abandon(self, started_as: str = "") -> None:
        """Cancel the request if dropping the call would not end it."""


def _is_being_cancelled() -> bool:
    """True if cancellation of the current task was requested."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def _cancelled() -> Cancelled:
    return Cancelled("the request was cancelled by its reader", reason="CANCELLED")


class _Reading:
    """State of both kinds of streams: the current call and the merged output; ends the request only once."""

    def __init__(self, opening: Opening, merger: EventMerger) -> None:
        self._opening = opening
        self._merger = merger
        self._is_over = False
        self._call = opening.open(merger)

    @property
    def target(self) -> str:
        """Address of the gateway that the stream is read from."""
        return self._opening.target

    @property
    def result(self) -> RequestOutput:
        """The output so far."""
        return self._merger.output

    def _reopen(self) -> None:
        """Open the call again, unless the stream was cancelled in the meantime."""
        if self._is_over:
            raise _cancelled()
        self._call = self._opening.open(self._merger)

    def cancel(self) -> None:
        """End the request; no-op if it has ended. A concurrent reader gets Cancelled."""
        if self._is_over:
            return
        self._is_over = True
        self._call.cancel()
        if not self._merger.output.finished:
            self._opening.abandon(self._merger.output.request_id if self._merger.is_started else "")


class Stream(_Reading):
    """Deltas of one request as they arrive.

    Leaving the loop early, `cancel()`, or the end of a `with` block ends the request. `result` has
    everything received so far and, after the loop, the whole output. A stream can be read once; `cancel`
    may be called from another thread.
    """

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.cancel()

    @property
    def trace_id(self) -> str:
        """Trace id of the request, 32 hex digits; empty if it is not traced. Waits for the server's initial metadata."""
        with typed_errors(self.target, GATEWAY):
            return str(dict(self._call.initial_metadata()).get("x-trace-id", ""))

    def __iter__(self) -> Iterator[Delta]:
        try:
            while True:
                try:
                    yield from self._read_call()
                    return
                except QuireError as error:
                    pause_s = self._opening.pause_s(error, self._merger)
                    if pause_s is None:
                        raise
                time.sleep(pause_s)
                self._reopen()
        except KeyboardInterrupt:
            self._opening.interrupted()
            raise
        finally:
            self.cancel()

    def _read_call(self) -> Iterator[Delta]:
        with typed_errors(self.target, GATEWAY):
            for event in self._call:
                self._opening.succeeded()
                delta = self._merger.add(event)
                if delta is not None:
                    yield delta

    def read(self) -> RequestOutput:
        """Read to the end and return the whole output."""
        for _ in self:
            pass
        return self.result


class AsyncStream(_Reading):
    """`Stream` for `async for` and `async with`."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        self.cancel()

    async def trace_id(self) -> str:
        """See Stream.trace_id."""
        with typed_errors(self.target, GATEWAY):
            return str(dict(await self._call.initial_metadata()).get("x-trace-id", ""))

    async def __aiter__(self) -> AsyncIterator[Delta]:
        try:
            while True:
                try:
                    # No nested generator: each layer costs CPU time per event.
                    with typed_errors(self.target, GATEWAY):
                        async for event in self._call:
                            self._opening.succeeded()
                            if (delta := self._merger.add(event)) is not None:
                                yield delta
                    return
                except QuireError as error:
                    pause_s = None if self._is_over else self._opening.pause_s(error, self._merger)
                    if pause_s is None:
                        raise
                except asyncio.CancelledError:
                    if not self._is_over or _is_being_cancelled():
                        raise
                    # gRPC raises CancelledError for a call that was cancelled here; asyncio would take it
                    # for cancellation of the reader's task.
                    raise _cancelled() from None
                await asyncio.sleep(pause_s)
                self._reopen()
        finally:
            self.cancel()

    async def read(self) -> RequestOutput:
        """Read to the end and return the whole output."""
        async for _ in self:
            pass
        return self.result
