"""What OpenAI's and vLLM's fields become on the way to the scheduler, and which are refused. Real gateway, scripted scheduler."""

import asyncio
import json
from typing import Any

import httpx
import pytest

from protos.common.v1 import common_pb2
from protos.engine.v1 import engine_pb2
from svc_common import wire_arrays
from tests.support.services.models import tiny
from tests.support.services.scripted_engine import Attachment, Gateway, asynchronous, pair

pytestmark = pytest.mark.processes

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
OBJECT = '{"type":"object"}'


async def submitted(attachment: Attachment, running: Gateway, path: str, body: dict[str, Any]) -> engine_pb2.Submit:
    """What the scheduler is told; the client leaves then."""
    async with httpx.AsyncClient(base_url=f"http://{running.http}", timeout=20) as client:
        asking = asyncio.ensure_future(client.post(path, json=body))
        telling = asyncio.ensure_future(attachment.next())
        await asyncio.wait((asking, telling), return_when=asyncio.FIRST_COMPLETED)
        assert telling.done(), asking.result().text
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
    (submit,) = telling.result().submits
    assert [cancel.handle for cancel in (await attachment.next()).cancels] == [submit.handle]
    return submit


@asynchronous
async def test_all_of_the_sampling_set() -> None:
    """Each field, through completions and chat alike: resolved, sorted, packed."""
    fields = {
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 7,
        "min_p": 0.25,
        "seed": -1,
        "presence_penalty": 0.5,
        "frequency_penalty": -0.5,
        "repetition_penalty": 1.5,
        "logit_bias": {"9": -100, "5": 2.5},
        "allowed_token_ids": [8, 3, 8],
        "bad_words": ["two"],
        "n": 2,
        "best_of": 3,
        "min_tokens": 2,
        "max_tokens": 9,
        "ignore_eos": True,
        "stop_token_ids": [4],
    }
    async with pair() as (_, attachment, running):
        for path, extra in (
            ("/v1/completions", {"prompt": "x", "logprobs": 3}),
            (
                "/v1/chat/completions",
                {"messages": [{"role": "user", "content": "x"}], "logprobs": True, "top_logprobs": 3},
            ),
        ):
            submit = await submitted(attachment, running, path, fields | extra | {"prompt_logprobs": 0})
            sampling = submit.sampling
            numbers = (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p, sampling.seed)
            assert numbers == (0.5, pytest.approx(0.9), 7, 0.25, 2**64 - 1)
            assert (sampling.presence_penalty, sampling.frequency_penalty, sampling.repetition_penalty) == (
                0.5,
                -0.5,
                1.5,
            )
            assert wire_arrays.unpack(sampling.logit_bias_ids, "x").tolist() == [5, 9]
            assert wire_arrays.unpack(sampling.logit_biases, "x", wire_arrays.F32).tolist() == [2.5, -100]
            assert wire_arrays.unpack(sampling.allowed_token_ids, "x").tolist() == [3, 8]
            words = [wire_arrays.unpack(word.token_ids, "x").tolist() for word in sampling.bad_words]
            assert words == [tiny().encode("two"), tiny().encode(" two")]
            assert (sampling.logprobs, sampling.num_top_logprobs) == (True, 3)
            assert sampling.HasField("num_prompt_logprobs")
            assert (submit.num_choices, submit.best_of) == (2, 3)
            assert (submit.stop.min_tokens, submit.stop.max_tokens, submit.stop.ignore_eos) == (2, 9, True)


STRUCTURED = [
    ({"response_format": {"type": "json_object"}}, common_pb2.GRAMMAR_KIND_JSON_SCHEMA, OBJECT),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "strict": True, "schema": SCHEMA}}},
        common_pb2.GRAMMAR_KIND_JSON_SCHEMA,
        json.dumps(SCHEMA, separators=(",", ":")),
    ),
    ({"guided_json": SCHEMA}, common_pb2.GRAMMAR_KIND_JSON_SCHEMA, json.dumps(SCHEMA, separators=(",", ":"))),
    (
        {"guided_json": json.dumps(SCHEMA)},
        common_pb2.GRAMMAR_KIND_JSON_SCHEMA,
        json.dumps(SCHEMA, separators=(",", ":")),
    ),
    ({"guided_regex": "[ab]+"}, common_pb2.GRAMMAR_KIND_REGEX, "[ab]+"),
    ({"guided_choice": ["yes", "no"]}, common_pb2.GRAMMAR_KIND_CHOICE, '["yes","no"]'),
    ({"guided_grammar": 'start: "a"'}, common_pb2.GRAMMAR_KIND_LARK, 'start: "a"'),
    ({"structured_outputs": {"regex": "[ab]+"}}, common_pb2.GRAMMAR_KIND_REGEX, "[ab]+"),
    ({"structured_outputs": {"choice": ["yes"], "json": None}}, common_pb2.GRAMMAR_KIND_CHOICE, '["yes"]'),
    ({"structured_outputs": {"json_object": True}}, common_pb2.GRAMMAR_KIND_JSON_SCHEMA, OBJECT),
    ({"response_format": {"type": "text"}, "guided_regex": "a"}, common_pb2.GRAMMAR_KIND_REGEX, "a"),
]


