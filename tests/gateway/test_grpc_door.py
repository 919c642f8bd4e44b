"""The gRPC door on a real stack: streams, text, models, bad input, cancels."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from typing import Any

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from protos.common.v1 import common_pb2
from protos.inference.v1 import admin_pb2, admin_pb2_grpc, inference_pb2_grpc
from protos.inference.v1 import inference_pb2 as pb
from svc_common.errors import InvalidArgument, NotFound, OutOfRange, QuireError
from svc_common.net import rpc
from tests.support.services.scripted_engine import asynchronous
from tests.support.services.served_stack import ServedStack

pytestmark = pytest.mark.processes

SERVICE = "/quire.inference.v1.InferenceService"
TIMEOUT_S = 20
FREE_WITHIN_S = 5.0


@contextlib.asynccontextmanager
async def stub_of(stack: ServedStack) -> AsyncIterator[Any]:
    async with grpc.aio.insecure_channel(stack.grpc_address) as channel:
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        stub.channel = channel
        yield stub


async def error_of(call: Any) -> QuireError:
    with pytest.raises(grpc.RpcError) as caught:
        if hasattr(call, "__await__"):
            await call
        else:
            [event async for event in call]
    return rpc.from_rpc_error(caught.value)


def generate(text: str = "hello", max_tokens: int = 8, **parts: Any) -> pb.GenerateRequest:
    parts.setdefault("sampling", pb.SamplingParams(seed=7))
    return pb.GenerateRequest(text=text, stop=pb.StopConditions(max_tokens=max_tokens), **parts)


# --- what works ------------------------------------------------------------------------------------------------------


@asynchronous
async def test_stream_and_unary_say_the_same(stack: ServedStack) -> None:
    """Equal seeds, equal outputs; the unary answer is the stream's pieces merged; Finished and one Usage last."""
    async with stub_of(stack) as stub:
        request = generate(max_tokens=20, response=pb.ResponseOptions(logprobs=True))
        whole = await stub.Generate(request, timeout=TIMEOUT_S)
        events = [event async for event in stub.GenerateStream(request, timeout=TIMEOUT_S)]
    deltas = [event.delta for event in events if event.HasField("delta")]
    assert [event.sequence for event in events] == list(range(len(events)))
    assert [event.WhichOneof("event") for event in events if not event.HasField("delta")] == [
        "started",
        "finished",
        "usage",
    ]
    choice = whole.choices[0]
    assert "".join(delta.text for delta in deltas) == choice.text
    assert [i for delta in deltas for i in delta.token_ids] == list(choice.token_ids)
    assert [p for delta in deltas for p in delta.logprobs] == list(choice.logprobs)
    assert len(choice.token_ids) == len(choice.logprobs) == events[-1].usage.completion_tokens == 20
    assert choice.finished.reason == common_pb2.FINISH_REASON_LENGTH
    assert (whole.effective_seed, events[0].started.effective_seed, whole.model) == (7, 7, "simulated")
    assert whole.usage.prompt_tokens == 5


@asynchronous
async def test_a_drawn_seed_is_told_and_repeats_the_output(stack: ServedStack) -> None:
    """inference.proto, SamplingParams.seed."""
    async with stub_of(stack) as stub:
        first = await stub.Generate(generate(sampling=pb.SamplingParams()), timeout=TIMEOUT_S)
        again = await stub.Generate(generate(sampling=pb.SamplingParams(seed=first.effective_seed)), timeout=TIMEOUT_S)
        other = await stub.Generate(generate(sampling=pb.SamplingParams()), timeout=TIMEOUT_S)
    assert again.choices[0].token_ids == first.choices[0].token_ids
    assert other.effective_seed != first.effective_seed


@asynchronous
async def test_a_stop_string_cuts_text_tokens_and_usage(stack: ServedStack) -> None:
    """Against the same request without it."""
    async with stub_of(stack) as stub:
        whole = (await stub.Generate(generate(max_tokens=60), timeout=TIMEOUT_S)).choices[0].text
        stop = whole[10:13]
        asked = generate()
        asked.stop.CopyFrom(pb.StopConditions(max_tokens=60, stop_strings=["never", stop]))
        answer = await stub.Generate(asked, timeout=TIMEOUT_S)
    expected = whole[: whole.index(stop)]
    assert answer.choices[0].text == expected
    assert (answer.choices[0].finished.stop_string, answer.usage.completion_tokens) == (stop, len(expected))


