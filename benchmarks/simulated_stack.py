"""Measures the control path: 256 sequences on a zero-cost simulated worker, through real gRPC. Goal: 100 steps/s.

    python -m benchmarks.simulated_stack

Two figures. `scheduler`: this process attaches to the scheduler as a gateway would, so scheduler, worker and
both internal streams are measured. `gateway`: 256 client streams through the public API as well; client and
gateway share the machine, so that figure is a lower bound. Steps/s = tokens that arrived while all sequences
ran / sequences / time.
"""

import asyncio
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from typing import Annotated, Any

import typer
from rich.console import Console

from benchmarks import report
from protos.common.v1 import common_pb2
from protos.engine.v1 import engine_pb2, engine_pb2_grpc
from protos.inference.v1 import inference_pb2, inference_pb2_grpc
from quire.local_stack.stack import LocalStack
from svc_common import wire_arrays
from svc_common.net import rpc

GOAL_STEPS_PER_S = 100.0
MODEL_TOKENS = 64


@dataclass(slots=True)
class Arrivals:
    """Arrival times of tokens by sequence."""

    num_seqs: int
    tokens_wanted: int
    events: list[tuple[float, int, int]] = field(default_factory=list)
    counts: dict[int, int] = field(default_factory=dict)

    def add(self, sequence: int, tokens: int) -> None:
        """Record `tokens` more of `sequence`, now."""
        self.counts[sequence] = self.counts.get(sequence, 0) + tokens
        self.events.append((time.perf_counter(), sequence, tokens))

    @property
    def done(self) -> bool:
        """True if all tokens of all sequences have arrived."""
        return sum(self.counts.values()) >= self.num_seqs * self.tokens_wanted

    def steps_per_s(self) -> tuple[float, float]:
        """(steps/s, length of the window in s): from when all have their first token to when the first is complete."""
        first: dict[int, float] = {}
        totals: dict[int, int] = {}
        start = end = 0.0
        for at, sequence, tokens in self.events:
            first.setdefault(sequence, at)
            totals[sequence] = totals.get(sequence, 0) + tokens
            if len(first) == self.num_seqs and not start:
                start = at
            if totals[sequence] >= self.tokens_wanted:
                end = at
                break
        inside = sum(tokens for at, _, tokens in self.events if start < at <= end)
        if not start or end <= start:
            raise RuntimeError("the sequences never all ran at the same time; use more tokens")
        return inside / self.num_seqs / (end - start), end - start


async def through_scheduler(address: str, arrivals: Arrivals) -> None:
    """Send all requests on one Attach stream, as a gateway does."""
    async with rpc.channel(address) as channel:
        stub = engine_pb2_grpc.EngineServiceStub(channel)
        closed = asyncio.Event()
        call = stub.Attach(_frontend_messages(arrivals, closed))
        async for message in call:
            _take(message, arrivals)
            if arrivals.done:
                break
        closed.set()
        call.cancel()


async def _frontend_messages(arrivals: Arrivals, closed: asyncio.Event) -> AsyncIterator[engine_pb2.FrontendMessage]:
    hello = engine_pb2.FrontendHello(identity=rpc.Identity().message(), frontend_id=uuid.uuid4().hex)
    yield engine_pb2.FrontendMessage(hello=hello)
    yield engine_pb2.FrontendMessage(submits=[submit(i, arrivals.tokens_wanted) for i in range(arrivals.num_seqs)])
    await closed.wait()


def submit(index: int, max_tokens: int) -> engine_pb2.Submit:
    """Request `index` of a gateway, with handle `index + 1`: a prompt of 16 tokens, and just so many tokens."""
    return engine_pb2.Submit(
        handle=index + 1,
        request_id=f"bench-{uuid.uuid4().hex[:8]}-{index}",
        token_ids=wire_arrays.pack([(index * 7 + i) % MODEL_TOKENS + 1 for i in range(16)]),
        sampling=common_pb2.ResolvedSampling(temperature=0.0, top_p=1.0, seed=index),
        stop=common_pb2.StopRules(max_tokens=max_tokens, ignore_eos=True),
        num_choices=1,
    )


