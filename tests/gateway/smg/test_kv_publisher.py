"""KV events over ZeroMQ, from a real scheduler and simulated worker to real sockets."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc
import msgpack
import pytest
import zmq
import zmq.asyncio

from gateway_svc.cell import kv_publisher
from gateway_svc.cell.kv_publisher import KvEndpoints, KvPublisher
from gateway_svc.settings import GatewaySettings
from protos.engine.v1 import engine_pb2, engine_pb2_grpc
from protos.routers.v1.vllm_engine_pb2_grpc import VllmEngineStub
from svc_common.errors import ConfigError, Unavailable
from tests.gateway.smg.test_kv_events import BLOCK, generate
from tests.support.services.harness import run_async, scheduler, worker
from tests.support.services.scripted_engine import gateway

pytestmark = pytest.mark.processes

ANY = "tcp://127.0.0.1:*"
TOPIC = "kv@127.0.0.1:8000@tiny"


class Picker:
    """What an endpoint picker makes of the batches: tokens of the known blocks by hash, and their parents."""

    def __init__(self, context: zmq.asyncio.Context, endpoint: str) -> None:
        self.socket = context.socket(zmq.SUB)
        self.socket.connect(endpoint)
        self.socket.setsockopt_string(zmq.SUBSCRIBE, TOPIC)
        self.blocks: dict[int, tuple[int, ...]] = {}
        self.parents: dict[int, int | None] = {}
        self.numbers: list[int] = []

    async def read(self) -> None:
        """One batch."""
        topic, number, payload = await asyncio.wait_for(self.socket.recv_multipart(), 60)
        assert topic == TOPIC.encode()
        self.numbers.append(int.from_bytes(number, "big"))
        self.take(payload)

    def take(self, payload: bytes) -> None:
        """Apply one batch."""
        _, events, rank = msgpack.unpackb(payload)
        assert rank == 0
        for tag, *values in events:
            getattr(self, tag)(*values)

    def AllBlocksCleared(self) -> None:
        """All are gone."""
        self.blocks.clear()

    def BlockRemoved(self, hashes: list[int], medium: str) -> None:
        """These are gone."""
        for block_hash in hashes:
            del self.blocks[block_hash]

    def BlockStored(
        self, hashes: list[int], parent: int | None, tokens: list[int], size: int, adapter: int | None, medium: str
    ) -> None:
        """These are there, one after the other."""
        assert (len(tokens), size, adapter, medium) == (BLOCK * len(hashes), BLOCK, None, "GPU")
        for number, block_hash in enumerate(hashes):
            assert 0 <= block_hash < 2**64
            self.blocks[block_hash] = tuple(tokens[number * BLOCK : (number + 1) * BLOCK])
            self.parents[block_hash], parent = parent, block_hash

    async def until_knows(self, text: list[int]) -> None:
        """Read until all full blocks of that text are known."""
        while not self.knows(text):
            await self.read()

    def knows(self, text: list[int]) -> bool:
        """Whether all its full blocks are known, one after the other."""
        parent = None
        for start in range(0, len(text) // BLOCK * BLOCK, BLOCK):
            tokens = tuple(text[start : start + BLOCK])
            found = [key for key, known in self.blocks.items() if known == tokens and self.parents[key] == parent]
            if not found:
                return False
            [parent] = found
        return True


@contextlib.asynccontextmanager
async def publisher(changes: Any, replay: str = "") -> AsyncIterator[tuple[KvPublisher, zmq.asyncio.Context]]:
    """A running publisher, and a context for sockets that connect to it."""
    made, context = KvPublisher(KvEndpoints(ANY, replay, TOPIC), changes), zmq.asyncio.Context()
    running = asyncio.create_task(made.run())
    try:
        yield made, context
    finally:
        running.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await running
        made.close()
        context.destroy(linger=0)


@run_async
async def test_pickers_know_what_is_cached(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those who come at once and late, after blocks are evicted, and by a replay of everything."""
    monkeypatch.setattr(kv_publisher, "RETRY_S", 0.05)
    async with (
        worker(num_gpu_blocks=24, block_size=BLOCK) as (worker_address,),
        scheduler(worker_address, kv_events=True) as (address, _),
        gateway(address) as running,
        grpc.aio.insecure_channel(address) as channel,
    ):
        engine, stub = engine_pb2_grpc.EngineServiceStub(channel), VllmEngineStub(running.channel)

        async def changes() -> AsyncIterator[engine_pb2.SubscribeKvEventsResponse]:
            async for change in engine.SubscribeKvEvents(engine_pb2.SubscribeKvEventsRequest()):
                yield change

        async with publisher(changes, ANY) as (made, context):
            batches, replay = made.endpoints
            early = Picker(context, batches)
            first = await generate(stub, b"a" * 40 + b"b" * 10)
            await early.until_knows(first)
            for number in range(20):
                last = await generate(stub, b"%02d" % number * 30)
            await early.until_knows(last)
            late = Picker(context, batches)
            await late.until_knows(last)
            while early.numbers[-1] < late.numbers[-1]:
                await early.read()
            assert late.blocks == early.blocks and not early.knows(first) and len(early.blocks) <= 23
            assert early.numbers == list(range(early.numbers[0], early.numbers[-1] + 1))
            again = Picker(context, batches)
            assert await replayed(context, replay, 0, again.take) == list(range(early.numbers[-1] + 1))
            assert again.blocks == early.blocks
            assert await replayed(context, replay, early.numbers[-1]) == [early.numbers[-1]]


