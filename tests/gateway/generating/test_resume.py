"""Resume and idempotent calls: two real gateways over a real scheduler with a simulated worker, all in this process."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass
from typing import Any

import grpc.aio
import httpx
import pytest

from protos.inference.v1 import inference_pb2 as pb
from svc_common.errors import QuireError
from svc_common.net import rpc
from tests.support.services.harness import Admin, scheduler, worker
from tests.support.services.reading import Read
from tests.support.services.scripted_engine import PATIENCE_S, TEST_TIMEOUT_S, Gateway, asynchronous, gateway

pytestmark = pytest.mark.processes

SLOW = {"time_scale": 0.4, "num_gpu_blocks": 512}
TEXT = "the quick brown fox jumps over the lazy dog"


@dataclass
class Pair:
    """Two gateways of one scheduler."""

    one: Gateway
    two: Gateway
    admin: Admin

    async def num_running(self) -> int:
        """Sequences that hold blocks."""
        return len((await self.admin.blocks()).tables)

    async def settles(self, num_running: int) -> None:
        """Waits until so many sequences hold blocks."""
        async with asyncio.timeout(PATIENCE_S):
            while await self.num_running() != num_running:
                await asyncio.sleep(0.01)


@contextlib.asynccontextmanager
async def pair(worker_values: dict[str, Any] | None = None, **values: Any) -> AsyncIterator[Pair]:
    async with (
        worker(**(worker_values or SLOW)) as (worker_address,),
        scheduler(worker_address, **values) as (address, admin_address),
        Admin(admin_address) as admin,
        gateway(address) as one,
        gateway(address) as two,
    ):
        for running in (one, two):
            await running.stub.Generate(request(max_tokens=1), timeout=20)
        yield Pair(one, two, admin)


@pytest.fixture(scope="module")
def shared() -> Iterator[Callable[[Callable[[Pair], Awaitable[None]]], None]]:
    """One life of everything for tests that leave it as it was; takes one of them."""
    with asyncio.Runner() as runner:
        life = pair()
        everything = runner.run(life.__aenter__())
        try:
            yield lambda test: runner.run(asyncio.wait_for(test(everything), TEST_TIMEOUT_S))
        finally:
            runner.run(life.__aexit__(None, None, None))


def in_shared_life(test: Callable[[Pair], Awaitable[None]]) -> Callable[..., None]:
    """A test of `shared`."""

    def run(shared: Callable[[Callable[[Pair], Awaitable[None]]], None]) -> None:
        shared(test)

    run.__doc__ = test.__doc__
    return run


def request(*, max_tokens: int = 80, resumable: bool = False, text: str = TEXT, **sampling: Any) -> pb.GenerateRequest:
    made = pb.GenerateRequest(text=text, sampling=pb.SamplingParams(**sampling), resumable=resumable)
    made.stop.max_tokens, made.stop.ignore_eos = max_tokens, True
    return made


async def follow(read: Read, call: Any, *, until: int | None = None) -> Read:
    """Reads until the stream's end or until so many tokens have come."""
    async for event in call:
        read.take(event)
        if until is not None and read.num_tokens >= until:
            break
    return read


async def failure(call: Any) -> QuireError:
    with pytest.raises(grpc.aio.AioRpcError) as error:
        async for _ in call:
            pass
    return rpc.from_rpc_error(error.value)


def resume(running: Gateway, request_id: str, read: Read | None = None) -> Any:
    positions = [] if read is None else read.positions()
    return running.stub.Resume(pb.ResumeRequest(request_id=request_id, positions=positions), timeout=20)


def stream(running: Gateway, wanted: pb.GenerateRequest, **metadata: str) -> Any:
    return running.stub.GenerateStream(
        wanted, timeout=20, metadata=[(k.replace("_", "-"), v) for k, v in metadata.items()]
    )


def full_options() -> pb.GenerateRequest:
    wanted = request(max_tokens=40, resumable=True, n=3, seed=5, temperature=1.0)
    wanted.response.num_top_logprobs, wanted.response.num_prompt_logprobs = 2, 1
    return wanted


@in_shared_life
async def test_the_rest_from_another_gateway(p: Pair) -> None:
    """The reader drops the stream, resumes elsewhere, drops, resumes where it began: the same as undisturbed.

    n = 3, with log probabilities of outputs and prompt; what is read twice is never computed twice.
    """
    expected = (await follow(Read(), stream(p.one, full_options()))).whole()
    read = Read()
    call = stream(p.one, full_options(), x_request_id="r")
    await follow(read, call, until=15)
    call.cancel()
    await follow(read, call := resume(p.two, "r", read), until=45)
    call.cancel()
    await follow(read, resume(p.one, "r", read))
    assert read.whole() == expected
    assert [s.effective_seed for s in read.started] == [5, 5, 5] and {s.request_id for s in read.started} == {"r"}
    again = await follow(Read(), resume(p.two, "r"))
    assert again.whole() == expected, "an ended request is kept and can be read whole"
    await p.settles(0)


