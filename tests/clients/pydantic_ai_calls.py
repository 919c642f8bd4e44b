"""Pydantic AI against a running Quire: python pydantic_ai_calls.py http://HOST:PORT/v1"""

import asyncio
import os
import sys
from typing import Any, Literal

import pydantic_ai
from pydantic import BaseModel, ConfigDict
from pydantic_ai.embeddings import Embedder
from pydantic_ai.exceptions import ModelHTTPError

MODELS = ("openai:tiny", "openai-chat:tiny")
"""By its default, Responses, and by chats."""
WISH: dict[str, Any] = {"max_tokens": 100, "extra_body": {"seed": 3}}


class Review(BaseModel):
    """A typed answer. A model as small as ours would invent further fields as long as it may."""

    model_config = ConfigDict(extra="forbid")

    language: Literal["Python", "Rust"]
    stars: Literal[1, 2, 3]


async def texts(name: str) -> None:
    """Whole and streamed, and a second turn."""
    agent = pydantic_ai.Agent(name, instructions="Be short.", model_settings=WISH)
    whole = await agent.run("Write a function.")
    async with agent.run_stream("Write a function.") as streamed:
        text = "".join([delta async for delta in streamed.stream_text(delta=True)])
    assert text == whole.output != ""
    assert streamed.usage.output_tokens == whole.usage.output_tokens > 0
    after = await agent.run("And a test.", message_history=whole.all_messages())
    assert after.usage.input_tokens > whole.usage.input_tokens > 0


async def typed(name: str) -> None:
    """An answer by a tool, which is the default, and by schema; whole and streamed."""
    for output in (Review, pydantic_ai.NativeOutput(Review), [Review, bool]):
        agent = pydantic_ai.Agent(name, output_type=output, model_settings=WISH)
        whole = await agent.run("Review it.")
        assert isinstance(whole.output, Review | bool)
        async with agent.run_stream("Review it.") as streamed:
            parts = [part async for part in streamed.stream_output(debounce_by=None)]
        assert parts[-1] == whole.output


async def tools(name: str) -> None:
    """An agent that has to call: its tool, whose result it gets, or its answer."""
    asked = []
    agent = pydantic_ai.Agent(name, output_type=Review)

    @agent.tool_plain
    def get_weather(city: Literal["Paris", "Oslo"]) -> str:
        """The weather in a city."""
        asked.append(city)
        return "7 degrees"

    for seed in range(40):
        settings = {"max_tokens": 200, "temperature": 2.0, "extra_body": {"seed": seed}}
        result = await agent.run("Review the weather in Oslo.", model_settings=settings)
        assert isinstance(result.output, Review)
        async with agent.run_stream_events("And in Paris?", model_settings=settings) as stream:
            kinds = {event.event_kind async for event in stream}
        assert kinds >= {"part_start", "part_end", "agent_run_result"}
        if "function_tool_result" in kinds and result.usage.requests > 1:
            break
    assert set(asked) <= {"Paris", "Oslo"} and len(asked) > 1


async def stored() -> None:
    """The next turn by the id of the response before it."""
    agent = pydantic_ai.Agent(MODELS[0], model_settings=WISH)
    first = await agent.run("Write a function.")
    settings = {"openai_previous_response_id": "auto"}
    after = await agent.run("And a test.", message_history=first.all_messages(), model_settings=settings)
    assert after.usage.input_tokens > first.usage.input_tokens


async def errors(name: str) -> None:
    """With their status."""
    try:
        await pydantic_ai.Agent(name).run("Hello.", model_settings={"top_p": 7.0})
    except ModelHTTPError as error:
        assert error.status_code == 400 and "top_p" in str(error.body), error
    else:
        raise AssertionError(name)


async def main() -> None:
    """Each kind of call once."""
    for name in MODELS:
        for check in (texts, typed, tools, errors):
            await check(name)
    await stored()
    vectors = await Embedder(MODELS[0]).embed_documents(["read a file", "open a socket"])
    assert len(vectors.embeddings) == 2


if __name__ == "__main__":
    os.environ |= {"OPENAI_BASE_URL": sys.argv[1], "OPENAI_API_KEY": "any"}
    asyncio.run(main())
    print("all calls answered")
