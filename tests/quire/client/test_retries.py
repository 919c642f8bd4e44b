"""When clients try again, and how a stream goes on at another gateway: nothing is lost, repeated or asked for twice in vain."""

import asyncio
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent import futures
from typing import Any

import grpc
import pytest

from protos.common.v1 import common_pb2
from protos.inference.v1 import inference_pb2 as pb
from protos.inference.v1 import inference_pb2_grpc
from quire import NO_RETRIES, AsyncClient, Client, RequestOptions, RetryPolicy
from quire.client.calls import GATEWAY, typed_errors
from quire.client.connections import Gateways
from quire.client.retrying import Attempts, moves_on
from svc_common.errors import Cancelled, InvalidArgument, QuireError, ResourceExhausted, Unavailable

WORDS = [" one", " two", " three", " four", " five", " six"]
FAST = RetryPolicy(max_attempts=4, first_pause_s=0.001)
FULL = ResourceExhausted("full", reason="QUEUE_FULL", retry_after_s=0.01)
GONE = Unavailable("gone")


class _Gateway(inference_pb2_grpc.InferenceServiceServicer):
    """A real gRPC server that generates WORDS, a token each, and loses its connections after `breaks_after` of them."""

    def __init__(self, breaks_after: int = 99, refusals: int = 0) -> None:
        self.calls: list[tuple[str, Any, Mapping[str, str]]] = []
        self._breaks_after = breaks_after
        self._refusals = refusals
        self._server = grpc.server(futures.ThreadPoolExecutor(4))
        inference_pb2_grpc.add_InferenceServiceServicer_to_server(self, self._server)
        self.address = f"127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"
        self._server.start()

    def close(self) -> None:
        """Ends it."""
        self._server.stop(None).wait()

    def GenerateStream(self, request: pb.GenerateRequest, context: grpc.ServicerContext) -> Iterator[pb.GenerateEvent]:
        self._note("GenerateStream", request, context)
        yield from self._events(0, context)

    def Resume(self, request: pb.ResumeRequest, context: grpc.ServicerContext) -> Iterator[pb.GenerateEvent]:
        self._note("Resume", request, context)
        yield from self._events(request.positions[0].token_offset, context)

    def Generate(self, request: pb.GenerateRequest, context: grpc.ServicerContext) -> pb.GenerateResponse:
        self._note("Generate", request, context)
        if len(self.calls) <= self._refusals:
            context.abort(grpc.StatusCode.UNAVAILABLE, "connection reset")
        return pb.GenerateResponse(request_id="r", choices=[pb.Choice(text="".join(WORDS))])

    def Cancel(self, request: pb.CancelRequest, context: grpc.ServicerContext) -> pb.CancelResponse:
        self._note("Cancel", request, context)
        return pb.CancelResponse()

    def _note(self, method: str, request: Any, context: grpc.ServicerContext) -> None:
        self.calls.append((method, request, dict(context.invocation_metadata())))

    def _events(self, first: int, context: grpc.ServicerContext) -> Iterator[pb.GenerateEvent]:
        yield pb.GenerateEvent(started=pb.Started(request_id="r-1"))
        for offset in range(first, len(WORDS)):
            if offset - first == self._breaks_after:
                context.abort(grpc.StatusCode.UNAVAILABLE, "connection reset")
            yield pb.GenerateEvent(delta=pb.Delta(text=WORDS[offset], token_ids=[offset], token_offset=offset))
        end = pb.Finished(reason=common_pb2.FINISH_REASON_STOP)
        yield pb.GenerateEvent(finished=end)
        yield pb.GenerateEvent(usage=pb.Usage(completion_tokens=len(WORDS)))


@pytest.fixture
def gateway() -> Iterator[Callable[..., _Gateway]]:
    """Makes gateways and ends them."""
    made: list[_Gateway] = []

    def make(**how: int) -> _Gateway:
        made.append(_Gateway(**how))
        return made[-1]

    yield make
    for one in made:
        one.close()