@in_shared_life
async def test_stop_strings_are_found_again(p: Pair) -> None:
    """Text is a function of tokens: a stop string over several, found by a reader that is gone, ends the next one's text too."""
    plain = await follow(Read(), stream(p.one, request(seed=3, max_tokens=60)))
    wanted = request(seed=3, max_tokens=60, resumable=True)
    wanted.stop.stop_strings.append(plain.text[24:29])
    expected = await follow(Read(), stream(p.one, wanted, x_request_id="first"))
    assert expected.ends[0].stop_string and len(expected.ids[0]) <= 24
    for until in (1, 12, len(expected.ids[0])):
        read = Read()
        call = stream(p.one, wanted, x_request_id=f"stop{until}")
        await follow(read, call, until=until)
        call.cancel()
        await asyncio.sleep(0.05)
        assert (await follow(read, resume(p.two, f"stop{until}", read))).whole() == expected.whole()
    assert (await follow(Read(), resume(p.two, "first"))).whole() == expected.whole()


@in_shared_life
async def test_only_one_reads(p: Pair) -> None:
    """The former reader, at the same gateway or at another, gets ABORTED with ATTACHED_ELSEWHERE; Cancel by id ends it for all."""
    for other in (p.one, p.two):
        first = stream(p.one, request(resumable=True, max_tokens=900), x_request_id=f"r{id(other)}")
        await follow(Read(), first, until=3)
        second = resume(other, f"r{id(other)}")
        await follow(Read(), second, until=9)
        lost = await failure(first)
        assert (lost.status, lost.reason) == ("ABORTED", "ATTACHED_ELSEWHERE")
        await p.one.stub.Cancel(pb.CancelRequest(request_id=f"r{id(other)}"), timeout=10)
        assert (await failure(second)).status == "CANCELLED"
        await p.settles(0)
        assert (await failure(resume(p.two, f"r{id(other)}"))).status == "CANCELLED"


@in_shared_life
async def test_what_cannot_be_resumed(p: Pair) -> None:
    """Unknown ids, requests that are not resumable; positions that cannot be, each named."""
    plain = stream(p.one, request(max_tokens=900), x_request_id="plain")
    await follow(Read(), plain, until=1)
    kept = stream(p.one, request(resumable=True, max_tokens=3, n=2), x_request_id="kept")
    await follow(Read(), kept)
    for request_id in ("plain", "nobody"):
        for running in (p.one, p.two):
            error = await failure(resume(running, request_id))
            assert (error.status, error.reason) == ("NOT_FOUND", "RESUME_EXPIRED")
    assert (await failure(resume(p.two, ""))).violations[0].field == "request_id"
    for choice, offset, status, name in (
        (0, 4, "OUT_OF_RANGE", "token_offset"),
        (2, 0, "INVALID_ARGUMENT", "choice"),
        (1, 2, "INVALID_ARGUMENT", "choice"),
    ):
        positions = [pb.ChoicePosition(choice=1), pb.ChoicePosition(choice=choice, token_offset=offset)]
        asked = pb.ResumeRequest(request_id="kept", positions=positions)
        error = await failure(p.two.stub.Resume(asked, timeout=20))
        assert (error.status, error.violations[0].field) == (status, f"positions[1].{name}")
    assert len((await follow(Read(), resume(p.one, "kept"))).ids) == 2, "a refused reader takes nothing away"
    plain.cancel()
    await p.settles(0)


@asynchronous
async def test_a_dropped_stream_is_held_for_the_grace_time() -> None:
    """Resumable: it continues without a reader and ends if none returns; others end with their reader."""
    async with pair({**SLOW, "time_scale": 2.5}, frontend_grace_s=1.0) as p:
        call = stream(p.one, request(resumable=True, max_tokens=3000), x_request_id="r")
        await follow(Read(), call, until=2)
        call.cancel()
        await asyncio.sleep(0.2)
        assert await p.num_running() == 1
        again = resume(p.two, "r")
        await follow(Read(), again, until=20)
        await asyncio.sleep(1.0)
        assert await p.num_running() == 1, "read again, it is not ended when the first grace time is over"
        again.cancel()
        await p.settles(0)
        error = await failure(resume(p.two, "r"))
        assert (error.status, error.reason) == ("NOT_FOUND", "RESUME_EXPIRED")
        call = stream(p.one, request(max_tokens=3000))
        await follow(Read(), call, until=2)
        call.cancel()
        await p.settles(0)


@asynchronous
async def test_a_gateway_that_stops_leaves_its_resumable_requests_to_others() -> None:
    """A rolling restart: the stream ends with UNAVAILABLE, the rest comes from the other gateway."""
    async with pair() as p:
        expected = (await follow(Read(), stream(p.one, request(seed=1, max_tokens=60)))).whole()
        read = Read()
        call = stream(p.one, request(seed=1, max_tokens=60, resumable=True), x_request_id="r")
        await follow(read, call, until=10)
        p.one.stop.set()
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await follow(read, call)
        assert rpc.from_rpc_error(error.value).status == "UNAVAILABLE"
        assert (await follow(read, resume(p.two, "r", read))).whole() == expected


