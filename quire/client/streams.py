"""Streams of a gateway's answers, for `for` and for `async for`; resumable ones are read on at another gateway when one is lost."""

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
    """Opens the call behind a stream, the first time and again."""

    @property
    def target(self) -> str:
        """Address of the gateway that the last call is for."""

    def open(self, merger: EventMerger) -> Any:
        """A call that goes on from what `merger` has."""

    def pause_s(self, error: QuireError, merger: EventMerger) -> float | None:
        """Seconds to wait before it is opened again after `error`; None = the stream is over."""

    def succeeded(self) -> None:
        """Something came."""

    def interrupted(self) -> None:
        """Ctrl-C struck while the call was waited for."""

    def abandon(self, started_as: str = "") -> None:
        """Ends the request where dropping the call alone would not."""


def _is_being_cancelled() -> bool:
    """Whether somebody cancels the task that asks."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def _cancelled() -> Cancelled:
    return Cancelled("the request was cancelled by its reader", reason="CANCELLED")


class _Reading:
    """What both kinds of streams have: the call, what came of it, and that it ends once."""

    def __init__(self, opening: Opening, merger: EventMerger) -> None:
        self._opening = opening
        self._merger = merger
        self._is_over = False
        self._call = opening.open(merger)

    @property
    def target(self) -> str:
        """Address of the gateway that it is read from."""
        return self._opening.target

    @property
    def result(self) -> RequestOutput:
        """The output so far."""
        return self._merger.output

    def _reopen(self) -> None:
        """Cancelled where it was, meanwhile."""
        if self._is_over:
            raise _cancelled()
        self._call = self._opening.open(self._merger)

    def cancel(self) -> None:
        """Ends the request; nothing happens where it has ended. Whoever reads on gets Cancelled."""
        if self._is_over:
            return
        self._is_over = True
        self._call.cancel()
        if not self._merger.output.finished:
            self._opening.abandon(self._merger.output.request_id if self._merger.is_started else "")


class Stream(_Reading):
    """Deltas of one request as they come; leaving the loop early, `cancel()`, or the end of a `with` around it ends the request.

    `result` has everything received so far and, when the loop is over, the whole output. To be read once; `cancel` may be called
    from another thread.
    """

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.cancel()

    @property
    def trace_id(self) -> str:
        """Trace of the request, 32 hex digits; empty when it is not traced. Waits for the server's first word."""
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
        """Reads to the end."""
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
                    # No generator within this one: what each event passes through costs processor time.
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
                    # gRPC's word for a call that was cancelled here; to asyncio it would mean that the reader's task was.
                    raise _cancelled() from None
                await asyncio.sleep(pause_s)
                self._reopen()
        finally:
            self.cancel()

    async def read(self) -> RequestOutput:
        """Reads to the end."""
        async for _ in self:
            pass
        return self.result
