"""Anthropic's package for Python against a running Quire: python anthropic_calls.py http://HOST:PORT"""

import asyncio
import sys
from typing import Any, Literal

import anthropic
from anthropic import beta_tool
from pydantic import BaseModel, ConfigDict

MODEL = "tiny"
QUESTION = [{"role": "user", "content": "What is the weather in Oslo?"}]
CITY = {"type": "string", "enum": ["Paris", "Oslo"]}
WEATHER = {
    "name": "get_weather",
    "description": "The weather in a city.",
    "input_schema": {
        "type": "object",
        "properties": {"city": CITY},
        "required": ["city"],
        "additionalProperties": False,
    },
}
TIME = {**WEATHER, "name": "get_time", "description": "The time in a city."}
SEED = {"seed": 3}


class Review(BaseModel):
    """A typed answer."""

    model_config = ConfigDict(extra="forbid")

    language: Literal["Python", "Rust"]
    stars: Literal[1, 2, 3]


def messages(client: anthropic.Anthropic) -> None:
    """Whole, raw stream and the stream helper: equal texts and usage; stop sequences; a prefilled answer; a cached prompt."""
    wish: dict[str, Any] = {"model": MODEL, "max_tokens": 24, "messages": QUESTION}
    wish["extra_body"] = SEED | {"temperature": 0.7, "top_k": 40}
    system = [{"type": "text", "text": "Be short.", "cache_control": {"type": "ephemeral"}}]
    whole = client.messages.create(**wish, system=system, metadata={"user_id": "u"})
    assert (whole.type, whole.role, whole.stop_reason) == ("message", "assistant", "max_tokens")
    assert whole.id.startswith("msg_") and whole._request_id and whole.usage.output_tokens == 24
    with client.messages.stream(**wish, system=system) as stream:
        text = "".join(stream.text_stream)
        streamed = stream.get_final_message()
    assert text == streamed.content[0].text == whole.content[0].text != ""
    assert (streamed.stop_reason, streamed.usage.output_tokens) == ("max_tokens", 24)
    kinds = [event.type for event in client.messages.create(**wish, stream=True)]
    assert kinds[:2] == ["message_start", "content_block_start"] and kinds[-1] == "message_stop"

    greedy = {**wish, "extra_body": {"temperature": 0}}
    first = client.messages.create(**greedy).content[0].text
    stop = first[4:7]
    stopped = client.messages.create(**greedy, stop_sequences=[stop])
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", stop)
    assert "".join(block.text for block in stopped.content) == first[: first.index(stop)]
    prefilled = [*QUESTION, {"role": "assistant", "content": first[:10].rstrip()}]
    assert client.messages.create(**{**greedy, "messages": prefilled}).content
    long = [{"role": "user", "content": "once upon a time there was a file " * 12}]
    client.messages.create(**{**greedy, "messages": long})
    again = client.messages.create(**{**greedy, "messages": long}).usage
    counted = client.messages.count_tokens(model=MODEL, messages=long).input_tokens
    assert again.cache_read_input_tokens > 0 and again.input_tokens + again.cache_read_input_tokens == counted


def tools(client: anthropic.Anthropic) -> None:
    """A forced call, its result, a call of any tool, none, no parallel ones; streamed input; counted prompts."""
    wish: dict[str, Any] = {"model": MODEL, "max_tokens": 100, "tools": [WEATHER, TIME], "extra_body": SEED}
    forced = {"type": "tool", "name": "get_weather"}
    called = client.messages.create(**wish, messages=QUESTION, tool_choice=forced)
    (call,) = (block for block in called.content if block.type == "tool_use")
    assert called.stop_reason == "tool_use" and call.id.startswith("toolu_")
    assert call.name == "get_weather" and call.input["city"] in CITY["enum"]
    with client.messages.stream(**wish, messages=QUESTION, tool_choice=forced) as stream:
        pieces = [event.partial_json for event in stream if event.type == "input_json"]
        again = stream.get_final_message()
    assert "".join(pieces) and [block.input for block in again.content] == [block.input for block in called.content]
    result = {"type": "tool_result", "tool_use_id": call.id, "content": [{"type": "text", "text": "7 degrees"}]}
    turns = [*QUESTION, {"role": "assistant", "content": called.content}, {"role": "user", "content": [result]}]
    answered = client.messages.create(**wish, messages=turns, tool_choice={"type": "none"})
    assert answered.stop_reason in ("end_turn", "max_tokens")
    any_one = {"type": "any", "disable_parallel_tool_use": True}
    (other,) = client.messages.create(**wish, messages=QUESTION, tool_choice=any_one).content
    assert other.type == "tool_use" and other.name in ("get_weather", "get_time")
    with_tools = client.messages.count_tokens(model=MODEL, messages=turns, tools=[WEATHER, TIME]).input_tokens
    assert with_tools > client.messages.count_tokens(model=MODEL, messages=turns).input_tokens > 0


