"""Clients that do not read: each pauses or loses its own stream alone, and costs little memory."""

import asyncio
import contextlib
import json
import socket
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc.aio
import httpx
import pytest

from gateway_svc import stalled_clients
from gateway_svc.engine.request_table import MAX_UNREAD_BYTES
from gateway_svc.http import server
from gateway_svc.http.server import listen
from gateway_svc.requests.engine_request import EngineRequest
from gateway_svc.requests.token_runs import ChoiceTokens
from protos.engine.v1 import engine_pb2
from protos.inference.v1 import inference_pb2 as pb
from protos.inference.v1 import inference_pb2_grpc
from svc_common.net import rpc
from tests.support.services.scripted_engine import PATIENCE_S, Attachment, Gateway, asynchronous, finished, pair, tokens

pytestmark = pytest.mark.processes

REQUEST = pb.GenerateRequest(text="hello", stop=pb.StopConditions(max_tokens=1_000))
WINDOW = [("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 16_384), ("grpc.use_local_subchannel_pool", 1)]
RUN = [5 + i % 90 for i in range(500)]
LONGEST_S = 4.0  # long enough for a busy machine to fill the connection before
SOON_S = 0.5


async def _submits(attachment: Attachment, num: int) -> list[engine_pb2.Submit]:
    found: list[engine_pb2.Submit] = []
    while len(found) < num:
        found += (await attachment.next()).submits
    return found


@pytest.mark.parametrize("num_slow", [30, pytest.param(100, marks=pytest.mark.long)])
@asynchronous
async def test_many_that_never_read_disturb_no_other_client(
    num_slow: int, record_property: Callable[..., None]
) -> None:
    """Half of them read once, half never. Another stream gets each token as it comes, and all that is unread stays small."""
    async with pair() as (_, attachment, running), grpc.aio.insecure_channel(running.grpc, options=WINDOW) as channel:
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        slow = [stub.GenerateStream(REQUEST) for _ in range(num_slow)]
        submits = await _submits(attachment, num_slow)
        for call in slow[::2]:
            await call.read()
        fast = running.stub.GenerateStream(REQUEST)
        [healthy] = await _submits(attachment, 1)
        await fast.read()
        for i in range(12):
            attachment.send(*(tokens(s.handle, 500 * i, RUN) for s in submits), tokens(healthy.handle, i, [6]))
            event = await asyncio.wait_for(fast.read(), PATIENCE_S)
            assert event.delta.token_offset == i and list(event.delta.token_ids) == [6]
            assert not any(call.done() for call in slow), (
                "it continues while the others are unread, not after their end"
            )
        attachment.send(finished(healthy.handle, 12))
        while event is not grpc.aio.EOF and not event.HasField("usage"):
            event = await fast.read()
        # A client that reads in the end gets all of it.
        attachment.send(*(finished(s.handle, 6_000) for s in submits))
        got = 0
        async for event in slow[1]:
            got += len(event.delta.token_ids) if event.HasField("delta") else 0
        assert got == 6_000
        record_property("size", f"streams that are not read beside one that is: {num_slow}")
        for call in slow:
            call.cancel()


@asynchronous
async def test_a_stream_that_is_not_read_at_all_ends_alone() -> None:
    """Beyond MAX_UNREAD_BYTES: the scheduler is told, and its client hears SLOW_READER behind what it had been sent."""
    async with pair() as (_, attachment, running), grpc.aio.insecure_channel(running.grpc, options=WINDOW) as channel:
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        slow = stub.GenerateStream(REQUEST, timeout=50)
        [first] = await _submits(attachment, 1)
        other = running.stub.GenerateStream(REQUEST, timeout=50)
        [second] = await _submits(attachment, 1)
        long = RUN * 20
        for i in range(60):
            attachment.send(tokens(first.handle, len(long) * i, long))
            await asyncio.sleep(0)
        cancels = []
        while not cancels:
            cancels = list((await attachment.next()).cancels)
        assert [cancel.handle for cancel in cancels] == [first.handle]
        try:
            async for _ in slow:
                pass
            raise AssertionError("it ended as if all had been read")
        except grpc.aio.AioRpcError as error:
            assert rpc.from_rpc_error(error).reason == "SLOW_READER"
        attachment.send(tokens(second.handle, 0, [5]), finished(second.handle, 1))
        events = [event async for event in other]
        assert events[-1].HasField("usage")


@asynchronous
async def test_server_sent_events_wait_for_their_reader() -> None:
    """The HTTP door: an answer that is not read stops where the connection is full; other calls go on; then all of it comes."""
    async with pair() as (_, attachment, running), httpx.AsyncClient(base_url=f"http://{running.http}") as client:
        body = {"prompt": "hello", "stream": True, "max_tokens": 1_000}
        asked = client.build_request("POST", "/v1/completions", json=body, timeout=50)
        opening = asyncio.create_task(client.send(asked, stream=True))
        [first] = await _submits(attachment, 1)
        for i in range(40):
            attachment.send(tokens(first.handle, 500 * i, RUN))
        attachment.send(finished(first.handle, 20_000))
        slow = await opening
        asking = asyncio.create_task(client.post("/v1/completions", json={"prompt": "x", "max_tokens": 1}, timeout=50))
        [second] = await _submits(attachment, 1)
        attachment.send(tokens(second.handle, 0, [5]), finished(second.handle, 1))
        assert (await asking).status_code == 200
        lines = [line async for line in slow.aiter_lines() if line]
        await slow.aclose()
        assert lines[-1] == "data: [DONE]" and '"finish_reason":"length"' in lines[-2] + lines[-3]


def _num_handlers() -> int:
    """Tasks that answer a call, at either door, the scripted scheduler's included."""
    names = ("_handle_exceptions", "RequestResponseCycle.run_asgi")
    return sum(getattr(task.get_coro(), "__qualname__", "") in names for task in asyncio.all_tasks())


async def _until(what: Callable[[], bool], longest_s: float) -> None:
    async with asyncio.timeout(longest_s):
        while not what():
            await asyncio.sleep(0.02)


async def _hear(reader: asyncio.StreamReader) -> bytes:
    """The rest of what was sent, until the connection ends."""
    with contextlib.suppress(ConnectionResetError):
        return await reader.read()
    return b""


@contextlib.asynccontextmanager
async def _asked_by_hand(address: str, body: dict[str, object]) -> AsyncIterator[asyncio.StreamReader]:
    """A POST over a connection that takes in little and is not read before its reader is."""
    host, _, port = address.rpartition(":")
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4_096)
    sock.setblocking(False)
    await asyncio.get_running_loop().sock_connect(sock, (host, int(port)))
    reader, writer = await asyncio.open_connection(sock=sock, limit=1_024)
    text = json.dumps(body)
    head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(text)}"
    writer.write(f"{head}\r\n\r\n{text}".encode())
    await writer.drain()
    try:
        yield reader
    finally:
        writer.close()