@asynchronous
async def test_chat_uses_the_template(stack: ServedStack) -> None:
    """The same as generating from the templated tokens."""
    messages = [pb.Message(role="user", content="hi"), pb.Message(role="assistant", content="ho")]
    sampling, stop = pb.SamplingParams(seed=3), pb.StopConditions(max_tokens=6)
    async with stub_of(stack) as stub:
        chat = await stub.Chat(pb.ChatRequest(messages=messages, sampling=sampling, stop=stop), timeout=TIMEOUT_S)
        tokens = (await stub.Tokenize(pb.TokenizeRequest(text="<|user|>hi\n<|assistant|>ho\n<|assistant|>"))).token_ids
        plain = pb.GenerateRequest(token_ids=pb.TokenIds(ids=tokens), sampling=sampling, stop=stop)
        assert (await stub.Generate(plain, timeout=TIMEOUT_S)).choices[0].token_ids == chat.choices[0].token_ids
        stream = stub.ChatStream(pb.ChatRequest(messages=messages, sampling=sampling, stop=stop), timeout=TIMEOUT_S)
        text = "".join([event.delta.text async for event in stream])
    assert text == chat.choices[0].text
    assert chat.usage.prompt_tokens == len(tokens)


@asynchronous
async def test_groups_beams_and_vectors(stack: ServedStack) -> None:
    """R25, R94: n choices of which the first is the one of n = 1; the best of several and beams come best first; vectors."""
    async with stub_of(stack) as stub:
        one = (await stub.Generate(generate(), timeout=TIMEOUT_S)).choices[0]
        several = await stub.Generate(generate(sampling=pb.SamplingParams(seed=7, n=4)), timeout=TIMEOUT_S)
        best = await stub.Generate(generate(sampling=pb.SamplingParams(seed=7, n=2, best_of=4)), timeout=TIMEOUT_S)
        width = pb.SamplingParams(n=3, best_of=4, beam=pb.BeamSearch())
        beams = await stub.Generate(generate(sampling=width), timeout=TIMEOUT_S)
        vectors = await stub.Embed(
            pb.EmbedRequest(inputs=[pb.EmbedInput(text="ab"), pb.EmbedInput(text="abc")]), timeout=TIMEOUT_S
        )
    assert several.choices[0].text == one.text
    assert len({choice.text for choice in several.choices}) == 4
    assert several.usage.completion_tokens == 32
    assert {choice.text for choice in best.choices} < {choice.text for choice in several.choices}
    for ranked in (best, beams):
        scores = [choice.finished.score for choice in ranked.choices]
        assert scores == sorted(scores, reverse=True)
        assert scores[0] > scores[-1]
    assert len(beams.choices) == len({choice.text for choice in beams.choices}) == 3
    for embedding, num_tokens in zip(vectors.embeddings, (2, 3), strict=True):
        assert embedding.prompt_tokens == num_tokens
        assert sum(value**2 for value in embedding.values) == pytest.approx(1)


@asynchronous
async def test_absent_max_tokens_means_up_to_the_context(stack: ServedStack) -> None:
    """Never a hidden 16."""
    async with stub_of(stack) as stub:
        request = pb.GenerateRequest(token_ids=pb.TokenIds(ids=[65] * 4060))
        answer = await stub.Generate(request, timeout=TIMEOUT_S)
    assert answer.usage.completion_tokens == 36


@asynchronous
async def test_text_and_models(stack: ServedStack) -> None:
    """Tokenize, Detokenize, ListModels, GetModel."""
    async with stub_of(stack) as stub:
        ids = (await stub.Tokenize(pb.TokenizeRequest(text="é😀"))).token_ids
        assert list(ids) == list("é😀".encode())
        assert (await stub.Detokenize(pb.DetokenizeRequest(token_ids=ids))).text == "é😀"
        assert (await stub.Detokenize(pb.DetokenizeRequest(token_ids=ids[:-1]))).text == "é\ufffd"
        (model,) = (await stub.ListModels(pb.ListModelsRequest())).models
        assert model == await stub.GetModel(pb.GetModelRequest(model="simulated"))
    assert (model.name, model.max_model_len, model.vocab_size, model.chat) == ("simulated", 4096, 320, True)
    assert model.default_sampling == pb.SamplingParams(
        temperature=1, top_p=1, top_k=0, min_p=0, repetition_penalty=1, n=1
    )


