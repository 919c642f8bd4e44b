"""LiteLLM against a running Quire, as its users call it: python litellm_calls.py http://HOST:PORT/v1"""

import json
import sys

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
    chat = {"model": "openai/tiny", "messages": MESSAGES, "max_tokens": 12, "seed": 3, **server}

    whole = litellm.completion(**chat)
    text = whole.choices[0].message.content
    assert text and whole.usage.completion_tokens <= 12
    chunks = list(litellm.completion(**chat, stream=True, stream_options={"include_usage": True}))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == text
    assert len(litellm.completion(**chat, n=2).choices) == 2

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

    prompt = {"model": "text-completion-openai/tiny", "prompt": "def ", "max_tokens": 5, **server}
    assert litellm.text_completion(**prompt).choices[0].text
    vectors = litellm.embedding(model="openai/tiny", input=["read a file", "open a socket"], **server).data
    assert len(vectors) == 2 and len(vectors[0]["embedding"]) == len(vectors[1]["embedding"])

    for wrong, kind in (({"top_p": 7}, litellm.BadRequestError), ({"model": "openai/none"}, litellm.NotFoundError)):
        try:
            litellm.completion(**{**chat, **wrong})
        except kind:
            continue
        raise AssertionError(wrong)


if __name__ == "__main__":
    main(*sys.argv[1:])
    print("all calls answered")
