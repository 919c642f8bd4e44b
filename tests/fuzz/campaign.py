"""A seeded run of so many inputs over both doors of a stack: several connections at once, every answer judged."""

import asyncio
import contextlib
import random
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import grpc
import grpc.aio

from protos.inference.v1 import admin_pb2, inference_pb2
from quire.stack import LocalStack
from tests.fuzz import https, judges, protos

_NUM_CONNECTIONS = 4
_NUM_AT_ONCE = 24
_HTTP_SHARE = 0.35
_ANSWER_S = 30.0
_ENDLESS_S = 0.2
_MAX_SHOWN = 40
_CLIENT_OPTIONS = [
    ("grpc.max_receive_message_length", 64 * 2**20),
    ("grpc.max_send_message_length", 64 * 2**20),
    ("grpc.enable_retries", 0),
    ("grpc.use_local_subchannel_pool", 1),
]
_PUBLIC = inference_pb2.DESCRIPTOR.services_by_name["InferenceService"]
_ADMIN = admin_pb2.DESCRIPTOR.services_by_name["AdminService"]
_DRAIN = f"/{_ADMIN.full_name}/Drain"


@dataclass
class Account:
    """What was sent by kind, how calls ended, and what was wrong."""

    sent: Counter[str] = field(default_factory=Counter)
    ended: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)

    def note(self, kind: str, end: str, wrong: str, sent: bytes) -> None:
        self.sent[kind] += 1
        self.ended[end] += 1
        if wrong and len(self.wrong) < _MAX_SHOWN:
            self.wrong.append(f"{kind}: {wrong} <- {sent[:400]!r}")


async def run(stack: LocalStack, num_inputs: int, seed: int) -> Account:
    """All inputs; they depend on the seed alone."""
    rng, account = random.Random(seed), Account()
    async with _doors(stack) as (public, admin):
        inputs = _inputs(rng, num_inputs)

        async def take() -> None:
            for number, one in inputs:
                if isinstance(one, https.Input):
                    await _send_http(stack, one, account)
                else:
                    channels = admin if one.path.startswith(f"/{_ADMIN.full_name}") else public
                    await _send_call(channels[number % len(channels)], one, account)

        await asyncio.gather(*(take() for _ in range(_NUM_AT_ONCE)))
    return account


def _inputs(rng: random.Random, count: int) -> Iterator[tuple[int, protos.Input | https.Input]]:
    for number in range(count):
        if rng.random() < _HTTP_SHARE:
            yield number, https.http_input(rng)
            continue
        service = _ADMIN if rng.random() < 0.15 else _PUBLIC
        method = rng.choice(service.methods)
        yield number, protos.call_input(rng, method, f"/{service.full_name}/{method.name}")


@contextlib.asynccontextmanager
async def _doors(stack: LocalStack) -> AsyncIterator[tuple[list[grpc.aio.Channel], list[grpc.aio.Channel]]]:
    """Several connections to each."""
    async with contextlib.AsyncExitStack() as opened:
        doors = [
            [
                await opened.enter_async_context(grpc.aio.insecure_channel(address, options=_CLIENT_OPTIONS))
                for _ in range(_NUM_CONNECTIONS)
            ]
            for address in (stack.grpc_address, stack.admin_address)
        ]
        yield doors[0], doors[1]


async def _send_call(channel: grpc.aio.Channel, sent: protos.Input, account: Account) -> None:
    end, wrong = "OK", ""
    try:
        await _finish(channel, sent)
    except grpc.aio.AioRpcError as error:
        is_endless = (
            "AdminService" in sent.path and sent.is_stream and error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        )
        end, wrong = error.code().name, "" if is_endless else judges.wrong_with_error(sent, error)
    account.note(f"{sent.path.rpartition('/')[2]}, {sent.kind}", end, wrong, sent.raw)
    if sent.path == _DRAIN:
        await channel.unary_unary(_DRAIN)(admin_pb2.DrainRequest(undo=True).SerializeToString())


async def _finish(channel: grpc.aio.Channel, sent: protos.Input) -> None:
    if not sent.is_stream:
        await channel.unary_unary(sent.path)(sent.raw, metadata=sent.metadata, timeout=sent.timeout_s)
        return
    is_admin = "AdminService" in sent.path
    timeout_s = min(sent.timeout_s, _ENDLESS_S) if is_admin else sent.timeout_s
    async for _ in channel.unary_stream(sent.path)(sent.raw, metadata=sent.metadata, timeout=timeout_s):
        pass


async def _send_http(stack: LocalStack, sent: https.Input, account: Account) -> None:
    host, _, port = stack.http_url.removeprefix("http://").rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    answer = b""
    try:
        writer.write(sent.sent)
        with contextlib.suppress(ConnectionError):
            await writer.drain()
        if not sent.is_http:
            writer.write_eof()
        answer = await _within(reader.read)
    except ConnectionError:
        pass
    finally:
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()
    end = answer[9:12].decode("latin-1") or "closed"
    account.note(f"http, {sent.kind}", end, judges.wrong_with_answer(sent, answer), sent.sent)


async def _within(read: Callable[[], Awaitable[Any]]) -> bytes:
    async with asyncio.timeout(_ANSWER_S):
        return bytes(await read())