@asynchronous
async def test_metadata_goes_both_ways(stack: ServedStack) -> None:
    """x-request-id echoed or made; x-trace-id is the caller's trace; trailers tell the queue time."""
    trace_id = "0af7651916cd43dd8448eb211c80319c"
    sent = (("x-request-id", "abc-1"), ("traceparent", f"00-{trace_id}-b7ad6b7169203331-01"))
    async with stub_of(stack) as stub:
        unary = stub.Generate(generate(), timeout=TIMEOUT_S, metadata=sent)
        await unary
        stream = stub.GenerateStream(generate(), timeout=TIMEOUT_S, metadata=sent)
        await _text(stream)
        for call in (unary, stream):
            got = dict(await call.initial_metadata())
            assert (got["x-request-id"], got["x-trace-id"]) == ("abc-1", trace_id)
            assert set(dict(await call.trailing_metadata())) == {
                "x-queue-ms",
                "x-preemptions",
                "x-migrations",
                "x-worker-id",
            }
        unnamed = stub.Generate(generate(), timeout=TIMEOUT_S)
        await unnamed
        made = dict(await unnamed.initial_metadata())["x-request-id"]
    assert (len(made), made[14]) == (36, "7")


@asynchronous
async def test_health_and_reflection(stack: ServedStack) -> None:
    """grpc.health.v1 for "", the service and liveness; reflection names the service."""
    async with stub_of(stack) as stub:
        health = health_pb2_grpc.HealthStub(stub.channel)
        for name in ("", SERVICE[1:], "liveness"):
            answer = await health.Check(health_pb2.HealthCheckRequest(service=name))
            assert answer.status == health_pb2.HealthCheckResponse.SERVING
        reflection = reflection_pb2_grpc.ServerReflectionStub(stub.channel)
        call = reflection.ServerReflectionInfo(iter([reflection_pb2.ServerReflectionRequest(list_services="")]))
        names = {service.name async for answer in call for service in answer.list_services_response.service}
    assert {SERVICE[1:], "grpc.health.v1.Health"} <= names


# --- bad input -------------------------------------------------------------------------------------------------------

BAD = {
    "malformed protobuf": (b"\xff\xff\xff\xff", InvalidArgument, "request"),
    "invalid UTF-8": (b"\x12\x02\xff\xfe", InvalidArgument, "request"),
    "zero tokens": (pb.GenerateRequest(text=""), InvalidArgument, "text"),
    "no prompt": (pb.GenerateRequest(), InvalidArgument, "prompt"),
    "id outside the vocabulary": (
        pb.GenerateRequest(token_ids=pb.TokenIds(ids=[320])),
        InvalidArgument,
        "token_ids.ids[0]",
    ),
    "top_p": (generate(sampling=pb.SamplingParams(top_p=0)), InvalidArgument, "sampling.top_p"),
    "n": (generate(sampling=pb.SamplingParams(n=129)), InvalidArgument, "sampling.n"),
    "unknown model": (generate(model="nope"), NotFound, ""),
    "prompt too long": (generate("x" * 4096), OutOfRange, ""),
    "much too long": (generate("x" * 3_000_000), OutOfRange, ""),
}


@pytest.mark.parametrize("name", BAD)
@asynchronous
async def test_bad_input_is_typed_and_disturbs_no_other_call(stack: ServedStack, name: str) -> None:
    """The bad request gets its error through unary and stream; a request running meanwhile gives its usual output."""
    bad, kind, field = BAD[name]
    raw = bad if isinstance(bad, bytes) else bad.SerializeToString()
    async with stub_of(stack) as stub:
        usual = (await stub.Generate(generate(max_tokens=12), timeout=TIMEOUT_S)).choices[0]
        meanwhile = asyncio.ensure_future(_text(stub.GenerateStream(generate(max_tokens=12), timeout=TIMEOUT_S)))
        for call in (
            stub.channel.unary_unary(f"{SERVICE}/Generate")(raw, timeout=TIMEOUT_S),
            stub.channel.unary_stream(f"{SERVICE}/GenerateStream")(raw, timeout=TIMEOUT_S),
        ):
            error = await error_of(call)
            assert type(error) is kind
            assert [violation.field for violation in error.violations] == ([field] if field else [])
            assert error.metadata["request_id"]
        assert await meanwhile == usual.text
    if kind is OutOfRange:
        assert (error.reason, error.metadata["limit"]) in {("PROMPT_TOO_LONG", "4095")}


async def _text(call: Any) -> str:
    return "".join([event.delta.text async for event in call])


