"""Answers that nobody reads: who has said no deadline and does not read keeps its call no longer than the gateway's own deadline.

A write waits until the transport has room, and so for its reader. The client's deadline ends such a call, and so does the end of
its connection; this is for clients that have neither.
"""

import asyncio
from types import TracebackType

from gateway_svc.calls import Call
from svc_common.errors import DeadlineExceeded

LEAVING_S = 2.0
"""Time behind the deadline for what has to be said then."""


class until_left_unread:
    """Around everything that answers the call. DeadlineExceeded where that goes on LEAVING_S behind its deadline."""

    __slots__ = ("_limit",)

    def __init__(self, call: Call) -> None:
        self._limit = asyncio.timeout(max(0.0, call.remaining_s) + LEAVING_S)

    async def __aenter__(self) -> None:
        await self._limit.__aenter__()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            await self._limit.__aexit__(kind, error, traceback)
        except TimeoutError:
            raise DeadlineExceeded("the answer was not read before the deadline", reason="DURING_DECODE") from None
