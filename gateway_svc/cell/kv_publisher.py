"""KV events over ZeroMQ, as vLLM publishes them, for endpoint pickers such as llm-d's.

A message has three frames: topic, number of the batch (8 bytes, big-endian), and the batch in msgpack:
[seconds since 1970, events, 0]. Events are the arrays of vLLM's `vllm/distributed/kv_events.py`, with the tag first:
["BlockStored", hashes, parent hash, token ids, block size, adapter, "GPU"], ["BlockRemoved", hashes, "GPU"] and
["AllBlocksCleared"].
"""

import asyncio
import contextlib
import logging
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass
from typing import Any

import msgpack  # type: ignore[import-untyped]
import zmq
import zmq.asyncio

from gateway_svc.cell.kv_formats import vllm_events
from protos.engine.v1 import engine_pb2
from svc_common.errors import ConfigError, QuireError

log = logging.getLogger(__name__)

REPLAY_BYTES = 64 * 2**20
"""Batches kept for replays, in bytes."""
RETRY_S = 1.0
"""From the end of the scheduler's stream to the next attempt, and least time between two beginnings."""
_END = (-1).to_bytes(8, "big", signed=True)
_SUBSCRIBED = b"\x01"


@dataclass(frozen=True, slots=True)
class KvEndpoints:
    """`batches`: endpoint that subscribers connect to, as tcp://*:5557; `replay`: for batches that were missed, or "".

    `topic`: first frame of each message; llm-d expects kv@POD-IP:PORT@MODEL.
    """

    batches: str
    replay: str = ""
    topic: str = ""


class KvPublisher:
    """Owner of both sockets. `changes()`: the scheduler's stream, which begins with all blocks.

    Each new subscriber begins the stream again, so that it learns what is stored already; for the others
    AllBlocksCleared and the same blocks change nothing. A subscriber that does not read loses batches, and holds up nothing.
    """

    def __init__(
        self,
        endpoints: KvEndpoints,
        changes: Callable[[], AsyncGenerator[engine_pb2.SubscribeKvEventsResponse, None]],
    ) -> None:
        self._topic = endpoints.topic.encode()
        self._changes = changes
        self._context = zmq.asyncio.Context()
        self._batches = self._bound(zmq.XPUB, endpoints.batches, "--kv-events-endpoint")
        self._batches.setsockopt(zmq.XPUB_VERBOSE, 1)
        self._replays = (
            self._bound(zmq.ROUTER, endpoints.replay, "--kv-events-replay-endpoint") if endpoints.replay else None
        )
        self._kept: deque[tuple[int, bytes]] = deque()
        self._num_kept_bytes = self._number = 0
        self._has_news = asyncio.Event()
        # Nothing was told since the last AllBlocksCleared, and why.
        self._is_void, self._why_void = True, ""

    @property
    def endpoints(self) -> tuple[str, str]:
        """Where batches and replays are to be had, with the ports that were chosen."""
        sockets = (self._batches, self._replays)
        batches, replay = ("" if each is None else each.getsockopt_string(zmq.LAST_ENDPOINT) for each in sockets)
        return batches, replay

    @property
    def at(self) -> KvEndpoints:
        """The same with the topic."""
        return KvEndpoints(*self.endpoints, self._topic.decode())

    async def run(self) -> None:
        """Publish until cancelled."""
        parts = [asyncio.create_task(part) for part in (self._follow(), self._welcome(), self._replay())]
        try:
            for ended in (await asyncio.wait(parts, return_when=asyncio.FIRST_EXCEPTION))[0]:
                ended.result()
        finally:
            for part in parts:
                part.cancel()
            await asyncio.gather(*parts, return_exceptions=True)

    def close(self) -> None:
        """Close the sockets; what was not sent is dropped."""
        self._context.destroy(linger=0)

    # --- internals ---------------------------------------------------------------------------------------------------

    def _bound(self, kind: int, endpoint: str, option: str) -> zmq.asyncio.Socket:
        socket = self._context.socket(kind)
        try:
            socket.bind(endpoint)
        except zmq.ZMQError as error:
            self.close()
            raise ConfigError(f"{option} {endpoint}: {error}", reason="PORT_IN_USE") from None
        return socket

    async def _follow(self) -> None:
        """Publish one stream of the scheduler after the other."""
        while True:
            self._has_news.clear()
            stream = asyncio.create_task(self._publish_stream())
            again = asyncio.create_task(self._has_news.wait())
            try:
                await asyncio.wait((stream, again), return_when=asyncio.FIRST_COMPLETED)
            finally:
                again.cancel()
                stream.cancel()
            [ended] = await asyncio.gather(stream, return_exceptions=True)
            if isinstance(ended, QuireError):
                await self._clear(ended)
            elif isinstance(ended, Exception):
                raise ended
            await asyncio.sleep(RETRY_S)

    async def _clear(self, why: QuireError) -> None:
        """Say once that nothing is known."""
        if str(why) != self._why_void:
            log.warning("no KV events from the scheduler: %s", why)
            self._why_void = str(why)
        if not self._is_void:
            self._is_void = True
            await self._send([["AllBlocksCleared"]])

    async def _publish_stream(self) -> None:
        events: list[list[Any]] = [["AllBlocksCleared"]]
        async with contextlib.aclosing(self._changes()) as changes:
            async for change in changes:
                self._is_void, self._why_void = False, ""
                await self._send([*events, *vllm_events(change)])
                events = []

    async def _send(self, events: Sequence[Sequence[Any]]) -> None:
        number, self._number = self._number, self._number + 1
        payload = msgpack.packb([time.time(), events, 0])
        self._kept.append((number, payload))
        self._num_kept_bytes += len(payload)
        while self._num_kept_bytes > REPLAY_BYTES:
            self._num_kept_bytes -= len(self._kept.popleft()[1])
        await self._batches.send_multipart([self._topic, number.to_bytes(8, "big"), payload])

    async def _welcome(self) -> None:
        """Notice new subscribers."""
        while True:
            if (await self._batches.recv()).startswith(_SUBSCRIBED):
                self._has_news.set()

    async def _replay(self) -> None:
        """Answer [client, "", number] with all kept batches from that number on, then with the number -1."""
        while self._replays is not None:
            client, *rest = await self._replays.recv_multipart()
            if len(rest) != 2 or rest[0] or len(rest[1]) != len(_END):
                log.warning("a replay of KV events was asked for in %d frames of another form", len(rest))
                continue
            first = int.from_bytes(rest[1], "big")
            for number, payload in list(self._kept):
                if number >= first:
                    await self._replays.send_multipart([client, b"", number.to_bytes(8, "big"), payload])
            await self._replays.send_multipart([client, b"", _END, b""])
