"""Tools and thoughts through the official package, of outputs that the test plays: a template that calls as Hermes and Qwen do."""

import asyncio
import contextlib
import hashlib
import json
from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest

from protos.common.v1 import common_pb2
from protos.engine.v1 import engine_pb2
from protos.worker.v1 import worker_pb2
from tests.support.services.models import tiny
from tests.support.services.scripted_engine import Attachment, asynchronous, engine, finished, gateway, tokens

pytestmark = pytest.mark.processes

TEMPLATE = (
    "{% for tool in tools or [] %}{{ tool | tojson }}{% endfor %}"
    "{% for m in messages %}{{ m.role }}: {{ m.content }}{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}"
    "</tool_call>{% endfor %}\n{% endfor %}{% if enable_thinking is not defined or enable_thinking %}<think></think>{% endif %}"
)
USER = [{"role": "user", "content": "What is the weather in Rome and Oslo?"}]
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOLS: list[Any] = [{"type": "function", "function": {"name": "weather", "parameters": SCHEMA, "strict": True}}]
THOUGHT, CONTENT = "I should look.", "Let me see.\n"
CITIES = ["Rome", "Oslo"]
OUTPUT = f"<think>{THOUGHT}</think>{CONTENT}" + "\n".join(
    '<tool_call>\n{"name": "weather", "arguments": ' + json.dumps({"city": city}) + "}\n</tool_call>" for city in CITIES
)


@contextlib.asynccontextmanager
async def served() -> AsyncIterator[tuple[Attachment, openai.AsyncOpenAI]]:
    """A gateway whose model has that template, its scheduler's side, and the package."""
    async with engine() as scheduler:
        bundle = worker_pb2.ModelBundle.FromString(scheduler.bundle)
        bundle.chat_template = TEMPLATE
        scheduler.bundle = bundle.SerializeToString(deterministic=True)
        scheduler.welcome.limits.bundle_digest = hashlib.sha256(scheduler.bundle).hexdigest()
        async with gateway(scheduler.address) as running:
            url = f"http://{running.http}/v1"
            async with openai.AsyncOpenAI(base_url=url, api_key="x", timeout=20, max_retries=0) as client:
                yield await scheduler.attached(), client


async def play(attachment: Attachment, text: str = OUTPUT, *, num_per_run: int = 3) -> engine_pb2.Submit:
    """Says `text` to the next request, token by token or more at once, for each of its choices."""
    submit = await attachment.next_submit()
    ids = tiny().encode(text)
    num_choices = submit.num_choices or 1
    for choice in range(num_choices):
        for begin in range(0, len(ids), num_per_run):
            run = ids[begin : begin + num_per_run]
            logprobs = [-0.5] * len(run) if submit.sampling.logprobs else None
            attachment.send(tokens(submit.handle, begin, run, logprobs, choice=choice))
            await asyncio.sleep(0)
        reason, last = common_pb2.FINISH_REASON_STOP, choice == num_choices - 1
        attachment.send(finished(submit.handle, len(ids), reason, choice=choice, last=last))
    return submit


def calls_of(message: Any) -> list[tuple[str, Any]]:
    return [(call.function.name, json.loads(call.function.arguments)) for call in message.tool_calls or []]


EXPECTED = [("weather", {"city": city}) for city in CITIES]


@pytest.mark.parametrize("num_per_run", [1, 7, 1000])
@asynchronous
async def test_what_the_model_writes_becomes_calls(num_per_run: int) -> None:
    """Thought, content and two calls apart, in every choice; streamed as the package adds it up, however tokens come."""
    async with served() as (attachment, client):
        wish: dict[str, Any] = {"model": "tiny", "messages": USER, "tools": TOOLS, "n": 2}
        playing = asyncio.ensure_future(play(attachment, num_per_run=num_per_run))
        whole = await client.chat.completions.create(**wish)
        await playing
        playing = asyncio.ensure_future(play(attachment, num_per_run=num_per_run))
        async with client.chat.completions.stream(**wish, stream_options={"include_usage": True}) as stream:
            streamed = await stream.get_final_completion()
        await playing
        for answer in (whole, streamed):
            for choice in answer.choices:
                assert calls_of(choice.message) == EXPECTED
                assert choice.finish_reason == "tool_calls"
                assert choice.message.content.strip() == CONTENT.strip()
                assert len({call.id for call in choice.message.tool_calls}) == len(CITIES)
            assert answer.usage.completion_tokens_details.reasoning_tokens > 0
        message = whole.choices[0].message
        assert message.reasoning_content == message.reasoning == THOUGHT


