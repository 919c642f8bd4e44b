"""How the comparison with peers asks: events of HTTP, wires of servers, children that step."""

import asyncio
import json
import time
from collections.abc import AsyncIterator
from typing import Any

import pytest

from benchmarks.compare import sse, wires
from benchmarks.compare.offline import child
from quire_tools.bench.measure import Record
from quire_tools.bench.workloads import PlannedRequest


async def asked(reply: bytes, path: str, ask: Any) -> tuple[Any, bytes]:
    """What `ask(port)` gives while a server answers one request with `reply`, in pieces of seven bytes; and what was asked."""
    requests: list[bytes] = []

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        length = next((int(line[15:]) for line in head.splitlines() if line.lower().startswith(b"content-length:")), 0)
        requests.append(head.split(b"\r\n")[0] + b"\n" + await reader.readexactly(length))
        for begin in range(0, len(reply), 7):
            writer.write(reply[begin : begin + 7])
            await writer.drain()
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    async with server:
        found = await ask(server.sockets[0].getsockname()[1])
    assert path.encode() in requests[0]
    return found, requests[0].partition(b"\n")[2]


def chunked(*chunks: bytes) -> bytes:
    """A streamed reply of these chunks."""
    body = b"".join(b"%x\r\n%s\r\n" % (len(chunk), chunk) for chunk in chunks)
    return (
        b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
        + body
        + b"0\r\n\r\n"
    )


async def collected(events: AsyncIterator[bytes]) -> list[bytes]:
    """All of them."""
    return [event async for event in events]


def test_events_are_cut_out_of_chunks() -> None:
    """Lines may be cut anywhere; comments are skipped; [DONE] ends it; a refusal is told; without chunks it works too."""
    reply = chunked(b'data: {"a"', b": 1}\n\ndata:2\n\n: ping\n", b"data: [DONE]\n\ndata: 3\n\n")
    found, _ = asyncio.run(asked(reply, "/x", lambda port: collected(sse.post("127.0.0.1", port, "/x", b"{}"))))
    assert found == [b'{"a": 1}', b"2"]
    plain = b"HTTP/1.1 200 OK\r\n\r\ndata: 1\n\ndata: 2\n\n"
    assert asyncio.run(asked(plain, "/x", lambda port: collected(sse.post("127.0.0.1", port, "/x", b""))))[0] == [
        b"1",
        b"2",
    ]
    refusal = b"HTTP/1.1 503 Busy\r\nContent-Length: 4\r\n\r\nfull"
    with pytest.raises(RuntimeError, match="HTTP 503: full"):
        asyncio.run(asked(refusal, "/x", lambda port: collected(sse.post("127.0.0.1", port, "/x", b""))))
    assert asyncio.run(asked(refusal, "/health", lambda port: sse.get_status("127.0.0.1", port, "/health")))[0] == 503


PLANNED = PlannedRequest(0, 0.0, "", (5, 6), 3)
WIRES: dict[str, tuple[Any, list[dict[str, Any]], dict[str, Any]]] = {
    "/v1/completions": (
        lambda port: wires.OpenAIWire("127.0.0.1", port, "m", {"return_token_ids": True}),
        [
            {"choices": [{"text": "", "token_ids": [7]}]},
            {"choices": [{"text": "ab", "token_ids": [8, 9]}]},
            {"choices": [], "usage": {"completion_tokens": 3}},
        ],
        {"prompt": [5, 6], "max_tokens": 3, "ignore_eos": True, "temperature": 0.0, "return_token_ids": True},
    ),
    "/completion": (
        lambda port: wires.LlamaCppWire("127.0.0.1", port),
        [
            {"content": "", "tokens": [7], "stop": False},
            {"content": "ab", "tokens": [8, 9], "stop": False},
            {"content": "", "tokens": [], "stop": True, "tokens_predicted": 3},
        ],
        {"prompt": [5, 6], "n_predict": 3, "ignore_eos": True, "samplers": ["top_k"], "top_k": 1},
    ),
}


@pytest.mark.parametrize("path", WIRES)
def test_wires_of_peers(path: str) -> None:
    """Token ids go out; tokens that come are stamped, those of one message once."""
    make, events, wanted = WIRES[path]
    reply = chunked(*(b"data: %s\n\n" % json.dumps(event).encode() for event in events))
    record, clock = Record(0, 0.0), iter(range(100)).__next__
    found, body = asyncio.run(asked(reply, path, lambda port: make(port).ask(PLANNED, record, clock)))
    assert found == [7, 8, 9] and record.output_tokens == 3 and record.token_times_s == [0, 1]
    assert {key: json.loads(body)[key] for key in wanted} == wanted


def test_llama_cpp_counts_tokens_whose_ids_it_keeps() -> None:
    """One that ends within a character has no message: it counts, and no tokens are told rather than too few."""
    make, events, _ = WIRES["/completion"]
    told = [events[0], {**events[-1], "tokens_predicted": 2}]
    reply = chunked(*(b"data: %s\n\n" % json.dumps(event).encode() for event in told))
    record = Record(0, 0.0)
    found, _ = asyncio.run(asked(reply, "/completion", lambda port: make(port).ask(PLANNED, record, lambda: 0.5)))
    assert found == [] and record.output_tokens == 2 and record.token_times_s == [0.5]


def test_stepped_children_hand_requests_over_when_they_are_due() -> None:
    """Not before, and between two steps."""
    seen: list[tuple[int, int]] = []

    class Counting:
        def __init__(self) -> None:
            self.live: list[child.Asked] = []

        def add(self, request: child.Asked) -> None:
            self.live.append(request)

        def step(self, began: float) -> None:
            for request in self.live:
                request.take(time.perf_counter() - began, [request.index])
                seen.append((request.index, len(request.tokens)))
            self.live = [request for request in self.live if len(request.tokens) < request.max_tokens]

        def has_unfinished(self) -> bool:
            return bool(self.live)

    requests = [child.Asked(0, 0.03, [1], 2), child.Asked(1, 0.0, [1], 1)]
    child.run_stepped(Counting(), requests, time.perf_counter())
    assert seen == [(1, 1), (0, 1), (0, 2)] and requests[0].events[0][0] >= 0.03 and requests[0].tokens == [0, 0]
