"""What peers may do to an HTTP listener: send slowly or nothing, many connections, two lengths, long headers, other content."""

import asyncio
import contextlib
import json
import re
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from gateway_svc.access.origins import with_origins
from gateway_svc.http.connection import PeerConnections
from gateway_svc.http.server import HttpServer
from gateway_svc.settings import HttpLimits
from tests.support.services.scripted_engine import PATIENCE_S, asynchronous
from tests.support.services.served_stack import ServedStack

pytestmark = pytest.mark.processes

HEAD = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
BODY = b'{"prompt": "ab", "max_tokens": 1}'
WHOLE = HEAD + b"content-length: %d\r\n\r\n" % len(BODY) + BODY
SHORT = HttpLimits(header_s=0.2, body_s=0.3, connections_per_peer=3)


async def _length(request: Request) -> Response:
    return PlainTextResponse(str(len(await request.body())))


@contextlib.asynccontextmanager
async def listener(limits: HttpLimits) -> AsyncIterator[int]:
    """A listener of ours with these limits, before an application that says how long the body is; its port."""
    server = HttpServer(Starlette(routes=[Route("/v1/completions", _length, methods=["POST"])]), 1.0, limits=limits)
    port = server.bind("127.0.0.1", 0, option="")
    serving = asyncio.create_task(server.run_bound())
    try:
        yield port
    finally:
        server.stop()
        await serving
        server.close()


class Answer:
    """What came until the connection was closed: status, header names in small letters, the error's code."""

    def __init__(self, raw: bytes) -> None:
        head, _, self.body = raw.partition(b"\r\n\r\n")
        self.status = int(head.split(b" ")[1]) if head else 0
        self.headers = {name.lower() for name in re.findall(rb"\r\n([^:\r\n]+):", head)}

    @property
    def code(self) -> str:
        return str(json.loads(self.body)["error"]["code"])


async def connect(port: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    return await asyncio.open_connection("127.0.0.1", port)


async def exchange(port: int, sent: bytes) -> Answer:
    """Sends that, and reads until the server closes the connection."""
    reader, writer = await connect(port)
    with contextlib.closing(writer):
        writer.write(sent)
        return Answer(await asyncio.wait_for(reader.read(), PATIENCE_S))


async def status_of(port: int) -> int:
    """Of a whole request on a connection of its own."""
    reader, writer = await connect(port)
    with contextlib.closing(writer):
        writer.write(WHOLE)
        return int((await asyncio.wait_for(reader.readline(), PATIENCE_S)).split(b" ")[1])


def port_of(stack: ServedStack) -> int:
    return int(stack.http_url.rpartition(":")[2])


# --- deadlines -------------------------------------------------------------------------------------------------------


@asynchronous
async def test_a_header_that_stops_is_answered_and_closed() -> None:
    """408 REQUEST_TOO_SLOW; one byte at a time moves no deadline, and a connection that says nothing is closed silently."""
    async with listener(SHORT) as port:
        half = await exchange(port, HEAD)
        assert (half.status, half.code) == (408, "request_too_slow")
        assert b"x-request-id" in half.headers
        assert (await exchange(port, b"")).status == 0
        reader, writer = await connect(port)
        with contextlib.closing(writer):
            while not reader.at_eof():
                writer.write(b"x")
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(reader.read(), 0.02)


@asynchronous
async def test_a_body_that_stops_is_answered_and_closed() -> None:
    """Declared or in chunks; before that, whole requests on the same connection are served."""
    async with listener(SHORT) as port:
        for length in (b"content-length: 100\r\n\r\nab", b"transfer-encoding: chunked\r\n\r\n2\r\nab\r\n"):
            half = await exchange(port, HEAD + length)
            assert (half.status, half.code) == (408, "request_too_slow")
        reader, writer = await connect(port)
        with contextlib.closing(writer):
            for _ in range(3):
                writer.write(WHOLE)
                assert b" 200 " in await reader.readuntil(b"\r\n\r\n")
                assert await reader.readexactly(2) == b"%d" % len(BODY)
            writer.write(HEAD + b"content-length: 100\r\n\r\nab")
            assert Answer(await asyncio.wait_for(reader.read(), PATIENCE_S)).status == 408


# --- peers -----------------------------------------------------------------------------------------------------------


@asynchronous
async def test_a_peer_may_have_so_many_connections() -> None:
    """One more is told so and closed; a place is free again once one has gone."""
    async with listener(HttpLimits(connections_per_peer=3)) as port:
        held = [await connect(port) for _ in range(3)]
        refused = await exchange(port, b"")
        assert (refused.status, refused.code) == (429, "too_many_connections")
        assert b"retry-after" in refused.headers
        held[0][1].close()
        async with asyncio.timeout(PATIENCE_S):
            while await status_of(port) != 200:
                await asyncio.sleep(0)
        for _, writer in held:
            writer.close()


def test_peers_are_addresses_and_ipv6_sites() -> None:
    """Each has its own count; addresses of one /64 share theirs."""
    peers = PeerConnections(1)
    assert peers.enter("10.0.0.1") and peers.enter("10.0.0.2") and not peers.enter("10.0.0.1")
    assert peers.enter("2001:db8::1") and not peers.enter("2001:db8::2") and peers.enter("2001:db8:0:1::1")
    peers.leave("10.0.0.1")
    assert peers.enter("10.0.0.1")


# --- framing ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "status"),
    [
        (b"content-length: 4\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\nGET", 400),
        (b"transfer-encoding: chunked\r\ncontent-length: 0\r\n\r\n0\r\n\r\n", 400),
        (b"transfer-encoding: gzip\r\n\r\n", 400),
        (b"content-length: 4\r\ncontent-length: 5\r\n\r\nabcd", 400),
        (b"content-length: +4\r\n\r\nabcd", 400),
        (b"x: " + b"y" * 20_000 + b"\r\ncontent-length: 0\r\n\r\n", 431),
        (b"x: y\r\n" * 4_000 + b"content-length: 0\r\n\r\n", 431),
        (b"x: " + b"y" * 100_000, 431),
    ],
    ids=["both", "both, the other way", "coding", "two lengths", "sign", "long", "many", "endless"],
)
def test_what_could_be_read_in_two_ways_is_refused_and_closed(stack: ServedStack, fields: bytes, status: int) -> None:
    """With an error object and `connection: close`; nothing behind it is taken for a request (RFC 9112, 6.1)."""
    answer = asyncio.run(exchange(port_of(stack), HEAD + fields))
    assert (answer.status, answer.code) == (status, {400: "malformed_request", 431: "header_too_large"}[status])
    assert answer.body.count(b"HTTP/1.1 ") == (status == 400) and b"connection" in answer.headers


