"""Streams of a gateway's answers, for `for` and for `async for`."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from typing import Any

from quire.calls import GATEWAY, typed_errors
from quire.messages import EventMerger
from quire.outputs import Delta, RequestOutput
from svc_common.errors import Cancelled


def _is_being_cancelled() -> bool:
    """Whether somebody cancels the task that asks."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


class Stream:
    """Deltas of one request as they come; leaving the loop early, or `cancel()`, ends the request.

    `result` has everything received so far and, when the loop is over, the whole output.
    """

    def __init__(self, call: Any, merger: EventMerger, target: str) -> None:
        self.target = target
        self._call = call
        self._merger = merger

    @property
    def result(self) -> RequestOutput:
        """The output so far."""
        return self._merger.output

    @property
    def trace_id(self) -> str:
        """Trace of the request, 32 hex digits; empty when it is not traced. Waits for the server's first word."""
        with typed_errors(self.target, GATEWAY):
            return str(dict(self._call.initial_metadata()).get("x-trace-id", ""))

    def __iter__(self) -> Iterator[Delta]:
        try:
            with typed_errors(self.target, GATEWAY):
                for event in self._call:
                    delta = self._merger.add(event)
                    if delta is not None:
                        yield delta
        finally:
            self.cancel()

    def cancel(self) -> None:
        """Ends the request; nothing happens where it has ended."""
        self._call.cancel()

    def read(self) -> RequestOutput:
        """Reads to the end."""
        for _ in self:
            pass
        return self.result


class AsyncStream:
    """`Stream` for `async for`."""

    def __init__(self, call: Any, merger: EventMerger, target: str) -> None:
        self.target = target
        self._call = call
        self._merger = merger
        self._is_cancelled = False

    @property
    def result(self) -> RequestOutput:
        """The output so far."""
        return self._merger.output

    async def trace_id(self) -> str:
        """See Stream.trace_id."""
        with typed_errors(self.target, GATEWAY):
            return str(dict(await self._call.initial_metadata()).get("x-trace-id", ""))

    async def __aiter__(self) -> AsyncIterator[Delta]:
        try:
            with typed_errors(self.target, GATEWAY):
                async for event in self._call:
                    delta = self._merger.add(event)
                    if delta is not None:
                        yield delta
        except asyncio.CancelledError:
            if not self._is_cancelled or _is_being_cancelled():
                raise
            # gRPC's word for a call that was cancelled here; to asyncio it would mean that the reader's task was.
            raise Cancelled("the request was cancelled by its reader", reason="CANCELLED") from None
        finally:
            self._call.cancel()

    def cancel(self) -> None:
        """Ends the request; nothing happens where it has ended. Who reads on gets Cancelled."""
        self._is_cancelled = True
        self._call.cancel()

    async def read(self) -> RequestOutput:
        """Reads to the end."""
        async for _ in self:
            pass
        return self.result
