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
    """An agent that has to use its tool, gets its answer, and ends with text: by its default, Responses, and by chats."""
    agents.set_tracing_disabled(True)
    client = openai.AsyncOpenAI(base_url=url, api_key="any", max_retries=0)
    agents.set_default_openai_client(client, use_for_tracing=False)
    await agent("tiny")
    await agent(agents.OpenAIChatCompletionsModel(model="tiny", openai_client=client))
    first = await agents.Runner.run(typed("tiny"), "Hello.")
    after = await agents.Runner.run(typed("tiny"), "And?", previous_response_id=first.last_response_id)
    assert after.context_wrapper.usage.input_tokens > first.context_wrapper.usage.input_tokens


async def agent(model: str | agents.Model) -> None:
    """Whole and streamed."""
    asked = []

    @agents.function_tool
    def get_weather(city: City) -> str:
        """The weather in a city."""
        asked.append(city)
        return "7 degrees"

    weather = agents.Agent(
        name="weather",
        instructions="Tell the weather.",
        tools=[get_weather],
        model=model,
        model_settings=agents.ModelSettings(
            tool_choice="get_weather", parallel_tool_calls=False, max_tokens=100, extra_body={"seed": 3}
        ),
    )
    result = await agents.Runner.run(weather, "What is the weather in Oslo?", max_turns=4)
    assert len(asked) == 1 and asked[0] in {"Paris", "Oslo"}, asked
    assert result.final_output
    # The SDK takes no response that max_tokens cut off, so these end by themselves.
    for one in (weather.clone(tool_use_behavior="stop_on_first_tool"), typed(model)):
        streamed = agents.Runner.run_streamed(one, "And in Paris?")
        events = [event.type async for event in streamed.stream_events()]
        assert "raw_response_event" in events
        assert streamed.final_output
    assert len(asked) == 2


def typed(model: str | agents.Model) -> agents.Agent:
    """An agent whose answer has a schema."""
    settings = agents.ModelSettings(max_tokens=100)
    return agents.Agent(name="review", model=model, output_type=Review, model_settings=settings)


def langchain(url: str) -> None:
    """Chats and Responses: messages, a stream, a tool's round trip, typed answers in both ways; vectors."""
    for of_responses in (False, True):
        langchain_chat(url, use_responses_api=of_responses)
    embeddings = OpenAIEmbeddings(model="tiny", base_url=url, api_key="any", check_embedding_ctx_length=False)
    assert len(embeddings.embed_documents(["read a file", "open a socket"])) == 2


def langchain_chat(url: str, *, use_responses_api: bool) -> None:
    """Of one API."""

    @tool
    def get_weather(city: City) -> str:
        """The weather in a city."""
        return f"7 degrees in {city}"

    wish = {"max_tokens": 100, "extra_body": {"seed": 3}, "max_retries": 0, "use_responses_api": use_responses_api}
    model = ChatOpenAI(model="tiny", base_url=url, api_key="any", **wish)
    text = model.invoke("Write a function.").text
    assert "".join(chunk.text for chunk in model.stream("Write a function.")) == text != ""
    messages = [HumanMessage("What is the weather in Oslo?")]
    called = model.bind_tools([get_weather], tool_choice="get_weather", strict=True).invoke(messages)
    (call,) = called.tool_calls
    messages += [called, ToolMessage(get_weather.invoke(call["args"]), tool_call_id=call["id"])]
    assert model.bind_tools([get_weather]).invoke(messages).usage_metadata["input_tokens"] > 0
    for method in ("json_schema", "function_calling"):
        assert isinstance(model.with_structured_output(Review, method=method).invoke("Review it."), Review)


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
