"""OpenAI's Agents SDK, LangChain and Instructor against a running Quire: python agents_calls.py http://HOST:PORT/v1"""

import asyncio
import sys
from typing import Literal

import agents
import instructor
import openai
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAIEmbeddings
from pydantic import BaseModel, ConfigDict

City = Literal["Paris", "Oslo"]


class Review(BaseModel):
    """A typed answer. A model as small as ours would invent further fields as long as it may."""

    model_config = ConfigDict(extra="forbid")

    language: Literal["Python", "Rust"]
    stars: Literal[1, 2, 3]


async def agents_sdk(url: str) -> None:
    """An agent that has to use its tool, gets its answer, and ends with text."""
    asked = []

    @agents.function_tool
    def get_weather(city: City) -> str:
        """The weather in a city."""
        asked.append(city)
        return "7 degrees"

    agents.set_tracing_disabled(True)
    client = openai.AsyncOpenAI(base_url=url, api_key="any", max_retries=0)
    agent = agents.Agent(
        name="weather",
        instructions="Tell the weather.",
        tools=[get_weather],
        model=agents.OpenAIChatCompletionsModel(model="tiny", openai_client=client),
        model_settings=agents.ModelSettings(tool_choice="get_weather", max_tokens=100, extra_args={"seed": 3}),
    )
    result = await agents.Runner.run(agent, "What is the weather in Oslo?", max_turns=4)
    assert len(asked) == 1 and asked[0] in {"Paris", "Oslo"}, asked
    assert result.final_output
    streamed = agents.Runner.run_streamed(agent, "And in Paris?", max_turns=4)
    events = [event.type async for event in streamed.stream_events()]
    assert len(asked) == 2 and "raw_response_event" in events


def langchain(url: str) -> None:
    """Messages, a stream, a tool's round trip, typed answers in both ways, vectors."""

    @tool
    def get_weather(city: City) -> str:
        """The weather in a city."""
        return f"7 degrees in {city}"

    model = ChatOpenAI(model="tiny", base_url=url, api_key="any", max_tokens=100, seed=3, max_retries=0)
    text = model.invoke("Write a function.").content
    assert "".join(chunk.content for chunk in model.stream("Write a function.")) == text != ""
    messages = [HumanMessage("What is the weather in Oslo?")]
    called = model.bind_tools([get_weather], tool_choice="get_weather", strict=True).invoke(messages)
    (call,) = called.tool_calls
    messages += [called, ToolMessage(get_weather.invoke(call["args"]), tool_call_id=call["id"])]
    assert model.bind_tools([get_weather]).invoke(messages).usage_metadata["input_tokens"] > 0
    for method in ("json_schema", "function_calling"):
        assert isinstance(model.with_structured_output(Review, method=method).invoke("Review it."), Review)
    embeddings = OpenAIEmbeddings(model="tiny", base_url=url, api_key="any", check_embedding_ctx_length=False)
    assert len(embeddings.embed_documents(["read a file", "open a socket"])) == 2


def instructor_modes(url: str) -> None:
    """A typed answer by JSON schema and by a tool."""
    client = openai.OpenAI(base_url=url, api_key="any", max_retries=0)
    question = [{"role": "user", "content": "Review it."}]
    for mode in (instructor.Mode.JSON_SCHEMA, instructor.Mode.TOOLS):
        create = instructor.from_openai(client, mode=mode).chat.completions.create
        review = create(model="tiny", response_model=Review, messages=question, max_tokens=100, max_retries=0)
        assert isinstance(review, Review)


if __name__ == "__main__":
    asyncio.run(agents_sdk(*sys.argv[1:]))
    langchain(*sys.argv[1:])
    instructor_modes(*sys.argv[1:])
    print("all calls answered")