def tool_runner(client: anthropic.Anthropic) -> None:
    """The package's own loop: it calls a function, sends the result, and ends with text."""
    asked = []

    @beta_tool
    def get_weather(city: Literal["Paris", "Oslo"]) -> str:
        """The weather in a city.

        Args:
            city: Its name.
        """
        asked.append(city)
        return "7 degrees"

    choice = {"type": "tool", "name": "get_weather"}
    runner = client.beta.messages.tool_runner(
        model=MODEL,
        max_tokens=100,
        tools=[get_weather],
        messages=QUESTION,
        tool_choice=choice,
        max_iterations=2,
        extra_body=SEED,
    )
    assert [message.stop_reason for message in runner] == ["tool_use", "tool_use"] and asked


def typed(client: anthropic.Anthropic) -> None:
    """An answer by schema."""
    ask = [{"role": "user", "content": "Review it."}]
    parsed = client.messages.parse(model=MODEL, max_tokens=100, messages=ask, output_format=Review, extra_body=SEED)
    assert isinstance(parsed.parsed_output, Review), parsed


def models(client: anthropic.Anthropic) -> None:
    """The list, and one."""
    assert [model.id for model in client.models.list()] == [MODEL]
    card = client.models.retrieve(MODEL)
    assert card.display_name == MODEL and card.created_at.year >= 2025


def errors(client: anthropic.Anthropic) -> None:
    """Each as its class, with type and request id."""
    wish: dict[str, Any] = {"model": MODEL, "max_tokens": 4, "messages": QUESTION}
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "aGk="}}
    search = {"type": "web_search_20250305", "name": "web_search"}
    cases = [
        (anthropic.NotFoundError, "not_found_error", {"model": "other"}),
        (anthropic.BadRequestError, "invalid_request_error", {"extra_body": {"temperature": 99}}),
        (anthropic.BadRequestError, "invalid_request_error", {"messages": [{"role": "user", "content": [image]}]}),
        (anthropic.BadRequestError, "invalid_request_error", {"tools": [search]}),
        (
            anthropic.BadRequestError,
            "invalid_request_error",
            {"messages": [{"role": "user", "content": "word " * 9000}]},
        ),
    ]
    for cls, kind, change in cases:
        for stream in (False, True):
            try:
                client.messages.create(**{**wish, **change}, stream=stream)
            except cls as error:
                assert error.type == kind and error.request_id and error.error_code, error
            else:
                raise AssertionError(change)


async def asynchronous(url: str) -> None:
    """The asynchronous client: streams at once, and one left early."""
    async with anthropic.AsyncAnthropic(base_url=url, api_key="any", max_retries=0) as client:

        async def one(seed: int) -> str:
            wish = {"model": MODEL, "max_tokens": 12, "messages": QUESTION, "extra_body": {"seed": seed}}
            async with client.messages.stream(**wish) as stream:
                return await stream.get_final_text()

        texts = await asyncio.gather(*(one(seed) for seed in (1, 2, 1)))
        assert texts[0] == texts[2]
        async with client.messages.stream(model=MODEL, max_tokens=1000, messages=QUESTION) as left:
            first = await anext(text async for text in left.text_stream)
        assert first and len(left.current_message_snapshot.content[0].text) < 1000


if __name__ == "__main__":
    with anthropic.Anthropic(base_url=sys.argv[1], api_key="any", max_retries=0) as made:
        for check in (messages, tools, tool_runner, typed, models, errors):
            check(made)
    asyncio.run(asynchronous(sys.argv[1]))
    print("all calls answered")