@asynchronous
async def test_structured_output_in_every_spelling() -> None:
    """OpenAI's response_format, vLLM's structured_outputs and its older guided_*: one grammar, compiled."""
    async with pair() as (_, attachment, running):
        for fields, kind, text in STRUCTURED:
            submit = await submitted(attachment, running, "/v1/completions", {"prompt": "x", **fields})
            assert submit.sampling.grammar == common_pb2.Grammar(kind=kind, text=text)
        submit = await submitted(
            attachment, running, "/v1/completions", {"prompt": "x", "response_format": {"type": "text"}}
        )
        assert not submit.sampling.HasField("grammar")


@asynchronous
async def test_beam_search_under_vllms_names() -> None:
    """n hypotheses of n beams; temperature 0 as its clients send it."""
    fields = {"prompt": "x", "use_beam_search": True, "n": 4, "temperature": 0, "length_penalty": 0.5}
    rules = {
        None: common_pb2.BEAM_STOP_WHEN_UNBEATABLE,
        True: common_pb2.BEAM_STOP_WHEN_ENOUGH,
        False: common_pb2.BEAM_STOP_WHEN_UNBEATABLE,
        "never": common_pb2.BEAM_STOP_NEVER,
    }
    async with pair() as (_, attachment, running):
        for early_stopping, stop in rules.items():
            body = fields | {"early_stopping": early_stopping}
            submit = await submitted(attachment, running, "/v1/completions", body)
            assert (submit.num_choices, submit.best_of) == (4, 4)
            assert submit.beam == common_pb2.BeamRules(length_penalty=0.5, stop=stop)


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"n": 0}, "n"),
    ({"n": 129}, "n"),
    ({"n": 3, "best_of": 2}, "best_of"),
    ({"best_of": 2, "stop": "x"}, "stop"),
    ({"min_p": 1.5}, "min_p"),
    ({"presence_penalty": 2.5}, "presence_penalty"),
    ({"frequency_penalty": -2.5}, "frequency_penalty"),
    ({"repetition_penalty": 0}, "repetition_penalty"),
    ({"repetition_penalty": 1e39}, "repetition_penalty"),
    ({"logit_bias": {"5": 101}}, "logit_bias"),
    ({"logit_bias": {"5": 1e39}}, "logit_bias"),
    ({"logit_bias": {"99999": 1}}, "logit_bias"),
    ({"logit_bias": {"x": 1}}, "logit_bias"),
    ({"logit_bias": {"-1": 1}}, "logit_bias"),
    ({"logit_bias": [1]}, "logit_bias"),
    ({"logit_bias": {str(i): 1 for i in range(1025)}}, "logit_bias"),
    ({"allowed_token_ids": [99999]}, "allowed_token_ids"),
    ({"bad_words": [" "]}, "bad_words"),
    ({"bad_words": ["x"] * 65}, "bad_words"),
    ({"logprobs": 21}, "logprobs"),
    ({"prompt_logprobs": 21}, "prompt_logprobs"),
    ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
    ({"top_logprobs": 3}, "top_logprobs"),
    ({"use_beam_search": True, "temperature": 0.5}, "temperature"),
    ({"use_beam_search": True, "top_k": 5}, "top_k"),
    ({"use_beam_search": True, "length_penalty": 11}, "length_penalty"),
    ({"use_beam_search": True, "stop": "x"}, "stop"),
    ({"length_penalty": 2}, "length_penalty"),
    ({"early_stopping": True}, "length_penalty"),
    ({"early_stopping": "soon"}, "early_stopping"),
    ({"echo": True, "best_of": 2, "n": 3}, "best_of"),
    ({"suffix": "x"}, "suffix"),
    ({"tools": [{"type": "function"}]}, "tools"),
    ({"response_format": {"type": "json_schema"}}, "response_format"),
    ({"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "nope"}}}}, "response_format"),
    ({"response_format": {"type": "json_object"}, "guided_regex": "a"}, "guided_regex"),
    ({"guided_regex": "("}, "guided_regex"),
    ({"guided_regex": 5}, "guided_regex"),
    ({"guided_regex": "a", "ignore_eos": True}, "ignore_eos"),
    ({"guided_choice": []}, "guided_choice"),
    ({"guided_choice": "yes"}, "guided_choice"),
    ({"guided_grammar": "start: nothing"}, "guided_grammar"),
    ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs"),
    ({"structured_outputs": {}}, "structured_outputs"),
    ({"structured_outputs": "json"}, "structured_outputs"),
]


@asynchronous
async def test_what_cannot_be_done_is_refused_by_name() -> None:
    """400 with the parameter, never ignored; nothing of it reaches the scheduler, and the next request is served."""
    async with pair() as (_, attachment, running):
        async with httpx.AsyncClient(base_url=f"http://{running.http}", timeout=20) as client:
            for fields, param in REFUSED:
                answer = await client.post("/v1/completions", json={"prompt": "x", "max_tokens": 1, **fields})
                assert answer.status_code == 400, fields
                error = answer.json()["error"]
                assert (error["param"], error["type"]) == (param, "invalid_request_error"), (fields, error)
            hot = await client.post("/v1/completions", json={"prompt": "x", "temperature": 99})
            assert hot.json()["error"]["message"].startswith("temperature: is 99"), "the name that was sent"
            chat = {"messages": [{"role": "user", "content": "x"}], "top_logprobs": 2}
            assert (await client.post("/v1/chat/completions", json=chat)).json()["error"]["param"] == "top_logprobs"
        await submitted(attachment, running, "/v1/completions", {"prompt": "x"})
