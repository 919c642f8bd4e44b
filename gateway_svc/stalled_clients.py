"""Cancel calls of clients that stopped reading and set no deadline, at the gateway's own deadline.

A write waits until the transport has room, and so for the reader. The client's deadline or the end of its
connection also ends such a call; this is for clients with neither.
"""

import asyncio
from types import TracebackType

from gateway_svc.calls import Call
from svc_common.errors import DeadlineExceeded

LEAVING_S = 2.0
"""Time after the deadline for writing the final error or usage."""


class until_left_unread:
    """Context around everything that answers the call.

    Raises DeadlineExceeded if it lasts LEAVING_S beyond the call's deadline.
    """

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