# --- idempotent calls --------------------------------------------------------------------------------------------------


@in_shared_life
async def test_a_key_generates_once(p: Pair) -> None:
    """A second call with the key gets the first one's request from its beginning, its seed too, at both gateways; no step more."""
    key = (("idempotency-key", "k1"),)
    first = await p.one.stub.Generate(request(temperature=1.0), timeout=20, metadata=key)
    num_steps = len(await p.admin.steps())
    for running in (p.one, p.two):
        again = await running.stub.Generate(request(temperature=1.0), timeout=20, metadata=key)
        assert again.request_id == "k1" and again.effective_seed == first.effective_seed
        assert again.choices == first.choices
    assert len(await p.admin.steps()) == num_steps


@in_shared_life
async def test_a_key_counts_before_an_id(p: Pair) -> None:
    """Proxies give each call an id of its own; a repeated call is the same request all the same. A bad key is named."""
    answers = []
    for request_id in ("of-one-call", "of-another"):
        metadata = (("idempotency-key", "both"), ("x-request-id", request_id))
        answers.append(await p.one.stub.Generate(request(max_tokens=3, temperature=1.0), timeout=20, metadata=metadata))
    assert [answer.request_id for answer in answers] == ["both", "both"]
    assert answers[0].choices == answers[1].choices
    error = await failure(stream(p.one, request(), idempotency_key="no key", x_request_id="fine"))
    assert (error.status, error.violations[0].field) == ("INVALID_ARGUMENT", "idempotency-key")


@in_shared_life
async def test_a_key_while_it_runs(p: Pair) -> None:
    """The second call takes the running request over; the first is told; streams of both kinds, both gateways."""
    for i, other in enumerate((p.one, p.two)):
        first = stream(p.one, request(temperature=1.0), idempotency_key=f"run{i}")
        read = await follow(Read(), first, until=5)
        again = await follow(Read(), stream(other, request(temperature=1.0), idempotency_key=f"run{i}"))
        assert again.ids[0][:5] == read.ids[0][:5] and len(again.ids[0]) == 80
        assert again.started[0].effective_seed == read.started[0].effective_seed
        assert (await failure(first)).reason == "ATTACHED_ELSEWHERE"


@in_shared_life
async def test_a_key_for_something_else(p: Pair) -> None:
    """Another prompt under a key that is in use: ALREADY_EXISTS at both gateways, and the first call goes on."""
    first = stream(p.one, request(), idempotency_key="else")
    read = await follow(Read(), first, until=5)
    for running in (p.one, p.two):
        error = await failure(stream(running, request(text="something else"), idempotency_key="else"))
        assert (error.status, error.reason) == ("ALREADY_EXISTS", "REQUEST_ID_IN_USE")
    other = stream(p.one, request(text="something else"), x_request_id="else")
    assert (await failure(other)).reason == "REQUEST_ID_IN_USE"
    async for event in first:
        read.take(event)
    assert len(read.ids[0]) == 80


@in_shared_life
async def test_a_key_whose_call_failed_is_free(p: Pair) -> None:
    """A deadline ended the first call: the retry is a new attempt, not the old failure again."""
    key = (("idempotency-key", "late"),)
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await p.one.stub.Generate(request(max_tokens=3000), timeout=0.4, metadata=key)
    assert rpc.from_rpc_error(error.value).status == "DEADLINE_EXCEEDED"
    await p.settles(0)
    answer = await p.two.stub.Generate(request(max_tokens=5), timeout=20, metadata=key)
    assert len(answer.choices[0].token_ids) == 5


@in_shared_life
async def test_a_key_over_http(p: Pair) -> None:
    """The other door: the client goes away in the middle and asks again at the other gateway; vectors too."""
    async with httpx.AsyncClient(headers={"idempotency-key": "h"}) as client:
        body = {"model": "simulated", "prompt": TEXT, "max_tokens": 60, "temperature": 1.0}
        with pytest.raises(httpx.ReadTimeout):
            await client.post(f"http://{p.one.http}/v1/completions", json=body, timeout=0.1)
        answers = [
            (await client.post(f"http://{running.http}/v1/completions", json=body, timeout=20)).json()
            for running in (p.two, p.one)
        ]
        assert answers[0]["id"] == answers[1]["id"] and answers[0]["choices"] == answers[1]["choices"]
        assert answers[0]["usage"]["completion_tokens"] == 60
        headers, body = {"idempotency-key": "e"}, {"model": "simulated", "input": TEXT}
        vectors = [
            (await client.post(f"http://{running.http}/v1/embeddings", json=body, headers=headers, timeout=20)).json()
            for running in (p.two, p.one)
        ]
        assert vectors[0]["data"] == vectors[1]["data"] and vectors[0]["data"]