def test_http_1_0_has_no_chunks(stack: ServedStack) -> None:
    """Refused, as RFC 9112 wants it."""
    sent = HEAD.replace(b"HTTP/1.1", b"HTTP/1.0") + b"transfer-encoding: chunked\r\n\r\n0\r\n\r\n"
    assert asyncio.run(exchange(port_of(stack), sent)).status == 400


# --- content and origins ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "kind", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data", None, "json"]
)
@pytest.mark.parametrize(
    "path", ["/v1/completions", "/v1/chat/completions", "/v1/embeddings", "/tokenize", "/detokenize"]
)
def test_only_json_is_taken(stack: ServedStack, kind: str | None, path: str) -> None:
    """415 for whatever a page of another site can send without asking; nothing of it runs."""
    headers = {} if kind is None else {"content-type": kind}
    answer = httpx.post(stack.http_url + path, content=BODY, headers=headers | {"origin": "https://evil.example"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (415, "unsupported_media_type")
    assert answer.json()["error"]["param"] == "content-type"


@pytest.mark.parametrize("kind", ["application/json", "Application/JSON; charset=utf-8", "application/vnd.api+json"])
def test_every_kind_of_json_is_taken(stack: ServedStack, kind: str) -> None:
    """With parameters, and as a suffix."""
    answer = httpx.post(f"{stack.http_url}/v1/completions", content=BODY, headers={"content-type": kind})
    assert answer.status_code == 200


def _ask(app: Any, method: str, **headers: str) -> httpx.Response:
    async def ask() -> httpx.Response:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://x") as client:
            return await client.request(method, "/v1/completions", headers=headers)

    return asyncio.run(ask())


def test_pages_of_allowed_origins_may_call() -> None:
    """Preflight and answer say so for these, and for no other; without the option nothing is said."""
    app = Starlette(routes=[Route("/v1/completions", _length, methods=["POST"])])
    allowed = with_origins(app, ["https://chat.example"])
    wish = {"access-control-request-method": "POST", "access-control-request-headers": "authorization, content-type"}
    preflight = _ask(allowed, "OPTIONS", origin="https://chat.example", **wish)
    assert preflight.headers["access-control-allow-origin"] == "https://chat.example"
    assert "authorization" in preflight.headers["access-control-allow-headers"]
    answer = _ask(allowed, "POST", origin="https://chat.example")
    assert answer.headers["access-control-allow-origin"] == "https://chat.example"
    assert "x-request-id" in answer.headers["access-control-expose-headers"]
    for origin, served in (("https://evil.example", allowed), ("https://chat.example", with_origins(app, ()))):
        assert "access-control-allow-origin" not in _ask(served, "POST", origin=origin).headers
        assert _ask(served, "OPTIONS", origin=origin, **wish).status_code >= 400