@asynchronous
async def test_each_chunk_of_a_call_has_openais_shape() -> None:
    """id, type and name once, at the beginning; indexes from 0; arguments that add up; log probabilities of content only."""
    async with served() as (attachment, client):
        playing = asyncio.ensure_future(play(attachment, num_per_run=2))
        stream = await client.chat.completions.create(
            model="tiny", messages=USER, tools=TOOLS, stream=True, logprobs=True
        )
        choices = [chunk.choices[0] async for chunk in stream]
        await playing
    deltas = [choice.delta for choice in choices]
    assert deltas[0].role == "assistant"
    assert all(delta.role is None for delta in deltas[1:])
    pieces = [call for delta in deltas for call in delta.tool_calls or []]
    for index, city in enumerate(CITIES):
        first, *rest = (piece for piece in pieces if piece.index == index)
        assert (first.type, first.function.name, bool(first.id)) == ("function", "weather", True)
        assert all((piece.id, piece.type, piece.function.name) == (None, None, None) for piece in rest)
        assert json.loads("".join(piece.function.arguments for piece in (first, *rest))) == {"city": city}
    assert "".join(getattr(delta, "reasoning_content", None) or "" for delta in deltas) == THOUGHT
    entries = [entry for choice in choices if choice.logprobs for entry in choice.logprobs.content]
    assert "Let me see." in "".join(entry.token for entry in entries)
    assert "weather" not in "".join(entry.token for entry in entries)
    assert [choice.finish_reason for choice in choices] == [None] * (len(choices) - 1) + ["tool_calls"]


@asynchronous
async def test_a_round_trip() -> None:
    """The assistant's message goes back as the package gave it, with the tools' answers; the prompt has them all."""
    async with served() as (attachment, client):
        playing = asyncio.ensure_future(play(attachment))
        made = (await client.chat.completions.create(model="tiny", messages=USER, tools=TOOLS)).choices[0].message
        await playing
        answers = [
            {
                "role": "tool",
                "tool_call_id": call.id,
                "content": f"sunny in {json.loads(call.function.arguments)['city']}",
            }
            for call in made.tool_calls
        ]
        turns: list[Any] = [{"role": "developer", "content": "Be short."}, *USER, made, *answers]
        playing = asyncio.ensure_future(play(attachment, "It is sunny."))
        final = await client.chat.completions.create(
            model="tiny", messages=turns, tools=TOOLS, extra_body={"chat_template_kwargs": {"enable_thinking": False}}
        )
        submit = await playing
    prompt = tiny().decode(memoryview(submit.token_ids).cast("i").tolist())
    assert "system: Be short." in prompt
    assert "<think>" not in prompt
    for city in CITIES:
        assert f'"city": "{city}"' in prompt
        assert f"tool: sunny in {city}" in prompt
    assert (final.choices[0].message.content, final.choices[0].finish_reason) == ("It is sunny.", "stop")


@asynchronous
async def test_none_tells_the_model_of_no_tools() -> None:
    """tool_choice none: what looks like a call is text."""
    async with served() as (attachment, client):
        playing = asyncio.ensure_future(
            play(attachment, '<tool_call>\n{"name": "weather", "arguments": {}}\n</tool_call>')
        )
        made = await client.chat.completions.create(model="tiny", messages=USER, tools=TOOLS, tool_choice="none")
        submit = await playing
    assert made.choices[0].message.tool_calls is None
    assert "<tool_call>" in made.choices[0].message.content
    assert '"parameters"' not in tiny().decode(memoryview(submit.token_ids).cast("i").tolist())


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "weather"}}])
@asynchronous
async def test_a_forced_call_is_a_grammar(choice: Any) -> None:
    """Whatever the model, the scheduler is given a grammar that only calls match."""
    async with served() as (attachment, client):
        asking = asyncio.ensure_future(
            client.chat.completions.create(model="tiny", messages=USER, tools=TOOLS, tool_choice=choice)
        )
        submit = await attachment.next_submit()
        assert submit.sampling.HasField("grammar")
        assert "city" in submit.sampling.grammar.text
        asking.cancel()


@asynchronous
async def test_bad_tools_are_named_as_openai_names_them() -> None:
    """The checks that both doors share, under OpenAI's names of fields; nothing reaches the scheduler."""
    cases: list[tuple[Any, str]] = [
        ({"name": "no good!"}, "tools[0].function.name"),
        ({"name": "f", "parameters": {"type": "nonsense"}}, "tools[0].function.parameters"),
        ({"name": "f", "parameters": {"type": "array"}}, "tools[0].function.parameters"),
    ]
    async with served() as (attachment, client):
        for function, param in cases:
            with pytest.raises(openai.BadRequestError) as caught:
                await client.chat.completions.create(
                    model="tiny",
                    messages=USER,
                    tools=[{"type": "function", "function": function}],
                    tool_choice="required",
                )
            assert caught.value.param == param, function
        assert attachment.said.empty()
