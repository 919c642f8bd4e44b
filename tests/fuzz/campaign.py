"""A seeded run of so many inputs over the doors of a stack, or to the ports behind them; every answer is judged."""

import asyncio
import contextlib
import random
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import grpc
import grpc.aio

from protos.inference.v1 import admin_pb2, inference_pb2
from quire.local_stack.stack import LocalStack
from tests.fuzz import https, internal, judges, protos

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
    """All inputs over both doors; they depend on the seed alone."""
    rng = random.Random(seed)
    targets = {_PUBLIC.full_name: stack.grpc_address, _ADMIN.full_name: stack.admin_address}
    return await _run(_inputs(rng, num_inputs), targets, stack.http_url)


async def run_inside(scheduler: str, worker: str, num_inputs: int, seed: int) -> Account:
    """All inputs to the ports between services: a scheduler's and a worker's, which no scheduler uses."""
    rng = random.Random(seed)
    inputs = ((number, internal.internal_input(rng)) for number in range(num_inputs))
    return await _run(inputs, {internal.ENGINE.full_name: scheduler, internal.WORKER.full_name: worker}, "")


async def _run(
    inputs: Iterator[tuple[int, protos.Input | https.Input]], targets: Mapping[str, str], http_url: str
) -> Account:
    account = Account()
    async with _channels(targets) as channels_to:

        async def take() -> None:
            for number, one in inputs:
                if isinstance(one, https.Input):
                    await _send_http(http_url, one, account)
                else:
                    channels, blocking = channels_to[one.path.split("/")[1]]
                    await _send_call(channels[number % len(channels)], blocking, one, account)

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
async def _channels(
    targets: Mapping[str, str],
) -> AsyncIterator[dict[str, tuple[list[grpc.aio.Channel], grpc.Channel]]]:
    """Several connections to the address of each service, and a blocking one."""
    async with contextlib.AsyncExitStack() as opened:
        yield {
            service: (
                [
                    await opened.enter_async_context(grpc.aio.insecure_channel(address, options=_CLIENT_OPTIONS))
                    for _ in range(_NUM_CONNECTIONS)
                ],
                opened.enter_context(grpc.insecure_channel(address, options=_CLIENT_OPTIONS)),
            )
            for service, address in targets.items()
        }


async def _send_call(channel: grpc.aio.Channel, blocking: grpc.Channel, sent: protos.Input, account: Account) -> None:
    end, wrong = "OK", ""
    try:
        await _finish(channel, blocking, sent)
    except grpc.RpcError as error:
        is_endless = _may_be_endless(sent) and error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        end, wrong = error.code().name, "" if is_endless else judges.wrong_with_error(sent, error)
    account.note(f"{sent.path.rpartition('/')[2]}, {sent.kind}", end, wrong, sent.raw)
    if sent.path == _DRAIN:
        await channel.unary_unary(_DRAIN)(admin_pb2.DrainRequest(undo=True).SerializeToString())


async def _finish(channel: grpc.aio.Channel, blocking: grpc.Channel, sent: protos.Input) -> None:
    timeout_s = min(sent.timeout_s, _ENDLESS_S) if _may_be_endless(sent) else sent.timeout_s
    options: dict[str, Any] = {"metadata": sent.metadata, "timeout": timeout_s}
    if not sent.is_stream:
        await channel.unary_unary(sent.path)(sent.raw, **options)
    elif sent.more is None:
        async for _ in channel.unary_stream(sent.path)(sent.raw, **options):
            pass
    else:
        await asyncio.to_thread(_finish_both_ways, blocking, sent, options)


def _finish_both_ways(channel: grpc.Channel, sent: protos.Input, options: Mapping[str, Any]) -> None:
    """Not through grpc.aio: its client calls a stream that ended while it wrote INTERNAL, whatever the server answered."""
    for _ in channel.stream_stream(sent.path)(iter([sent.raw, *(sent.more or ())]), **options):
        pass


def _may_be_endless(sent: protos.Input) -> bool:
    """Streams that follow what happens."""
    return sent.is_stream and ("AdminService" in sent.path or sent.more is not None)


async def _send_http(http_url: str, sent: https.Input, account: Account) -> None:
    host, _, port = http_url.removeprefix("http://").rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    answer = b""
    try:
        writer.write(sent.sent)
        with contextlib.suppress(ConnectionError):
            await writer.drain()
        if sent.is_cut and not sent.is_http:
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
