"""A trace explains where a request's time went: no more than 5 % of it is without a span or an event, whatever it waited for."""

import asyncio
import contextlib
import os
from collections.abc import Callable, Iterator
from typing import Any

import grpc.aio
import pytest

from protos.inference.v1 import inference_pb2 as pb
from protos.inference.v1 import inference_pb2_grpc
from quire.local_stack import ports
from quire.local_stack.otlp_receiver import OtlpReceiver, ReceivedTrace
from quire.local_stack.processes import ServiceProcess, ignore_line
from svc_common.observability import trace_names as names
from tests.support.services.harness import run_async, scheduler, worker
from tests.support.tracing_page import undocumented
from tests.traces.coverage import gaps, unexplained_share
from tests.traces.serving import exporting, gateway, post

MOST = 0.05
_NUM_TOKENS = 250
"""A second's work of a simulated worker."""
_LENGTH = {"max_tokens": _NUM_TOKENS, "ignore_eos": True}
WORKER = {"time_scale": 1.0, "num_gpu_blocks": 512}
_ROUNDS = 3
"""Another process may take the machine away in any of them: the first that is explained counts."""
Ask = Callable[[tuple[str, ...], str], Any]


def _trace(otlp: OtlpReceiver, request_id: str) -> ReceivedTrace:
    """The trace of the call with that id."""
    return next(
        trace
        for trace in otlp.traces().values()
        if any(span.kind == "SERVER" and span.attributes.get(names.REQUEST_ID) == request_id for span in trace.spans)
    )


def _reasons(trace: ReceivedTrace) -> list[str]:
    return [event.name for span in trace.named("gateway.queue") for event in span.events]


def _check(otlp: OtlpReceiver, request_ids: list[str]) -> list[ReceivedTrace]:
    """The traces; the best of them leaves little unexplained, and the page knows every name."""
    traces = [_trace(otlp, request_id) for request_id in request_ids]
    best = min(traces, key=unexplained_share)
    [root] = best.roots
    told = [((start - root.start_ns) / 1e6, (end - start) / 1e6) for start, end in gaps(best)]
    assert unexplained_share(best) < MOST, (told, root.duration_s)
    assert undocumented(otlp.spans()) == []
    return traces


async def _generate(doors: tuple[str, ...], request_id: str) -> None:
    stop = pb.StopConditions(max_tokens=_NUM_TOKENS, ignore_eos=True)
    request = pb.GenerateRequest(text="word " * 600, stop=stop)
    async with grpc.aio.insecure_channel(doors[0]) as channel:
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        await stub.Generate(request, timeout=60, metadata=(("x-request-id", request_id),))


async def _chat_stream(doors: tuple[str, ...], request_id: str) -> None:
    stop = pb.StopConditions(max_tokens=_NUM_TOKENS, ignore_eos=True)
    request = pb.ChatRequest(messages=[pb.Message(role="user", content="word " * 600)], stop=stop)
    async with grpc.aio.insecure_channel(doors[0]) as channel:
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        async for _ in stub.ChatStream(request, timeout=60, metadata=(("x-request-id", request_id),)):
            pass


async def _complete_over_http(doors: tuple[str, ...], request_id: str) -> None:
    await post(doors, request_id, "completions", prompt="word " * 600, **_LENGTH)


async def _chat_over_http(doors: tuple[str, ...], request_id: str) -> None:
    turns = [{"role": "developer", "content": "be short"}, {"role": "user", "content": "word " * 600}]
    await post(doors, request_id, "chat/completions", messages=turns, stream=True, **_LENGTH)


ASKS = [_generate, _chat_stream, _complete_over_http, _chat_over_http]


def test_ordinary_requests(otlp: OtlpReceiver, monkeypatch: pytest.MonkeyPatch) -> None:
    """A long prompt at either door, with and without template."""

    @run_async
    async def scenario(asked: dict[str, Ask]) -> None:
        async with (
            worker(**WORKER) as (worker_address,),
            scheduler(worker_address) as (address, _),
            gateway(address) as doors,
        ):
            await post(doors, "warm", "completions", prompt="a", max_tokens=1)
            await asyncio.gather(*(ask(doors, request_id) for request_id, ask in asked.items()))

    unexplained = list(ASKS)
    for attempt in range(_ROUNDS):
        asked = {f"{ask.__name__}-{attempt}": ask for ask in unexplained}
        with exporting(otlp, monkeypatch):
            scenario(asked)
        unexplained = []
        for request_id, ask in asked.items():
            trace = _trace(otlp, request_id)
            told = [event.name for span in trace.spans for event in span.events]
            assert {"parsed", "tokenized", "submitted", "completed"} <= set(told)
            assert ("templated" in told) == (ask in (_chat_stream, _chat_over_http))
            assert ("received" in told) == (ask in (_complete_over_http, _chat_over_http))
            assert not trace.named("gateway.queue"), "it waited for nothing"
            if unexplained_share(trace) >= MOST and attempt < _ROUNDS - 1:
                unexplained.append(ask)
            else:
                _check(otlp, [request_id])


