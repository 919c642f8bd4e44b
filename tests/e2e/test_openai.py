"""The official `openai` package on a real stack with the built-in model: what it says and what it scores."""

from collections.abc import Iterator
from typing import Any, Literal

import httpx
import openai
import pytest
from pydantic import BaseModel

from quire.local_stack.stack import LocalStack

USER = [{"role": "user", "content": "Tell me a story."}]
PROMPT = "Once upon a time there was a little"


@pytest.fixture
def ai(stack: LocalStack) -> Iterator[openai.OpenAI]:
    """The package as users have it."""
    with openai.OpenAI(base_url=f"{stack.http_url}/v1", api_key="anything", timeout=60, max_retries=0) as made:
        yield made


# --- scoring, as lm-eval does ----------------------------------------------------------------------------------------


def tokens_of(stack: LocalStack, text: str) -> list[int]:
    """By the door's own tokenizer."""
    return list(httpx.post(f"{stack.http_url}/tokenize", json={"prompt": text}).json()["tokens"])


@pytest.mark.parametrize("max_tokens", [0, 1])
def test_scores_of_prompts_equal_those_of_generation(stack: LocalStack, ai: openai.OpenAI, max_tokens: int) -> None:
    """echo, logprobs=1: a greedy output scores as a prompt what it was given when it was made, and each token is the likeliest."""
    made = ai.completions.create(model="tiny", prompt=PROMPT, max_tokens=8, temperature=0, logprobs=1)
    text = PROMPT + made.choices[0].text
    token_ids = tokens_of(stack, text)
    num_context = len(tokens_of(stack, PROMPT))
    wish: dict[str, Any] = {"model": "tiny", "max_tokens": max_tokens, "temperature": 0, "logprobs": 1, "echo": True}
    scored = ai.completions.create(prompt=[token_ids, token_ids[:5]], **wish)
    found = scored.choices[0].logprobs
    end = len(token_ids)
    assert scored.choices[0].text.startswith(text)
    assert len(found.tokens) == end + max_tokens
    assert found.token_logprobs[0] is None
    assert found.token_logprobs[num_context:end] == pytest.approx(made.choices[0].logprobs.token_logprobs, abs=1e-3)
    for chosen, tops in zip(found.token_logprobs[num_context:end], found.top_logprobs[num_context:end], strict=True):
        assert max(tops.values()) == chosen
    assert scored.choices[1].logprobs.token_logprobs[1:5] == pytest.approx(found.token_logprobs[1:5], abs=1e-3)
    assert scored.usage.completion_tokens == 2 * max_tokens
    chunks = list(ai.completions.create(prompt=[token_ids], stream=True, **wish))
    parts = [chunk.choices[0].logprobs for chunk in chunks if chunk.choices[0].logprobs]
    streamed = [value for part in parts for value in part.token_logprobs]
    assert streamed[1:] == pytest.approx(found.token_logprobs[1:], abs=1e-3)


def test_echo_of_one_token(ai: openai.OpenAI) -> None:
    """Nothing comes before it, so there is nothing to wait for."""
    found = ai.completions.create(model="tiny", prompt=[65], max_tokens=0, echo=True, logprobs=1).choices[0]
    assert found.logprobs.token_logprobs == [None]


# --- schemas ---------------------------------------------------------------------------------------------------------


class Animal(BaseModel):
    """What the model must name."""

    kind: Literal["cat", "dog"]
    legs: Literal[2, 4]


def test_parse_gives_objects(ai: openai.OpenAI) -> None:
    """The package's own parse: the schema of a class goes out, an object of it comes back, of each choice."""
    made = ai.chat.completions.parse(model="tiny", messages=USER, response_format=Animal, max_tokens=60, n=2, seed=1)
    for choice in made.choices:
        assert isinstance(choice.message.parsed, Animal)


# --- tools -----------------------------------------------------------------------------------------------------------


class GetWeather(BaseModel):
    """Arguments of a tool."""

    city: Literal["Rome", "Oslo"]


TOOLS: list[Any] = [openai.pydantic_function_tool(GetWeather, name="get_weather")]
NAMED: Any = {"type": "function", "function": {"name": "get_weather"}}


@pytest.mark.parametrize("choice", ["required", NAMED])
def test_tools_that_must_be_called(ai: openai.OpenAI, choice: Any) -> None:
    """A model of no training calls by its grammar alone: arguments that parse, whole and streamed, then the answer's turn."""
    wish: dict[str, Any] = {"model": "tiny", "tools": TOOLS, "tool_choice": choice, "max_tokens": 120, "seed": 3}
    wish |= {"parallel_tool_calls": False}
    whole = ai.chat.completions.parse(messages=USER, **wish).choices[0]
    assert whole.finish_reason == "tool_calls"
    (call, *_) = whole.message.tool_calls
    assert call.function.name == "get_weather"
    assert isinstance(call.function.parsed_arguments, GetWeather)
    assert call.id
    with ai.chat.completions.stream(messages=USER, **wish) as stream:
        streamed = stream.get_final_completion().choices[0]
    assert streamed.finish_reason == "tool_calls"
    assert [c.function.arguments for c in streamed.message.tool_calls] == [
        c.function.arguments for c in whole.message.tool_calls
    ]
    turns = [*USER, whole.message, {"role": "tool", "tool_call_id": call.id, "content": "sunny"}]
    after = ai.chat.completions.create(model="tiny", messages=turns, tools=TOOLS, tool_choice="none", max_tokens=8)
    assert after.choices[0].message.tool_calls is None
    assert (
        after.usage.prompt_tokens
        > ai.chat.completions.create(model="tiny", messages=USER, max_tokens=1).usage.prompt_tokens
    )


# --- streams ---------------------------------------------------------------------------------------------------------


def test_a_chat_with_everything_at_once(ai: openai.OpenAI) -> None:
    """n, logprobs, top_logprobs, stop, bias, usage: the stream's sum is the whole answer."""
    wish: dict[str, Any] = {
        "model": "tiny",
        "messages": USER,
        "n": 2,
        "seed": 11,
        "max_completion_tokens": 12,
        "logprobs": True,
        "top_logprobs": 2,
        "stop": ["zzzz"],
        "logit_bias": {"70": -5},
        "metadata": {"run": "7"},
        "user": "someone",
        "store": False,
        "service_tier": "auto",
        "prompt_cache_key": "k",
    }
    whole = ai.chat.completions.create(**wish)
    options = {"include_usage": True}
    chunks = list(ai.chat.completions.create(stream=True, stream_options=options, **wish))
    assert [chunk.usage for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    assert whole.system_fingerprint == chunks[0].system_fingerprint
    assert whole.system_fingerprint.startswith("quire-")
    for choice in whole.choices:
        mine = [chunk.choices[0] for chunk in chunks[:-1] if chunk.choices[0].index == choice.index]
        assert mine[0].delta.role == "assistant"
        assert "".join(part.delta.content or "" for part in mine) == choice.message.content
        entries = [entry for part in mine if part.logprobs for entry in part.logprobs.content]
        assert [entry.token for entry in entries] == [entry.token for entry in choice.logprobs.content]
        assert all(len(entry.top_logprobs) == 2 for entry in entries)
        assert mine[-1].finish_reason == choice.finish_reason
