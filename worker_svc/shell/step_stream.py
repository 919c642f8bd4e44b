"""The sending side of one Run call: unsent messages, room for further steps, and the end of the stream."""

import asyncio
from collections import deque
from collections.abc import AsyncIterator

from protos.worker.v1 import worker_pb2


class StepStream:
    """Owner of a stream's unsent messages. `number` identifies it to ownership; `max_open` bounds steps in flight."""

    def __init__(self, number: int, *, max_open: int) -> None:
        self.number = number
        self._max_open = max_open
        self._unsent: deque[worker_pb2.WorkerOutputs] = deque()
        self._num_open = 0
        self.said_goodbye = False
        """True if the owner gives up the worker. Explicit, since a broken call may look half-closed for a moment."""
        self.is_ended = False
        """True if nothing more is read from the peer."""
        self._error: Exception | None = None
        self._parting: Exception | None = None
        self._to_send = asyncio.Event()
        self._has_room = asyncio.Event()
        self._update()

    def _update(self) -> None:
        num_unsent, is_ended = len(self._unsent), self.is_ended
        if num_unsent or (is_ended and (self._error is not None or not self._num_open)):
            self._to_send.set()
        else:
            self._to_send.clear()
        if is_ended or num_unsent + self._num_open < self._max_open:
            self._has_room.set()
        else:
            self._has_room.clear()

    def expect(self, num_steps: int = 1) -> None:
        """Announce results that `answer` will deliver."""
        self._num_open += num_steps
        self._update()

    def answer(self, result: worker_pb2.WorkerOutputs) -> None:
        """Send an expected result."""
        self._num_open -= 1
        self.send(result)

    def send(self, message: worker_pb2.WorkerOutputs) -> None:
        """Send an additional message: the welcome, or a result again."""
        if self._error is None:
            self._unsent.append(message)
        self._update()

    def say_goodbye(self) -> None:
        """Record that the peer gives up the worker and sends no more."""
        self.said_goodbye = True
        self.finish()

    def finish(self, parting: Exception | None = None) -> None:
        """Read no more: end after all expected results are sent, with `parting` if given."""
        self.is_ended = True
        self._parting = self._parting or parting
        self._update()

    def fail(self, error: Exception, *, drop_unsent: bool = False) -> None:
        """End with an error after the unsent messages. The first error wins."""
        self.is_ended = True
        self._error = self._error or error
        if drop_unsent:
            self._unsent.clear()
        self._update()

    async def room(self) -> None:
        """Wait until another step may be read."""
        await self._has_room.wait()

    async def messages(self) -> AsyncIterator[worker_pb2.WorkerOutputs]:
        """All messages in order, until the end. Raises the error that ended the stream."""
        while True:
            await self._to_send.wait()
            if not self._unsent:
                break
            message = self._unsent.popleft()
            self._update()
            yield message
        if error := self._error or self._parting:
            raise error