def test_requests_before_the_model_is_loaded(otlp: OtlpReceiver, monkeypatch: pytest.MonkeyPatch) -> None:
    """NO_MODEL at the gateway, with what the scheduler says of it; one at each door, with and without template."""

    @run_async
    async def scenario() -> None:
        with ports.reserved("127.0.0.1", {"--port": 0}) as chosen:
            async with scheduler(f"127.0.0.1:{chosen['--port']}") as (address, _), gateway(address) as doors:
                asked = [asyncio.create_task(ask(doors, ask.__name__)) for ask in ASKS]
                async with worker(port=chosen["--port"], load_s=1.5, **WORKER):
                    await asyncio.gather(*asked)

    with exporting(otlp, monkeypatch):
        scenario()
    for ask in ASKS:
        [trace] = _check(otlp, [ask.__name__])
        assert set(_reasons(trace)) <= {"NO_MODEL", "SCHEDULER_AWAY"} and "NO_MODEL" in _reasons(trace)
        waits = trace.named("gateway.queue")
        assert sum(span.duration_s for span in waits) > 1.0
        assert all(event.attributes["quire.why"] for span in waits for event in span.events)


def test_a_request_before_the_scheduler_is_there(otlp: OtlpReceiver, monkeypatch: pytest.MonkeyPatch) -> None:
    """SCHEDULER_AWAY first, until it can be reached."""

    @run_async
    async def scenario() -> None:
        with ports.reserved("127.0.0.1", {"--port": 0}) as chosen:
            async with (
                worker(num_gpu_blocks=512) as (worker_address,),
                gateway(f"127.0.0.1:{chosen['--port']}") as doors,
            ):
                asked = asyncio.create_task(_generate(doors, "early"))
                await asyncio.sleep(1.0)  # what it has to explain
                async with scheduler(worker_address, port=chosen["--port"]):
                    await asked

    with exporting(otlp, monkeypatch):
        scenario()
    [trace] = _check(otlp, ["early"])
    assert _reasons(trace)[0] == "SCHEDULER_AWAY"


async def _follow(doors: tuple[str, ...], request_id: str, reached: asyncio.Event) -> None:
    """Sets `reached` when a third of the tokens are there."""
    stop = pb.StopConditions(max_tokens=3 * _NUM_TOKENS, ignore_eos=True)
    request, num_tokens = pb.GenerateRequest(text="word " * 600, stop=stop), 0
    async with grpc.aio.insecure_channel(doors[0]) as channel:
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        async for event in stub.GenerateStream(request, timeout=100, metadata=(("x-request-id", request_id),)):
            num_tokens += len(event.delta.token_ids)
            if num_tokens >= _NUM_TOKENS:
                reached.set()


@contextlib.contextmanager
def _scheduler_process(port: int, worker_address: str) -> Iterator[ServiceProcess]:
    """One that can be killed."""
    listeners = ("--port", str(port), "--admin-port", "0", "--metrics-port", "0")
    arguments = ["scheduler", *listeners, "--worker", worker_address, "--force-ownership"]
    process = ServiceProcess("scheduler", arguments, environ=os.environ, on_line=ignore_line)
    try:
        yield process
    finally:
        process.kill()
        process.wait(10)


def test_a_request_whose_scheduler_is_killed(otlp: OtlpReceiver, monkeypatch: pytest.MonkeyPatch) -> None:
    """The time at the one that died is a span of the gateway's, as is the time until the next one can be reached."""

    @run_async
    async def scenario() -> None:
        with ports.reserved("127.0.0.1", {"--port": 0}) as chosen:
            port = chosen["--port"]
            async with worker(**WORKER) as (worker_address,), gateway(f"127.0.0.1:{port}") as doors:
                reached = asyncio.Event()
                with _scheduler_process(port, worker_address):
                    asked = asyncio.create_task(_follow(doors, "survivor", reached))
                    await asyncio.wait(
                        {asked, asyncio.create_task(reached.wait())}, return_when=asyncio.FIRST_COMPLETED
                    )
                with _scheduler_process(port, worker_address):
                    await asked

    with exporting(otlp, monkeypatch):
        scenario()
    [trace] = _check(otlp, ["survivor"])
    [lost] = trace.named("gateway.lost")
    assert lost.attributes[names.OUTPUT_TOKENS] >= _NUM_TOKENS
    waited = [
        event.name for span in trace.named("gateway.queue") if span.start_ns >= lost.start_ns for event in span.events
    ]
    assert waited and set(waited) == {"SCHEDULER_AWAY"}
