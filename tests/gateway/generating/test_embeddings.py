"""Vectors and adapters through both doors. Real gateway, scripted scheduler."""

import asyncio
from typing import Any

import numpy as np
import openai
import pytest

from protos.common.v1 import common_pb2
from protos.engine.v1 import engine_pb2
from protos.inference.v1 import inference_pb2 as pb
from svc_common import wire_arrays
from svc_common.errors import Internal, InvalidArgument, NotFound, OutOfRange
from tests.gateway.engine.test_scheduler_link import error_of
from tests.gateway.generating.test_choices import openai_client
from tests.support.services.models import tiny
from tests.support.services.scripted_engine import Attachment, asynchronous, finished, pair, tokens

pytestmark = pytest.mark.processes

VECTORS = [[3.0, 4.0], [0.0, 2.0], [0.0, 0.0]]


def inputs(*prompts: str | list[int]) -> list[pb.EmbedInput]:
    return [
        pb.EmbedInput(text=p) if isinstance(p, str) else pb.EmbedInput(token_ids=pb.TokenIds(ids=p)) for p in prompts
    ]


def vector(handle: int, values: list[float]) -> engine_pb2.EngineMessage:
    """A vector and the end."""
    made = engine_pb2.Embedding(handle=handle, values=wire_arrays.pack(values, wire_arrays.F32))
    return engine_pb2.EngineMessage(embeddings=[made], finished=finished(handle, 0).finished)


async def answer(attachment: Attachment, num: int) -> list[engine_pb2.Submit]:
    """Answers the next requests in reverse order: those that come last are done first."""
    submits = await attachment.next_submits(num)
    for i in reversed(range(num)):
        attachment.send(vector(submits[i].handle, VECTORS[i]))
    return submits


@asynchronous
async def test_vectors_come_in_the_order_of_the_prompts() -> None:
    """Text and tokens, pooling as asked, length 1 unless it is not wanted; a vector of zeros stays one."""
    async with pair() as (_, attachment, running):
        asked = pb.EmbedRequest(inputs=inputs("one two", [5, 6, 7], [1]), scheduling=pb.Scheduling(priority=3))
        call = running.stub.Embed(asked, timeout=20, metadata=(("x-request-id", "mine"),))
        submits = await answer(attachment, 3)
        response = await call
        assert [submit.request_id for submit in submits] == ["mine-0", "mine-1", "mine-2"]
        assert wire_arrays.unpack(submits[0].token_ids, "x").tolist() == tiny().encode("one two")
        assert {submit.task for submit in submits} == {common_pb2.TASK_EMBED_MEAN}
        assert {submit.priority for submit in submits} == {-3}
        found = np.array([embedding.values for embedding in response.embeddings])
        np.testing.assert_allclose(found, [[0.6, 0.8], [0, 1], [0, 0]], rtol=1e-6)
        assert (response.model, response.usage.prompt_tokens, response.usage.completion_tokens) == ("tiny", 9, 0)
        asked = pb.EmbedRequest(inputs=inputs([5]), pooling=pb.POOLING_LAST, normalize=False)
        call = running.stub.Embed(asked, timeout=20)
        (submit,) = await answer(attachment, 1)
        assert submit.task == common_pb2.TASK_EMBED_LAST
        assert list((await call).embeddings[0].values) == VECTORS[0]


@asynchronous
async def test_a_failure_ends_all_of_it() -> None:
    """The others are cancelled at the scheduler; an end without a vector is INTERNAL."""
    async with pair() as (_, attachment, running):
        call = running.stub.Embed(pb.EmbedRequest(inputs=inputs([5], [6])), timeout=20)
        submits = await attachment.next_submits(2)
        lost = common_pb2.ErrorStatus(status="INTERNAL", reason="NOT_FINITE", message="NaN")
        failed = engine_pb2.Failed(handle=submits[0].handle, error=lost)
        attachment.send(engine_pb2.EngineMessage(failed=[failed]))
        assert (await error_of(call)).reason == "NOT_FINITE"
        assert [cancel.handle for cancel in (await attachment.next()).cancels] == [submits[1].handle]
        call = running.stub.Embed(pb.EmbedRequest(inputs=inputs([5])), timeout=20)
        attachment.send(finished((await attachment.next_submit()).handle, 0))
        assert isinstance(await error_of(call), Internal)