async def replayed(
    context: zmq.asyncio.Context, endpoint: str, first: int, take: Callable[[bytes], object] = len
) -> list[int]:
    """Numbers of the batches that a replay from `first` on brings."""
    numbers = []
    with context.socket(zmq.DEALER) as socket:
        socket.connect(endpoint)
        await socket.send_multipart([b"x"])  # not a request: nothing comes of it
        await socket.send_multipart([b"", first.to_bytes(8, "big")])
        while True:
            delimiter, number, payload = await asyncio.wait_for(socket.recv_multipart(), 60)
            assert delimiter == b""
            if int.from_bytes(number, "big", signed=True) == -1:
                return numbers
            numbers.append(int.from_bytes(number, "big"))
            take(payload)


@run_async
async def test_without_a_scheduler_nothing_is_known(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Until it is back; the reason is logged once."""
    monkeypatch.setattr(kv_publisher, "RETRY_S", 0.05)
    stored = engine_pb2.StoredBlock(block_hash=-3, token_ids=range(BLOCK))
    of_adapter = engine_pb2.StoredBlock(block_hash=5, token_ids=range(BLOCK), lora_id=1)
    lost, num_lost = asyncio.Event(), 0

    async def changes() -> AsyncIterator[engine_pb2.SubscribeKvEventsResponse]:
        if not lost.is_set():
            yield engine_pb2.SubscribeKvEventsResponse(stored=[stored, of_adapter])
            await lost.wait()
        nonlocal num_lost
        num_lost += 1
        raise Unavailable("gone")

    async with publisher(changes) as (made, context):
        picker = Picker(context, made.endpoints[0])
        while not picker.blocks:
            await picker.read()
        assert list(picker.blocks) == [2**64 - 3]
        lost.set()
        while picker.blocks:
            await picker.read()
        while num_lost < 5:
            await asyncio.sleep(0.02)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(picker.socket.recv_multipart(), 0.2)
    assert [record.getMessage() for record in caplog.records].count("no KV events from the scheduler: gone") == 1


@run_async
async def test_kept_batches_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """A replay begins with the oldest kept."""
    monkeypatch.setattr(kv_publisher, "REPLAY_BYTES", 1000)
    block = engine_pb2.StoredBlock(block_hash=1, token_ids=[9] * BLOCK)
    sent = asyncio.Event()

    async def changes() -> AsyncIterator[engine_pb2.SubscribeKvEventsResponse]:
        for _ in range(100):
            yield engine_pb2.SubscribeKvEventsResponse(stored=[block])
        sent.set()
        await asyncio.Event().wait()

    async with publisher(changes, ANY) as (made, context):
        await sent.wait()
        numbers = await replayed(context, made.endpoints[1], 0)
    assert 5 < len(numbers) < 20 and numbers == list(range(numbers[0], 100))


@run_async
async def test_endpoints_that_cannot_be_used() -> None:
    """Are refused with the option."""
    for endpoints, option in (
        (KvEndpoints("nonsense"), "--kv-events-endpoint nonsense"),
        (KvEndpoints(ANY, "tcp://nowhere.invalid:1"), "--kv-events-replay-endpoint tcp://nowhere"),
    ):
        with pytest.raises(ConfigError, match=option):
            KvPublisher(endpoints, lambda: None)  # type: ignore[arg-type, return-value]


def test_a_topic_needs_an_endpoint() -> None:
    """As does a replay endpoint."""
    for values in ({"kv_events_topic": "a"}, {"kv_events_replay_endpoint": ANY}):
        with pytest.raises(ValueError, match="kv_events_endpoint"):
            GatewaySettings(**values)


@run_async
async def test_a_gateway_publishes() -> None:
    """With the option; its sockets are closed when it stops."""
    endpoint = "ipc://@quire-kv-events-test"
    async with (
        worker(block_size=BLOCK) as (worker_address,),
        scheduler(worker_address, kv_events=True) as (address, _),
    ):
        for _ in range(2):
            async with gateway(address, kv_events_endpoint=endpoint, kv_events_topic=TOPIC) as running:
                context = zmq.asyncio.Context()
                try:
                    picker = Picker(context, endpoint)
                    await picker.until_knows(await generate(VllmEngineStub(running.channel), b"a" * 40))
                finally:
                    context.destroy(linger=0)
