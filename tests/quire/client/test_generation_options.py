"""Groups, likeliest tokens, prompt log probabilities, vectors, adapters as programs see them: `Client`, `LLM`, `quire generate`.

R25 and R94 at the user's side. A real gateway, and a scheduler whose every word the test decides.
"""

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from protos.common.v1 import common_pb2
from protos.engine.v1 import engine_pb2
from quire import LLM, AsyncClient, BeamSearchParams, Logprob, PoolingParams, SamplingParams, StructuredOutputsParams
from quire.client.messages import RequestOptions
from svc_common import wire_arrays
from svc_common.errors import InvalidArgument, NotFound
from tests.gateway.generating.test_choices import ONE, PROMPT, TWO, prompt_logprobs
from tests.gateway.generating.test_embeddings import state, vector
from tests.support.services.models import tiny
from tests.support.services.scripted_engine import Attachment, asynchronous, finished, pair, tokens
from tests.support.stack.up_process import ROOT


async def answer(attachment: Attachment, num: int = 1) -> list[engine_pb2.Submit]:
    """Answers the next requests with two choices, everything asked for beside them."""
    submits = await attachment.next_submits(num)
    for submit in submits:
        if submit.sampling.HasField("num_prompt_logprobs"):
            attachment.send(prompt_logprobs(submit.handle, submit.sampling.num_prompt_logprobs))
        for choice, ids in ((0, ONE), (1, TWO))[: submit.num_choices]:
            tops = [[(i, -0.25), (5, -2.0)] for i in ids] if submit.sampling.num_top_logprobs else None
            attachment.send(tokens(submit.handle, 0, ids, [-0.25] * len(ids), choice=choice, tops=tops))
            last, score = choice == submit.num_choices - 1, -0.5 - choice
            attachment.send(finished(submit.handle, len(ids), choice=choice, last=last, score=score))
    return submits


async def both(asking: Any, answering: Any) -> Any:
    task = asyncio.ensure_future(asking)
    await answering
    return await task


@asynchronous
async def test_outputs_of_several_choices() -> None:
    """Unary and stream alike: every choice with its tokens, log probabilities by rank, end and score."""
    params = SamplingParams(n=2, logprobs=2, prompt_logprobs=2)
    async with pair() as (_, attachment, running), AsyncClient(running.grpc) as client:
        whole = await both(client.generate(PROMPT, params), answer(attachment))
        stream = client.generate_stream(PROMPT, params)
        streamed = await both(stream.read(), answer(attachment))
    assert whole.outputs == streamed.outputs
    assert [(output.index, output.text, output.score) for output in whole.outputs] == [
        (0, "one two three four", -0.5),
        (1, "five six seven", -1.5),
    ]
    for output, ids in zip(whole.outputs, (ONE, TWO), strict=True):
        assert output.token_ids == ids
        assert output.cumulative_logprob == -0.25 * len(ids)
        expected = [{i: Logprob(-0.25, rank=1), 5: Logprob(-2.0, rank=2)} for i in ids]
        assert output.logprobs == expected
    first, second, third = whole.prompt_logprobs
    assert first is None
    assert second == {6: Logprob(-1.0), 9: Logprob(-0.5, rank=1), 7: Logprob(-2.0, rank=2)}
    assert list(third) == [7, 9], "the prompt's own token comes first"
    assert whole.prompt_logprobs == streamed.prompt_logprobs


@asynchronous
async def test_what_a_client_says_reaches_the_scheduler() -> None:
    """The whole set, by vLLM's names."""
    (begins,) = tiny().encode("a")
    params = SamplingParams(
        n=1,
        best_of=3,
        min_p=0.25,
        presence_penalty=1,
        frequency_penalty=-1,
        repetition_penalty=1.5,
        logit_bias={9: 1, 5: -2},
        allowed_token_ids=[begins, 5],
        bad_words=["two"],
        structured_outputs=StructuredOutputsParams(choice=["a", "b"]),
    )
    async with pair() as (_, attachment, running), AsyncClient(running.grpc) as client:
        asking = asyncio.ensure_future(client.generate(PROMPT, params))
        (submit,) = await answer(attachment)
        await asking
    sampling = submit.sampling
    assert (submit.num_choices, submit.best_of, sampling.min_p) == (1, 3, 0.25)
    assert (sampling.presence_penalty, sampling.frequency_penalty, sampling.repetition_penalty) == (1, -1, 1.5)
    assert wire_arrays.unpack(sampling.logit_bias_ids, "x").tolist() == [5, 9]
    assert wire_arrays.unpack(sampling.allowed_token_ids, "x").tolist() == [5, begins]
    assert wire_arrays.unpack(sampling.bad_words[0].token_ids, "x").tolist() == tiny().encode("two")
    assert sampling.grammar == common_pb2.Grammar(kind=common_pb2.GRAMMAR_KIND_CHOICE, text='["a","b"]')