@pytest.mark.parametrize(
    ("error", "pause_s"),
    [
        (FULL, 0.01),
        (ResourceExhausted("quota", reason="TENANT_QUOTA", retry_after_s=99.0), None),  # too long to wait for
        (ResourceExhausted("slow", reason="SLOW_READER"), None),
        (Unavailable("no model", reason="NO_MODEL", retry_after_s=1.0), None),  # a gateway has waited for it already
        (InvalidArgument("no", reason="INVALID_FIELD"), None),
    ],
)
def test_what_passes_is_waited_for(error: QuireError, pause_s: float | None) -> None:
    """A server's own time where it gives one; mistakes and final answers are not repeated."""
    assert RetryPolicy().pause_s(error, 1) == pause_s


def test_pauses_grow_and_end() -> None:
    """Up to the last attempt, within the deadline."""
    policy = RetryPolicy(max_attempts=3, first_pause_s=1.0)
    pauses = [policy.pause_s(GONE, attempt) for attempt in (1, 2, 3)]
    assert pauses[0] is not None and 0.5 <= pauses[0] <= 1.0
    assert pauses[1] is not None and 1.0 <= pauses[1] <= 2.0
    assert pauses[2] is None
    assert NO_RETRIES.pause_s(GONE, 1) is None
    attempts = Attempts(Gateways("a:1", lambda target: None), policy, 0.1)
    attempts.begin()
    assert attempts.pause_s(GONE) is None


def test_a_gateway_that_is_gone_is_left() -> None:
    """For all calls of the client, once; a refused address is skipped by all."""
    gateways = Gateways("a:1,b:2", lambda target: None)
    first, second = (Attempts(gateways, FAST, None) for _ in range(2))
    assert (first.begin(), second.begin()) == ("a:1", "a:1")
    first.pause_s(GONE)
    second.pause_s(GONE)
    assert first.begin() == "b:2"
    first.pause_s(FULL)
    assert first.begin() == "b:2"


def test_another_gateway_is_asked_at_once() -> None:
    """A lost one costs neither a pause nor an attempt while there is one that has not been tried; NO_RETRIES asks no other."""
    attempts = Attempts(Gateways("a:1, b:2,c:3", lambda target: None), RetryPolicy(max_attempts=2), None)
    asked, pauses = [], []
    while not pauses or pauses[-1] is not None:
        asked.append(attempts.begin())
        pauses.append(attempts.pause_s(GONE))
    assert asked == ["a:1", "b:2", "c:3", "a:1", "b:2", "c:3"]
    assert [pauses[i] for i in (0, 1, 3, 4)] == [0.0] * 4 and pauses[2]
    assert Attempts(Gateways("a:1,b:2", lambda target: None), NO_RETRIES, None).pause_s(GONE) is None


def test_threads_share_a_channel() -> None:
    """A client of several threads makes one channel to a gateway, and closes it."""
    made: list[grpc.Channel] = []

    def make(target: str) -> grpc.Channel:
        time.sleep(0.02)
        made.append(grpc.insecure_channel(target))
        return made[-1]

    gateways = Gateways("127.0.0.1:1", make)
    with futures.ThreadPoolExecutor(8) as threads:
        stubs = set(threads.map(gateways.stub, ["127.0.0.1:1"] * 8))
    assert len(made) == len(stubs) == len(gateways.channels()) == 1
    made[0].close()


def test_a_unary_call_is_sent_again_under_its_key(gateway: Callable[..., _Gateway]) -> None:
    """The id is the idempotency key, so that nothing is generated twice."""
    one, other = gateway(refusals=1), gateway()
    with Client(f"{one.address},{other.address}", retries=FAST) as client:
        assert client.generate("x").text == "".join(WORDS)
    keys = [metadata["idempotency-key"] for _, _, metadata in (*one.calls, *other.calls)]
    assert len(keys) == 2 and len(set(keys)) == 1
    assert one.calls[0][1].resumable