@pytest.mark.parametrize(
    ("request_", "error", "field"),
    [
        (pb.EmbedRequest(), InvalidArgument, "inputs"),
        (pb.EmbedRequest(inputs=inputs(*["x"] * 257)), InvalidArgument, "inputs"),
        (pb.EmbedRequest(inputs=inputs("x", "")), InvalidArgument, "inputs[1]"),
        (pb.EmbedRequest(inputs=[pb.EmbedInput()]), InvalidArgument, "inputs[0]"),
        (pb.EmbedRequest(inputs=inputs([])), InvalidArgument, "inputs[0].token_ids.ids"),
        (pb.EmbedRequest(inputs=inputs([1, 99_999])), InvalidArgument, "inputs[0].token_ids.ids[1]"),
        (pb.EmbedRequest(inputs=inputs("x"), pooling=9), InvalidArgument, "pooling"),
        (pb.EmbedRequest(inputs=inputs("x", [1] * 2048)), OutOfRange, None),
        (pb.EmbedRequest(inputs=inputs("x"), model="nope"), NotFound, None),
    ],
)
@asynchronous
async def test_what_is_wrong_is_named(request_: pb.EmbedRequest, error: type[Exception], field: str | None) -> None:
    """Nothing of it reaches the scheduler: the next submit is that of a good request."""
    async with pair() as (_, attachment, running):
        found = await error_of(running.stub.Embed(request_, timeout=20))
        assert isinstance(found, error)
        assert [violation.field for violation in found.violations] == ([field] if field else [])
        call = running.stub.Embed(pb.EmbedRequest(inputs=inputs([7])), timeout=20)
        await answer(attachment, 1)
        await call


@asynchronous
async def test_openai_embeddings_in_both_encodings() -> None:
    """The official client asks for base64 by itself and gets floats; every form of input."""
    async with pair() as (_, attachment, running), openai_client(running) as client:
        forms: list[tuple[Any, int]] = [("one", 1), (["one", "two"], 2), ([5, 6], 1), ([[5], [6, 7]], 2)]
        for given, num in forms:
            for extra in ({}, {"encoding_format": "float"}):
                asking = asyncio.ensure_future(client.embeddings.create(model="tiny", input=given, **extra))
                await answer(attachment, num)
                made = await asking
                found = np.array([entry.embedding for entry in made.data])
                np.testing.assert_allclose(found, [[0.6, 0.8], [0, 1]][:num], rtol=1e-6)
                assert [entry.index for entry in made.data] == list(range(num))
                assert (made.model, made.usage.prompt_tokens, made.usage.total_tokens) == ("tiny", 3 * num, 3 * num)
        asking = asyncio.ensure_future(client.embeddings.create(model="tiny", input="x", dimensions=2))
        await answer(attachment, 1)
        await asking
        asking = asyncio.ensure_future(client.embeddings.create(model="tiny", input="x", dimensions=3))
        await answer(attachment, 1)
        with pytest.raises(openai.BadRequestError, match="have 2") as caught:
            await asking
        assert caught.value.param == "dimensions"
        with pytest.raises(openai.BadRequestError) as caught:
            await client.embeddings.create(model="tiny", input=["x", ""])
        assert caught.value.param == "input"


# --- adapters ----------------------------------------------------------------------------------------------------------


def state(*adapters: str) -> engine_pb2.EngineMessage:
    return engine_pb2.EngineMessage(state=engine_pb2.ServiceState(serving=True, adapters=adapters))


@asynchronous
async def test_adapters_are_models_by_name() -> None:
    """Listed beside the model that they are on, named as `model` by any request, gone when the scheduler says so."""
    async with pair() as (_, attachment, running), openai_client(running) as client:
        attachment.send(state("poems", "laws"))
        while len(models := (await running.stub.ListModels(pb.ListModelsRequest())).models) < 3:
            await asyncio.sleep(0.01)
        assert [(model.name, model.base_model) for model in models] == [
            ("tiny", ""),
            ("poems", "tiny"),
            ("laws", "tiny"),
        ]
        assert await running.stub.GetModel(pb.GetModelRequest(model="laws")) == models[2]
        listed = [(model.id, model.parent) async for model in client.models.list()]
        assert listed == [("tiny", None), ("poems", "tiny"), ("laws", "tiny")]
        ids = tiny().encode("one")
        for model, adapter in (("", ""), ("tiny", ""), ("poems", "poems"), ("laws", "laws")):
            call = running.stub.Generate(pb.GenerateRequest(model=model, text="x"), timeout=20)
            submit = await attachment.next_submit()
            attachment.send(tokens(submit.handle, 0, ids), finished(submit.handle, 1))
            assert (submit.adapter, (await call).model) == (adapter, model or "tiny")
        call = running.stub.Embed(pb.EmbedRequest(model="laws", inputs=inputs("x")), timeout=20)
        (submit,) = await answer(attachment, 1)
        assert (submit.adapter, (await call).model) == ("laws", "laws")
        attachment.send(state("laws"))
        while len((await running.stub.ListModels(pb.ListModelsRequest())).models) == 3:
            await asyncio.sleep(0.01)
        error = await error_of(running.stub.Generate(pb.GenerateRequest(model="poems", text="x"), timeout=20))
        assert isinstance(error, NotFound)
        assert error.metadata["served"] == "tiny, laws"