def _take(message: engine_pb2.EngineMessage, arrivals: Arrivals) -> None:
    if message.failed:
        raise RuntimeError(f"{message.failed[0].error.reason}: {message.failed[0].error.message}")
    handles = wire_arrays.unpack(message.tokens.handles, "handles", wire_arrays.U32)
    counts = wire_arrays.unpack(message.tokens.counts, "counts", wire_arrays.U32, length=len(handles))
    for handle, count in zip(handles.tolist(), counts.tolist(), strict=True):
        arrivals.add(handle, count)


async def through_gateway(address: str, arrivals: Arrivals) -> None:
    """Make one GenerateStream call per sequence."""
    async with rpc.channel(address) as channel:
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        await asyncio.gather(*(_one_stream(stub, index, arrivals) for index in range(arrivals.num_seqs)))


async def _one_stream(stub: inference_pb2_grpc.InferenceServiceStub, index: int, arrivals: Arrivals) -> None:
    request = inference_pb2.GenerateRequest(
        sampling=inference_pb2.SamplingParams(temperature=0.0),
        stop=inference_pb2.StopConditions(max_tokens=arrivals.tokens_wanted, ignore_eos=True),
    )
    request.token_ids.ids.extend((index * 7 + i) % MODEL_TOKENS + 1 for i in range(16))
    async for event in stub.GenerateStream(request, timeout=300):
        if event.WhichOneof("event") == "delta" and event.delta.token_ids:
            arrivals.add(index, len(event.delta.token_ids))


def measure(
    run: Callable[[Arrivals], Awaitable[None]], *, num_seqs: int, tokens: int, timeout_s: float
) -> dict[str, Any]:
    """Measure steps/s of one entry point."""
    arrivals = Arrivals(num_seqs, tokens)

    async def bounded() -> None:
        async with asyncio.timeout(timeout_s):
            await run(arrivals)

    asyncio.run(bounded())
    steps_per_s, window_s = arrivals.steps_per_s()
    return {
        "steps_per_s": round(steps_per_s, 1),
        "tokens_per_s": round(steps_per_s * num_seqs, 1),
        "window_s": round(window_s, 3),
        "messages": len(arrivals.events),
    }


def main(
    num_seqs: Annotated[int, typer.Option(min=1)] = 256,
    tokens: Annotated[int, typer.Option(min=8, help="Output tokens per sequence.")] = 1000,
    timeout_s: Annotated[float, typer.Option(help="Time limit of each of the two runs, in seconds.")] = 120.0,
    save: Annotated[bool, typer.Option(help="Write benchmarks/results/simulated-stack.json.")] = True,
) -> None:
    """Starts scheduler, gateway and a simulated worker without step time, and measures steps per second."""
    worker = ("--time-scale", "0", "--num-gpu-blocks", str(num_seqs * (tokens // 16 + 4)))
    with LocalStack(simulated=True, worker_args=worker, scheduler_args=("--max-num-seqs", str(num_seqs))) as stack:
        ways: dict[str, Callable[[Arrivals], Awaitable[None]]] = {
            "scheduler": lambda arrivals: through_scheduler(stack.scheduler_address, arrivals),
            "gateway": lambda arrivals: through_gateway(stack.grpc_address, arrivals),
        }
        figures = {
            name: measure(run, num_seqs=num_seqs, tokens=tokens, timeout_s=timeout_s) for name, run in ways.items()
        }
    result = {"benchmark": "simulated-stack", "num_seqs": num_seqs, "goal_steps_per_s": GOAL_STEPS_PER_S, **figures}
    if save:
        report.save("simulated-stack", result)
    console = Console()
    for name, figure in figures.items():
        met = "met" if figure["steps_per_s"] >= GOAL_STEPS_PER_S else "missed"
        console.print(
            f"{name:<10} {figure['steps_per_s']:8,.1f} steps/s at {num_seqs} sequences "
            f"({figure['tokens_per_s']:,.0f} tokens/s); goal {GOAL_STEPS_PER_S:g}: {met}"
        )


if __name__ == "__main__":
    typer.run(main)
