"""Server-sent events of one POST over HTTP/1.1, with as little work as possible.

The client shares the cores with what is measured, and its cost would be charged to the server, so it only
splits lines.
"""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing

_DATA, _DONE = b"data:", b"[DONE]"
_LINE_BYTES = 1 << 22


async def get_status(host: str, port: int, path: str) -> int:
    """The status of a GET; 0 if there is no listener or no answer."""
    try:
        reader, writer = await asyncio.open_connection(host, port)
    except OSError:
        return 0
    try:
        writer.write(f"GET {path} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n".encode())
        return (await _head(reader))[0]
    except (OSError, EOFError, ValueError, IndexError):
        return 0
    finally:
        writer.close()


async def post(host: str, port: int, path: str, body: bytes) -> AsyncGenerator[bytes, None]:
    """The data of each event up to [DONE] or the end. Raises RuntimeError with the text of a refusal."""
    reader, writer = await asyncio.open_connection(host, port, limit=_LINE_BYTES)
    try:
        head = (
            f"POST {path} HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n"
        )
        writer.write(head.encode() + b"Connection: close\r\n\r\n" + body)
        status, is_chunked = await _head(reader)
        if status != 200:
            raise RuntimeError(f"HTTP {status}: {(await reader.read(500)).decode(errors='replace')}")
        async with aclosing(_lines(reader, is_chunked=is_chunked)) as lines:
            async for line in lines:
                if line.startswith(_DATA):
                    payload = line[len(_DATA) :].strip()
                    if payload == _DONE:
                        return
                    yield payload
    finally:
        writer.close()


async def _head(reader: asyncio.StreamReader) -> tuple[int, bool]:
    """Status, and whether the body is chunked."""
    status = int((await reader.readline()).split()[1])
    is_chunked = False
    while (line := (await reader.readline()).strip().lower()) != b"":
        is_chunked |= line.startswith(b"transfer-encoding:") and line.endswith(b"chunked")
    return status, is_chunked


async def _lines(reader: asyncio.StreamReader, *, is_chunked: bool) -> AsyncGenerator[bytes, None]:
    if not is_chunked:
        async for line in reader:
            yield line
        return
    rest = b""
    while size := int((await reader.readline()).partition(b";")[0], 16):
        *lines, rest = (rest + (await reader.readexactly(size + 2))[:-2]).split(b"\n")
        for line in lines:
            yield line