@pytest.mark.parametrize(
    ("method", "raw", "field"),
    [
        ("Chat", pb.ChatRequest().SerializeToString(), "messages"),
        ("Cancel", b"", "request_id"),
        ("Tokenize", b"\x12\x01\xff", "request"),
        ("Detokenize", pb.DetokenizeRequest(token_ids=[1, 999]).SerializeToString(), "token_ids[1]"),
    ],
)
@asynchronous
async def test_bad_input_of_the_other_methods(stack: ServedStack, method: str, raw: bytes, field: str) -> None:
    """Each names its field."""
    async with stub_of(stack) as stub:
        error = await error_of(stub.channel.unary_unary(f"{SERVICE}/{method}")(raw, timeout=TIMEOUT_S))
    assert [violation.field for violation in error.violations] == [field]


@asynchronous
async def test_an_unknown_model_is_named_in_resource_info(stack: ServedStack) -> None:
    """The table of errors: unknown model = NOT_FOUND with ResourceInfo."""
    async with stub_of(stack) as stub:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.GetModel(pb.GetModelRequest(model="nope"), timeout=TIMEOUT_S)
    error = rpc.from_rpc_error(caught.value)
    assert isinstance(error, NotFound)
    assert (error.resource_type, error.resource_name) == ("model", "nope")


@asynchronous
async def test_a_bad_request_id_is_refused(stack: ServedStack) -> None:
    """Length and characters."""
    async with stub_of(stack) as stub:
        error = await error_of(stub.Generate(generate(), timeout=TIMEOUT_S, metadata=(("x-request-id", "a b"),)))
    assert [violation.field for violation in error.violations] == ["x-request-id"]


# --- leaving ---------------------------------------------------------------------------------------------------------


async def free_blocks(stack: ServedStack) -> tuple[int, list[str]]:
    """Used device blocks and live sequences, through the gateway's relay of AdminService."""
    async with grpc.aio.insecure_channel(stack.admin_address) as channel:
        blocks = await admin_pb2_grpc.AdminServiceStub(channel).GetBlocks(admin_pb2.GetBlocksRequest())
    return blocks.gpu.total - blocks.gpu.free, [table.sequence for table in blocks.tables]


async def until_free(stack: ServedStack) -> None:
    begin = time.monotonic()
    while (await free_blocks(stack)) != (0, []):
        assert time.monotonic() - begin < FREE_WITHIN_S, await free_blocks(stack)
        await asyncio.sleep(0.01)


@pytest.mark.parametrize("how", ["drop", "deadline", "cancel"])
@asynchronous
async def test_leaving_frees_the_blocks(stack: ServedStack, how: str) -> None:
    """Cancel, deadline and disconnect: nothing of the request is left in the scheduler."""
    async with stub_of(stack) as stub:
        await until_free(stack)
        call = stub.GenerateStream(
            generate("x" * 2_000, max_tokens=2_000),
            timeout=2.0 if how == "deadline" else TIMEOUT_S,
            metadata=(("x-request-id", how),),
        )
        stream = aiter(call)
        while not (await anext(stream)).HasField("delta"):
            pass
        used, sequences = await free_blocks(stack)
        assert (used > 0, sequences) == (True, [f"{how}/0"])
        if how == "drop":
            call.cancel()
        else:
            if how == "cancel":
                await stub.Cancel(pb.CancelRequest(request_id=how))
            expected = "DEADLINE_EXCEEDED" if how == "deadline" else "CANCELLED"
            assert (await error_of(stream)).status == expected
        await until_free(stack)


@asynchronous
async def test_many_streams_at_once_each_get_their_own(stack: ServedStack) -> None:
    """24 concurrent streams over one channel, each equal to what the same request gives alone."""
    async with stub_of(stack) as stub:
        requests = [generate(f"prompt {i}", 12, sampling=pb.SamplingParams(seed=i % 4)) for i in range(24)]
        texts = await asyncio.gather(*(_text(stub.GenerateStream(r, timeout=TIMEOUT_S)) for r in requests))
        for i in (0, 5, 23):
            assert (await stub.Generate(requests[i], timeout=TIMEOUT_S)).choices[0].text == texts[i]
    assert len(set(texts)) > 12


@asynchronous
async def test_the_relay_streams_steps(stack: ServedStack) -> None:
    """WatchScheduler through the gateway tells the steps of a request just served."""
    async with stub_of(stack) as stub:
        await stub.Generate(generate(), timeout=TIMEOUT_S, metadata=(("x-request-id", "watched"),))
    async with grpc.aio.insecure_channel(stack.admin_address) as channel:
        admin = admin_pb2_grpc.AdminServiceStub(channel)
        call = admin.WatchScheduler(admin_pb2.WatchSchedulerRequest(), timeout=TIMEOUT_S)
        ids = {group.id async for report in call for group in report.scheduled}
    assert "watched" in ids
