"""One client process of the streams benchmark: many streams at once, some of which are not read.

    python -m benchmarks.streams.client HOST:PORT --streams 5000 --slow 500 --tokens 16

Writes one JSON object per line to standard output: `opened` when all read streams have their first token,
`ended` with its figures when all are over. Slow streams read their first two events and then nothing until
the others have ended.
"""

import asyncio
import json
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Annotated, Any

import grpc
import grpc.aio
import typer

from benchmarks.report import spread
from protos.inference.v1 import inference_pb2, inference_pb2_grpc
from svc_common.net import rpc

STREAMS_PER_CHANNEL = 500
_LIMIT_S = 1_800.0
_READ_BY_SLOW = 2


@dataclass(slots=True)
class Readings:
    """What the streams of this process received. Times: seconds on this process's clock."""

    num_streams: int
    num_slow: int
    num_tokens: int
    opened: asyncio.Event = field(default_factory=asyncio.Event)
    others_over: asyncio.Event = field(default_factory=asyncio.Event)
    num_begun: int = 0
    num_over: int = 0
    gaps: list[float] = field(default_factory=list)
    first: list[float] = field(default_factory=list)
    ends: Counter[str] = field(default_factory=Counter)

    @property
    def num_fast(self) -> int:
        """Streams that are read without delay."""
        return self.num_streams - self.num_slow

    def begun(self, after_s: float) -> None:
        """Record the first token of a stream that is read."""
        self.first.append(after_s)
        self.num_begun += 1
        if self.num_begun == self.num_fast:
            self.opened.set()

    def over(self, end: str, *, is_slow: bool) -> None:
        """Record the end of a stream."""
        self.ends[("slow: " if is_slow else "") + end] += 1
        self.num_over += not is_slow
        if self.num_over == self.num_fast:
            self.others_over.set()
            self.opened.set()


async def read(stub: inference_pb2_grpc.InferenceServiceStub, seen: Readings, *, is_slow: bool) -> None:
    """One stream, from its call to its end."""
    began, last = time.perf_counter(), 0.0
    num_tokens = num_events = 0
    call = stub.GenerateStream(short_request(seen.num_tokens), timeout=_LIMIT_S)
    end = "no usage"
    try:
        async for event in call:
            now = time.perf_counter()
            num_events += 1
            if event.WhichOneof("event") == "delta":
                num_tokens += len(event.delta.token_ids)
                if is_slow:
                    pass
                elif last:
                    seen.gaps.append(now - last)
                else:
                    seen.begun(now - began)
                last = now
            elif event.HasField("usage"):
                end = "ended" if num_tokens == seen.num_tokens else "tokens are missing"
            if is_slow and num_events == _READ_BY_SLOW:
                await seen.others_over.wait()
    except grpc.aio.AioRpcError as error:
        end = f"{error.code().name} {rpc.from_rpc_error(error).reason}".strip()
    seen.over(end, is_slow=is_slow)


def short_request(num_tokens: int) -> inference_pb2.GenerateRequest:
    """A greedy request of two prompt tokens for exactly this many output tokens."""
    return inference_pb2.GenerateRequest(
        token_ids=inference_pb2.TokenIds(ids=(32, 33)),
        sampling=inference_pb2.SamplingParams(temperature=0.0),
        stop=inference_pb2.StopConditions(max_tokens=num_tokens, ignore_eos=True),
    )


async def run(address: str, seen: Readings) -> dict[str, Any]:
    """Run all streams and return their figures."""
    began = time.perf_counter()
    num_channels = -(-seen.num_streams // STREAMS_PER_CHANNEL)
    own = [("grpc.use_local_subchannel_pool", 1)]  # else channels to one address share a connection
    window = [("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 16_384)]
    channels = [grpc.aio.insecure_channel(address, options=own + window) for _ in range(num_channels)]
    stubs = [inference_pb2_grpc.InferenceServiceStub(channel) for channel in channels]
    tasks = [
        asyncio.create_task(read(stubs[i % num_channels], seen, is_slow=i < seen.num_slow))
        for i in range(seen.num_streams)
    ]
    try:
        await seen.opened.wait()
        opened_s = time.perf_counter() - began
        _tell("opened", opened_s=round(opened_s, 2), num_streams=seen.num_begun)
        await asyncio.gather(*tasks)
    finally:
        for channel in channels:
            await channel.close()
    return {
        "opened_s": round(opened_s, 2),
        "ends": dict(seen.ends),
        "gaps_s": spread(seen.gaps),
        "first_s": spread(seen.first),
    }


def _tell(what: str, **figures: Any) -> None:
    print(json.dumps({"what": what, **figures}), flush=True)


def main(
    address: Annotated[str, typer.Argument(help="The gateway's gRPC address, HOST:PORT.")],
    streams: Annotated[int, typer.Option(min=1, help="Concurrent streams.")] = 1_000,
    slow: Annotated[
        int, typer.Option(min=0, help="Streams among them that are not read after their first events.")
    ] = 0,
    tokens: Annotated[int, typer.Option(min=2, help="Output tokens of each stream.")] = 16,
) -> None:
    """Opens streams and prints their figures."""

    async def all_of_it() -> dict[str, Any]:
        return await run(address, Readings(streams, min(slow, streams - 1), tokens))

    _tell("ended", **asyncio.run(all_of_it()))


if __name__ == "__main__":
    typer.run(main)