@asynchronous
async def test_llm_generates_searches_and_embeds() -> None:
    """`LLM(target=...)`: groups in input order (R7), beams best first with their scores, vectors, adapters by name."""

    def program(target: str) -> list[Any]:
        with LLM(target=target) as llm:
            return [
                llm.generate([PROMPT, [5, 6]], SamplingParams(n=2), adapter=["poems", ""], use_tqdm=False),
                llm.beam_search([PROMPT], BeamSearchParams(beam_width=2, length_penalty=0.5), use_tqdm=False),
                llm.embed([[5], [6, 7]], PoolingParams(pooling="last", normalize=False), use_tqdm=False),
            ]

    async with pair() as (_, attachment, running):
        attachment.send(state("poems"))
        running_program = asyncio.create_task(asyncio.to_thread(program, running.grpc))
        submits = await answer(attachment, 2)
        (beam,) = await answer(attachment)
        embeds = await attachment.next_submits(2)
        for submit in embeds:
            attachment.send(vector(submit.handle, [float(len(submit.token_ids)), 1.0]))
        groups, (beams,), vectors = await running_program
    assert sorted((submit.adapter, submit.num_choices) for submit in submits) == [("", 2), ("poems", 2)]
    assert [output.prompt_token_ids for output in groups] == [PROMPT, [5, 6]]
    assert [output.model for output in groups] == ["poems", "tiny"]
    assert all([o.text for o in output.outputs] == ["one two three four", "five six seven"] for output in groups)
    rules = common_pb2.BeamRules(length_penalty=0.5, stop=common_pb2.BEAM_STOP_WHEN_UNBEATABLE)
    assert (beam.num_choices, beam.best_of, beam.beam) == (2, 2, rules)
    assert [output.score for output in beams.outputs] == [-0.5, -1.5]
    assert {submit.task for submit in embeds} == {common_pb2.TASK_EMBED_LAST}
    assert [output.outputs.embedding for output in vectors] == [[4.0, 1.0], [8.0, 1.0]]
    assert [(output.prompt_token_ids, output.num_prompt_tokens) for output in vectors] == [([5], 3), ([6, 7], 3)]


@asynchronous
async def test_clients_embed_and_name_adapters() -> None:
    """Several texts in one call, of length 1 by default; an adapter that is not there is NotFound; models say what is on what."""
    async with pair() as (_, attachment, running), AsyncClient(running.grpc) as client:
        attachment.send(state("poems"))
        asking = asyncio.ensure_future(client.embed(["one", [5, 6]]))
        for submit in await attachment.next_submits(2):
            attachment.send(vector(submit.handle, [3.0, 4.0]))
        found = await asking
        assert [output.outputs.embedding for output in found] == [pytest.approx([0.6, 0.8])] * 2
        assert [output.prompt_token_ids for output in found] == [None, [5, 6]]
        assert [(card.name, card.base_model) for card in await client.models()] == [("tiny", ""), ("poems", "tiny")]
        with pytest.raises(NotFound):
            await client.embed(["x"], options=RequestOptions(model="laws"))


@asynchronous
async def test_quire_generate_shows_choices_and_reads_a_schema(tmp_path: Path) -> None:
    """Each choice under its number; --json has them all; the schema comes from a file."""
    schema = tmp_path / "schema.json"
    schema.write_text('{"type": "object"}')

    async def run(*options: str) -> tuple[int, str, str]:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "quire", "generate", "x", "--target", running.grpc, *options),
            cwd=ROOT,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        out, err = await process.communicate()
        return process.returncode or 0, out.decode(), err.decode()

    async with pair() as (_, attachment, running):
        shown = asyncio.ensure_future(run("--n", "2", "--beam-width", "3", "--json-schema", str(schema)))
        (submit,) = await answer(attachment)
        assert (submit.num_choices, submit.best_of, submit.HasField("beam")) == (2, 3, True)
        assert submit.sampling.grammar.text == '{"type":"object"}'
        status, text, _ = await shown
        assert (status, text) == (0, "[0] score -0.5000\none two three four\n[1] score -1.5000\nfive six seven\n")
        as_json = asyncio.ensure_future(run("--n", "2", "--json", "--top-logprobs", "2"))
        await answer(attachment)
        _, text, _ = await as_json
        assert [output["text"] for output in json.loads(text)["outputs"]] == ["one two three four", "five six seven"]
        status, _, error = await run("--json-schema", str(tmp_path / "none"))
        assert status == 2
        assert "--json-schema" in error


@pytest.mark.parametrize(
    "kinds",
    [
        {},
        {"regex": "a", "choice": ["b"]},
        {"json": 5},
        {"regex": 5},
        {"choice": "yes"},
        {"choice": [1]},
        {"json_object": False},
    ],
    ids=repr,
)
def test_structured_outputs_take_one_kind(kinds: dict[str, Any]) -> None:
    """Exactly one, of its own type."""
    with pytest.raises(InvalidArgument) as caught:
        StructuredOutputsParams(**kinds)
    assert caught.value.violations[0].field.startswith("structured_outputs")


@pytest.mark.parametrize(
    ("make", "field"),
    [
        (lambda: BeamSearchParams(beam_width=0).sampling_params(), "beam_width"),
        (lambda: BeamSearchParams(beam_width=2, length_penalty=11).sampling_params(), "length_penalty"),
        (lambda: PoolingParams(pooling="max"), "pooling"),
        (lambda: PoolingParams(normalize=1), "normalize"),  # type: ignore[arg-type]
    ],
)
def test_other_parameters_are_checked(make: Any, field: str) -> None:
    """Named, before anything is sent."""
    with pytest.raises(InvalidArgument) as caught:
        make()
    assert [violation.field for violation in caught.value.violations] == [field]
