"""LlamaIndex against a running Quire, with its classes for servers like OpenAI's: python llama_index_calls.py http://HOST:PORT/v1"""

import asyncio
import sys
from typing import Any, Literal

from llama_index.core.llms import ChatMessage
from llama_index.core.llms.function_calling import FunctionCallingLLM
from llama_index.core.prompts import PromptTemplate
from llama_index.core.tools import FunctionTool
from llama_index.embeddings.openai_like import OpenAILikeEmbedding
from llama_index.llms.openai_like import OpenAILike, OpenAILikeResponses
from pydantic import BaseModel, ConfigDict

QUESTION = [ChatMessage("What is the weather in Oslo?")]
SEED = {"extra_body": {"seed": 3}}


class Review(BaseModel):
    """A typed answer. A model as small as ours would invent further fields as long as it may."""

    model_config = ConfigDict(extra="forbid")

    language: Literal["Python", "Rust"]
    stars: Literal[1, 2, 3]


def get_weather(city: Literal["Paris", "Oslo"]) -> str:
    """The weather in a city."""
    return f"7 degrees in {city}"


WEATHER = FunctionTool.from_defaults(get_weather)


async def texts(model: FunctionCallingLLM) -> None:
    """Of messages and of a prompt; whole, streamed, and asynchronous."""
    messages = [ChatMessage("Be short.", role="system"), *QUESTION]
    text = model.chat(messages).message.content
    assert "".join(part.delta for part in model.stream_chat(messages)) == text
    assert (await model.achat(messages)).message.content == text != ""
    assert "".join([part.delta async for part in await model.astream_chat(messages)]) == text
    completed = model.complete("def ").text
    assert "".join(part.delta for part in model.stream_complete("def ")) == completed != ""


async def tools(model: FunctionCallingLLM) -> None:
    """A forced call, whole and streamed; the library calls the function; the conversation goes on with the result."""
    wish: dict[str, Any] = {"chat_history": QUESTION, "tool_required": True, "allow_parallel_tool_calls": False}
    called = model.chat_with_tools([WEATHER], strict=True, **wish)
    (call,) = model.get_tool_calls_from_response(called)
    assert call.tool_name == "get_weather" and call.tool_kwargs["city"] in {"Paris", "Oslo"}
    *_, streamed = model.stream_chat_with_tools([WEATHER], strict=True, **wish)
    (again,) = model.get_tool_calls_from_response(streamed)
    assert again.tool_kwargs == call.tool_kwargs
    required = await model.achat_with_tools([WEATHER], chat_history=QUESTION, tool_required=True, strict=True)
    assert model.get_tool_calls_from_response(required, error_on_no_tool_call=True)
    output = WEATHER.call(**call.tool_kwargs).content
    result = ChatMessage(output, role="tool", additional_kwargs={"tool_call_id": call.tool_id})
    assert model.chat_with_tools([WEATHER], chat_history=[*QUESTION, called.message, result]).message.blocks
    assert model.predict_and_call([WEATHER], chat_history=QUESTION, tool_required=True, strict=True).sources


async def typed(model: FunctionCallingLLM) -> None:
    """Whole and asynchronous."""
    prompt = PromptTemplate("Review {name}.")
    assert isinstance(model.structured_predict(Review, prompt, name="it"), Review)
    assert isinstance(await model.astructured_predict(Review, prompt, name="it"), Review)
    assert isinstance(model.as_structured_llm(Review).chat(QUESTION).raw, Review)


async def typed_stream(model: FunctionCallingLLM) -> None:
    """By schema: a stream by tool is not forced by the library, so that a small model answers with text."""
    prompt = PromptTemplate("Review {name}.")
    *_, last = model.stream_structured_predict(Review, prompt, name="it")
    assert Review.model_validate(last.model_dump())
    *_, last = [part async for part in await model.astream_structured_predict(Review, prompt, name="it")]
    assert Review.model_validate(last.model_dump())


async def main(url: str) -> None:
    """Each kind of call once, by chats and by Responses."""
    server: dict[str, Any] = {"model": "tiny", "api_base": url, "api_key": "any", "max_retries": 0}
    of_chats = {"is_chat_model": True, "max_tokens": 100, "additional_kwargs": SEED, "context_window": 2048}
    chat = OpenAILike(**server, **of_chats, is_function_calling_model=True)
    by_schema = OpenAILike(**server, **of_chats, should_use_structured_outputs=True)
    completions = OpenAILike(**server, max_tokens=12, additional_kwargs=SEED, context_window=2048)
    responses = OpenAILikeResponses(
        **server, max_output_tokens=100, additional_kwargs=SEED, is_function_calling_model=True, context_window=2048
    )
    for model in (chat, responses):
        for check in (texts, tools, typed):
            await check(model)
    await typed(by_schema)
    await typed_stream(by_schema)
    await texts(completions)
    vectors = OpenAILikeEmbedding(model_name="tiny", api_base=url).get_text_embedding_batch(["read a file", "a socket"])
    assert len(vectors) == 2 and len(vectors[0]) == len(vectors[1])


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
    print("all calls answered")
