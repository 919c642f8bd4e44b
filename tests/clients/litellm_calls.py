"""LiteLLM against a running Quire, as its users call it: python litellm_calls.py http://HOST:PORT/v1"""

import asyncio
import json
import sys
from typing import Any

import litellm

MESSAGES = [{"role": "user", "content": "Write a function."}]
SCHEMA = {
    "type": "object",
    "properties": {"city": {"enum": ["Paris", "Oslo"]}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "function": {"name": "get_weather", "parameters": SCHEMA}}
NAMED = {"type": "function", "function": {"name": "get_weather"}}


def main(url: str) -> None:
    """Each kind of call once."""
    server = {"api_base": url, "api_key": "any", "num_retries": 0}
    chats(server, "openai")
    completions_and_embeddings(server)
    responses(server)
    anthropic = {**server, "api_base": url.removesuffix("/v1")}
    chats(anthropic, "anthropic")
    asyncio.run(messages(server, anthropic))


def chats(server: dict[str, Any], provider: str) -> None:
    """Chats, which LiteLLM sends in the provider's own form."""
    chat = {"model": f"{provider}/tiny", "messages": MESSAGES, "max_tokens": 12, "temperature": 0.0, **server}

    whole = litellm.completion(**chat)
    text = whole.choices[0].message.content
    assert text and whole.usage.completion_tokens <= 12
    chunks = list(litellm.completion(**chat, stream=True, stream_options={"include_usage": True}))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == text

    tools = {**chat, "max_tokens": 200, "tools": [TOOL], "tool_choice": NAMED}
    (call,) = litellm.completion(**tools).choices[0].message.tool_calls
    assert json.loads(call.function.arguments)["city"] in {"Paris", "Oslo"}
    streamed = litellm.stream_chunk_builder(list(litellm.completion(**tools, stream=True)))
    assert streamed.choices[0].message.tool_calls[0].function.arguments == call.function.arguments
    required = litellm.completion(**{**tools, "tool_choice": "required", "parallel_tool_calls": False})
    assert required.choices[0].finish_reason == "tool_calls"

    wish = {"type": "json_schema", "json_schema": {"name": "place", "strict": True, "schema": SCHEMA}}
    typed = litellm.completion(**{**chat, "max_tokens": 100}, response_format=wish)
    assert json.loads(typed.choices[0].message.content)["city"] in {"Paris", "Oslo"}

    wrongs = (({"temperature": 99.0}, litellm.BadRequestError), ({"model": f"{provider}/none"}, litellm.NotFoundError))
    for wrong, kind in wrongs:
        try:
            litellm.completion(**{**chat, **wrong})
        except kind:
            continue
        raise AssertionError(wrong)


def completions_and_embeddings(server: dict[str, Any]) -> None:
    """Several answers, text completion, vectors."""
    two = litellm.completion(model="openai/tiny", messages=MESSAGES, n=2, max_tokens=5, seed=3, **server)
    assert len(two.choices) == 2
    prompt = {"model": "text-completion-openai/tiny", "prompt": "def ", "max_tokens": 5, **server}
    assert litellm.text_completion(**prompt).choices[0].text
    vectors = litellm.embedding(model="openai/tiny", input=["read a file", "open a socket"], **server).data
    assert len(vectors) == 2 and len(vectors[0]["embedding"]) == len(vectors[1]["embedding"])


def responses(server: dict[str, Any]) -> None:
    """Whole and streamed, a forced call, and its result by the id of the response."""
    wish = {"model": "openai/tiny", "input": "Write a function.", "max_output_tokens": 12, "temperature": 0.0, **server}
    text = litellm.responses(**wish).output_text
    events = list(litellm.responses(**wish, stream=True))
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == text != ""
    tool = {"type": "function", **TOOL["function"]}
    forced = {"tools": [tool], "tool_choice": {"type": "function", "name": "get_weather"}, "max_output_tokens": 100}
    called = litellm.responses(**{**wish, **forced, "parallel_tool_calls": False})
    (call,) = called.output
    assert json.loads(call.arguments)["city"] in {"Paris", "Oslo"}
    result = [{"type": "function_call_output", "call_id": call.call_id, "output": "7 degrees"}]
    assert litellm.responses(**{**wish, "input": result}, previous_response_id=called.id).output_text


async def messages(server: dict[str, Any], anthropic: dict[str, Any]) -> None:
    """Its call in Anthropic's form, sent so or as a Responses request. Its stream needs LiteLLM's proxy."""
    for model, where in (("anthropic/tiny", anthropic), ("openai/tiny", server)):
        answered = await litellm.anthropic_messages(model=model, messages=MESSAGES, max_tokens=12, **where)
        assert answered["content"][0]["text"] and answered["stop_reason"] == "max_tokens"


if __name__ == "__main__":
    main(*sys.argv[1:])
    print("all calls answered")
