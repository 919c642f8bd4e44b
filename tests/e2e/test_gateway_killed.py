"""The gateway that serves resumable streams is killed; their readers get the rest from another one."""

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import pytest

from protos.inference.v1 import inference_pb2 as pb
from protos.inference.v1 import inference_pb2_grpc
from tests.support.services.reading import Read
from tests.support.stack.kill_requests import SCHEMA
from tests.support.stack.supervised import Readings, Supervised, gateway_of, is_serving

Record = Callable[[str, object], None]
AnyRequest = pb.GenerateRequest | pb.ChatRequest
WEATHER = pb.Tool(
    name="weather",
    description="What it is like outside.",
    parameters_json='{"type": "object", "properties": {"city": {"enum": ["Oslo", "Rome"]}}, "required": ["city"]}',
)


@pytest.fixture(scope="module")
def second(killable: Supervised) -> Iterator[str]:
    """Another gateway of the same scheduler: its gRPC door."""
    with gateway_of(killable.stack.options.environ, killable.stack.scheduler_address) as address:
        yield address


def requests() -> dict[str, AnyRequest]:
    """Completions and chats: plain, n = 3 with log probabilities, a stop string, min_tokens, penalties, a schema, tools."""
    made: dict[str, AnyRequest] = {
        "plain": pb.GenerateRequest(text="class Node:"),
        "three": pb.GenerateRequest(
            text="def main():",
            sampling=pb.SamplingParams(n=3, temperature=1.0),
            response=pb.ResponseOptions(num_top_logprobs=2, num_prompt_logprobs=1),
        ),
        "stop string": pb.GenerateRequest(text="import ", sampling=pb.SamplingParams(temperature=0.8)),
        "penalties": pb.GenerateRequest(
            text="try:\n", sampling=pb.SamplingParams(repetition_penalty=1.2, presence_penalty=0.4, temperature=0.9)
        ),
        "beams": pb.GenerateRequest(
            text="for i in range(", sampling=pb.SamplingParams(n=2, best_of=4, beam=pb.BeamSearch())
        ),
        "schema": pb.GenerateRequest(text="directions = "),
        "chat": pb.ChatRequest(messages=[pb.Message(role="user", content="Hello!")]),
        "tools": pb.ChatRequest(
            messages=[pb.Message(role="user", content="How is the weather?")],
            tools=[WEATHER],
            tool_choice=pb.ToolChoice(mode=pb.TOOL_MODE_REQUIRED),
        ),
    }
    for name, request in made.items():
        request.resumable = True
        request.sampling.seed = 7
        request.stop.max_tokens = 24 if name == "beams" else 80
        request.stop.ignore_eos = name not in ("schema", "tools")
    made["schema"].json_schema = str(SCHEMA).replace("'", '"')
    made["plain"].stop.min_tokens = 40
    return made


def call(address: str, request: AnyRequest | pb.ResumeRequest, request_id: str = "") -> tuple[grpc.Channel, Any]:
    """The stream of a request, and the channel to close."""
    channel = grpc.insecure_channel(address)
    stub = inference_pb2_grpc.InferenceServiceStub(channel)
    methods = {pb.GenerateRequest: stub.GenerateStream, pb.ChatRequest: stub.ChatStream, pb.ResumeRequest: stub.Resume}
    metadata = (("x-request-id", request_id),) if request_id else ()
    return channel, methods[type(request)](request, timeout=120, metadata=metadata)


def id_of(life: str, name: str) -> str:
    """Of the request of that name in one life."""
    return f"{life}-{name.replace(' ', '-')}"


def follow(readings: Readings, addresses: list[str], request_id: str, request: AnyRequest) -> tuple[Read, int]:
    """Reads a request to its end, at the next of the addresses whenever the one before is gone; from how many it was read."""
    read = Read()
    wanted: AnyRequest | pb.ResumeRequest = request
    for number, address in enumerate(addresses, start=1):
        channel, stream = call(address, wanted, request_id)
        try:
            for event in stream:
                before = read.num_tokens
                read.take(event)
                readings.add(read.num_tokens - before)
            return read, number
        except grpc.RpcError as error:
            assert error.code() is grpc.StatusCode.UNAVAILABLE, error
        finally:
            channel.close()
        wanted = pb.ResumeRequest(request_id=request_id, positions=read.positions())
    raise AssertionError(f"{request_id}: no gateway is left")


def follow_all(
    life: str,
    addresses: list[str],
    wanted: dict[str, AnyRequest],
    meanwhile: Callable[[Readings], None] = lambda _: None,
) -> dict[str, tuple[Read, int]]:
    """All of them at the same time."""
    readings = Readings()
    with ThreadPoolExecutor(len(wanted)) as threads:
        futures = {
            name: threads.submit(follow, readings, addresses, id_of(life, name), request)
            for name, request in wanted.items()
        }
        readings.futures = list(futures.values())
        meanwhile(readings)
        return {name: future.result() for name, future in futures.items()}


def test_the_rest_comes_from_another_gateway(killable: Supervised, second: str, record_property: Record) -> None:
    """kill -9 of the gateway under all kinds of streams, then of the scheduler under the same, resumed: as if nothing had been.

    What this scheduler has ended is read once more, from the beginning and at the gateway that came back: the same to the last
    tool call's id.
    """
    wanted, first = requests(), killable.stack.grpc_address
    plain = follow_all("plain", [second], {"stop string": wanted["stop string"]})["stop string"][0]
    wanted["stop string"].stop.stop_strings.append(plain.text[len(plain.text) // 2 :][:6])
    undisturbed = follow_all("undisturbed", [second], {name: of(request) for name, request in wanted.items()})
    assert undisturbed["stop string"][0].ends[0].stop_string and undisturbed["tools"][0].calls
    total = sum(read.num_tokens for read, _ in undisturbed.values())

    def kill(readings: Readings) -> None:
        readings.wait_for(total // 6)
        killable.kill("gateway")
        readings.wait_for(total // 2)
        killable.kill("scheduler")

    found = follow_all("killed", [first, second], wanted, kill)
    for name, (read, _) in found.items():
        assert read.whole(call_ids=False) == undisturbed[name][0].whole(call_ids=False), name
    num_resumed = sum(num_gateways == 2 for _, num_gateways in found.values())
    assert num_resumed >= len(wanted) // 2, "most were in flight"
    again = {name: reread(first, id_of("killed", name)) for name in wanted}
    known = {name: read for name, read in again.items() if read is not None}
    assert len(known) >= len(wanted) // 2
    for name, read in known.items():
        assert read.whole() == found[name][0].whole(), name
    record_property(
        "size",
        f"kill of a gateway, models/tiny: {num_resumed} streams resumed elsewhere, {total} tokens, 0 lost or changed",
    )


def of(request: AnyRequest) -> AnyRequest:
    """The same, not resumable: undisturbed calls need no detached requests."""
    made = type(request)()
    made.CopyFrom(request)
    made.resumable = False
    return made


def reread(address: str, request_id: str) -> Read | None:
    """An ended request, from its beginning; None where it ended in a life of the scheduler before."""
    read = Read()
    deadline = time.monotonic() + 30
    while not is_serving(address):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    channel, stream = call(address, pb.ResumeRequest(request_id=request_id))
    try:
        for event in stream:
            read.take(event)
    except grpc.RpcError as error:
        assert error.code() is grpc.StatusCode.NOT_FOUND, error
        return None
    finally:
        channel.close()
    return read