def test_a_stream_goes_on_at_another_gateway(gateway: Callable[..., _Gateway]) -> None:
    """Each token once, in order, from whichever gateway; Resume says what is here already."""
    one, other = gateway(breaks_after=2), gateway(breaks_after=3)
    with Client(f"{one.address},{other.address}", retries=FAST) as client:
        deltas = list(stream := client.generate_stream("x"))
    assert [delta.token_offset for delta in deltas] == list(range(len(WORDS)))
    assert (stream.result.text, stream.result.outputs[0].finish_reason) == ("".join(WORDS), "stop")
    resumes = [request for _, request, _ in (*other.calls, *one.calls[1:])]
    assert [request.positions[0].token_offset for request in resumes] == [2, 5]
    assert {request.request_id for request in resumes} == {"r-1"}


def test_asyncio_streams_go_on_too(gateway: Callable[..., _Gateway]) -> None:
    """The same for AsyncClient."""
    one, other = gateway(breaks_after=4), gateway()

    async def read() -> str:
        async with AsyncClient(f"{one.address},{other.address}", retries=FAST) as client:
            return (await client.generate_stream("x").read()).text

    assert asyncio.run(read()) == "".join(WORDS)


def test_a_stream_that_is_not_resumable_breaks(gateway: Callable[..., _Gateway]) -> None:
    """One gateway, no wish: the loss is an error, as what came before cannot be matched with a second generation."""
    broken = gateway(breaks_after=2)
    with Client(broken.address, retries=FAST) as client, pytest.raises(Unavailable):
        client.generate_stream("x").read()
    assert len(broken.calls) == 1


def test_leaving_a_resumable_stream_cancels_it(gateway: Callable[..., _Gateway]) -> None:
    """Dropping the call alone would keep it for a returning reader."""
    one = gateway()
    with Client(one.address) as client:
        for _ in client.generate_stream("x", options=RequestOptions(resumable=True)):
            break
    assert ("Cancel", "r-1") in [(method, request.request_id) for method, request, _ in one.calls if method == "Cancel"]


def test_cancelling_between_two_attempts_ends_a_stream(gateway: Callable[..., _Gateway]) -> None:
    """From another thread, while it waits to go on: it is not opened again."""
    broken = gateway(breaks_after=2)
    slow = RetryPolicy(first_pause_s=1.5)
    with Client(broken.address, retries=slow) as client, futures.ThreadPoolExecutor(1) as threads:
        stream = client.generate_stream("x", options=RequestOptions(resumable=True))
        reading = threads.submit(stream.read)
        while not stream.result.outputs[0].token_ids[1:]:
            time.sleep(0.01)
        time.sleep(0.05)
        stream.cancel()
        with pytest.raises(Cancelled):
            reading.result()
    assert [method for method, _, _ in broken.calls] == ["GenerateStream", "Cancel"]


def test_a_torn_connection_is_no_bug_of_the_server() -> None:
    """gRPC calls a reset stream INTERNAL; a server's INTERNAL has our details."""
    torn = _TransportError("Received RST_STREAM with error code 2")
    with pytest.raises(Unavailable) as found, typed_errors("a:1", GATEWAY):
        raise torn
    assert moves_on(found.value)


class _TransportError(grpc.RpcError):
    """As gRPC raises it, without a status of ours."""

    def __init__(self, said: str) -> None:
        self._said = said

    def code(self) -> grpc.StatusCode:
        return grpc.StatusCode.INTERNAL

    def details(self) -> str:
        return self._said


def test_a_call_that_was_interrupted_leaves_its_channel_behind() -> None:
    """Ctrl-C may have struck inside gRPC's bookkeeping: later calls do not wait on that channel; both are closed in the end."""
    gateways = Gateways("127.0.0.1:1", grpc.insecure_channel)
    before = gateways.stub("127.0.0.1:1")
    assert gateways.stub("127.0.0.1:1") is before
    gateways.renew("127.0.0.1:1")
    gateways.renew("127.0.0.1:1")
    assert gateways.stub("127.0.0.1:1") is not before
    assert len(gateways.channels()) == 2
    for channel in gateways.channels():
        channel.close()