async def _check_nothing_is_kept(attachment: Attachment, running: Gateway, num_before: int, began: float) -> None:
    """The stream that was asked for at `began`, or a little later, is not read from now on."""
    [submit] = await _submits(attachment, 1)
    assert _num_handlers() == num_before + 1
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await running.stub.Generate(REQUEST)
    assert rpc.from_rpc_error(refused.value).reason == "GATEWAY_FULL"
    for i in range(60):
        attachment.send(tokens(submit.handle, 500 * i, RUN, [-0.5] * 500))
        await asyncio.sleep(0.005)
    await _until(lambda: _num_handlers() == num_before, PATIENCE_S)
    assert time.monotonic() - began > LONGEST_S + SOON_S
    told = await attachment.next()
    assert [cancel.handle for cancel in told.cancels] == [submit.handle]
    asking = running.stub.Generate(REQUEST)
    [second] = await _submits(attachment, 1)
    attachment.send(tokens(second.handle, 0, [5]), finished(second.handle, 1))
    assert (await asking).usage.completion_tokens == 1


@asynchronous
async def test_a_call_that_is_never_read_and_has_no_deadline_keeps_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A little after `max_request_s` its place is free, the scheduler knows, no task waits; a late reader gets the reason."""
    monkeypatch.setattr(stalled_clients, "LEAVING_S", SOON_S)
    async with (
        pair(max_request_s=LONGEST_S, max_live_requests=1) as (_, attachment, running),
        grpc.aio.insecure_channel(running.grpc, options=WINDOW) as channel,
    ):
        num_before, began = _num_handlers(), time.monotonic()
        call = inference_pb2_grpc.InferenceServiceStub(channel).GenerateStream(REQUEST)
        await _check_nothing_is_kept(attachment, running, num_before, began)
        with pytest.raises(grpc.aio.AioRpcError) as late:
            async for _event in call:
                pass
        assert rpc.from_rpc_error(late.value).reason == "DURING_DECODE"


@asynchronous
async def test_events_that_are_never_read_keep_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same for server-sent events; a client that reads in the end sees an answer without its end."""

    def listen_small(*where: Any, **option: Any) -> socket.socket:
        """With buffers of the system that are full soon; connections have their listener's."""
        sock = listen(*where, **option)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4_096)
        return sock

    monkeypatch.setattr(server, "listen", listen_small)
    monkeypatch.setattr(stalled_clients, "LEAVING_S", SOON_S)
    body = {"prompt": "hello", "stream": True, "max_tokens": 1_000, "logprobs": 0}
    async with pair(max_request_s=LONGEST_S, max_live_requests=1) as (_, attachment, running):
        num_before, began = _num_handlers(), time.monotonic()
        async with _asked_by_hand(running.http, body) as reader:
            await _check_nothing_is_kept(attachment, running, num_before, began)
            heard = await _hear(reader)
            assert b"200 OK" in heard and b"data: " in heard and b"[DONE]" not in heard


@asynchronous
async def test_what_is_unread_is_counted_and_small() -> None:
    """Four bytes for a token, more with what is beside it; reading empties it."""
    request = EngineRequest(engine_pb2.Submit(handle=1, request_id="r"), deadline_ns=0)
    for i in range(96):
        assert request.add_tokens(0, ChoiceTokens(500 * i, list(RUN)))
    assert request.num_unread_tokens == 48_000 and request.num_unread_bytes == 192_000 <= MAX_UNREAD_BYTES
    update = await request.next()
    assert update is not None and update.choices[0].run.token_ids == RUN * 96
    assert request.num_unread_bytes == 0
    assert request.add_tokens(0, ChoiceTokens(48_000, [1, 2], [0.5, 0.5]))
    assert request.num_unread_bytes > 2 * 4
