"""What carries a canary through every door, and ways in which it is refused. Labels, ids and names of models are no secrets."""

import json
from collections.abc import Iterator
from typing import Any

from protos.inference.v1 import inference_pb2 as pb

CANARY = "kanarienvogel7f3a"
SCHEMA = json.dumps({"type": "object", "properties": {CANARY: {"const": CANARY}}, "required": [CANARY]})
_SHORT = pb.StopConditions(max_tokens=3)


def grpc_calls() -> Iterator[tuple[str, Any]]:
    """Method and message: taken first, refused then."""
    yield from _taken()
    yield from _refused()


def _taken() -> Iterator[tuple[str, Any]]:
    stop = pb.StopConditions(max_tokens=3, stop_strings=[CANARY])
    cache, sampling = pb.CacheOptions(cache_salt=CANARY), pb.SamplingParams(bad_words=[CANARY])
    yield "Generate", pb.GenerateRequest(text=f"a {CANARY}", stop=stop, cache=cache, sampling=sampling)
    yield "GenerateStream", pb.GenerateRequest(text=f"a {CANARY}", stop=_SHORT)
    for structured in ({"json_schema": SCHEMA}, {"regex": f"{CANARY}[0-9]+"}, {"lark": f'start: "{CANARY}"'}):
        yield "Generate", pb.GenerateRequest(text=CANARY, stop=_SHORT, **structured)
    yield "Generate", pb.GenerateRequest(text=CANARY, stop=_SHORT, choice=pb.ChoiceList(choices=[CANARY, "b"]))
    yield "Embed", pb.EmbedRequest(inputs=[pb.EmbedInput(text=CANARY)])
    yield "Tokenize", pb.TokenizeRequest(text=CANARY)
    yield "CountTokens", pb.CountTokensRequest(generate=pb.GenerateRequest(text=CANARY))
    tool = pb.Tool(name="look", description=CANARY, parameters_json=SCHEMA)
    for method in ("Chat", "ChatStream"):
        yield method, pb.ChatRequest(stop=_SHORT, messages=_messages(), tools=[tool])


def _messages(role: str = "user", **fields: Any) -> list[pb.Message]:
    return [pb.Message(role="system", content=CANARY), pb.Message(role=role, content=f"say {CANARY}", **fields)]


def _refused() -> Iterator[tuple[str, Any]]:
    for structured in (
        {"json_schema": f'{{"type": "{CANARY}"}}'},
        {"json_schema": f'{{"type": "object", "{CANARY}'},
        {"json_schema": f'{{"$ref": "#/{CANARY}"}}'},
        {"json_schema": f'{{"type": "string", "format": "{CANARY}"}}'},
        {"json_schema": f'{{"type": "string", "pattern": "({CANARY}"}}'},
        {"regex": f"({CANARY}"},
        {"regex": f"(?<={CANARY})x"},
        {"lark": f"start: {CANARY}"},
        {"lark": f'start: "{CANARY}'},
        {"lark": f"%import {CANARY}.X\nstart: X"},
    ):
        yield "Generate", pb.GenerateRequest(text=CANARY, stop=_SHORT, **structured)
    long = f"{CANARY} " * 300
    yield "Generate", pb.GenerateRequest(text=f"{CANARY} " * 2_000)
    yield "Generate", pb.GenerateRequest(text=CANARY, stop=pb.StopConditions(stop_strings=[long]))
    yield "Generate", pb.GenerateRequest(text=CANARY, cache=pb.CacheOptions(cache_salt=long))
    yield "Generate", pb.GenerateRequest(text=CANARY, sampling=pb.SamplingParams(bad_words=[long, ""], top_p=7))
    yield "Chat", pb.ChatRequest(stop=_SHORT, messages=_messages(role=f"{CANARY} " * 30))
    yield "Chat", pb.ChatRequest(stop=_SHORT, messages=_messages(role=CANARY))
    yield "Chat", pb.ChatRequest(stop=_SHORT, messages=_messages(), template_arguments_json=f'{{"{CANARY}')
    yield "Chat", pb.ChatRequest(stop=_SHORT, messages=_messages(), template_arguments_json=f'["{CANARY}"]')
    for tool in (
        pb.Tool(name=f"{CANARY} {CANARY}"),
        pb.Tool(name="look", parameters_json=f'{{"{CANARY}'),
        pb.Tool(name="look", parameters_json=f'{{"type": "{CANARY}"}}'),
        pb.Tool(name="look", description=CANARY),
    ):
        choice = pb.ToolChoice(name=CANARY) if tool.description else None
        yield "Chat", pb.ChatRequest(stop=_SHORT, messages=_messages(), tools=[tool], tool_choice=choice)
    call = pb.ToolCall(id=CANARY, name=CANARY, arguments=f"{{{CANARY}")
    yield "Chat", pb.ChatRequest(stop=_SHORT, messages=_messages(role="assistant", tool_calls=[call]))
    yield "Generate", f"\x12\x30{CANARY}".encode()


def http_bodies() -> Iterator[tuple[str, bytes]]:
    """Path and body."""
    for path, base in (
        ("/v1/completions", {"prompt": CANARY, "max_tokens": 2}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": CANARY}], "max_tokens": 2}),
        ("/v1/messages", {"messages": [{"role": "user", "content": CANARY}], "max_tokens": 2}),
    ):
        for changes in _changes():
            yield path, json.dumps({**base, **changes}).encode()
        yield path, f'{{"prompt": "{CANARY}", nonsense'.encode()
        yield path, f'"{CANARY}"'.encode()
        yield path, f'{{"prompt": "{CANARY}", "x": "\\ud800"}}'.encode()
    parts = [
        [{"type": CANARY}],
        [{"type": "image_url", "image_url": {"url": f"http://{CANARY}"}}],
        {CANARY: 1},
        [CANARY],
    ]
    for path in ("/v1/chat/completions", "/v1/messages"):
        for content in parts:
            yield path, json.dumps({"max_tokens": 2, "messages": [{"role": "user", "content": content}]}).encode()
        yield path, json.dumps({"max_tokens": 2, "messages": [{"role": CANARY, "content": CANARY}]}).encode()
    yield "/v1/embeddings", json.dumps({"input": [CANARY], "encoding_format": CANARY}).encode()
    yield "/tokenize", json.dumps({"prompt": CANARY}).encode()
    yield "/tokenize", json.dumps({"prompt": [CANARY]}).encode()
    yield "/detokenize", json.dumps({"tokens": [CANARY]}).encode()


def _changes() -> Iterator[dict[str, Any]]:
    yield {}
    yield {"user": CANARY, "stop": [CANARY], "cache_salt": CANARY, "bad_words": [CANARY]}
    yield {"stop": [CANARY * 100]}
    yield {"temperature": CANARY}
    yield {"logit_bias": {"no token": CANARY}}  # bad keys, which should be token ids, are named
    yield {"logprobs": CANARY, "n": [CANARY]}
    yield {"response_format": {"type": CANARY}}
    yield {"response_format": {"type": "json_schema", "json_schema": {"name": CANARY, "schema": {"type": CANARY}}}}
    yield {"guided_regex": f"({CANARY}", "guided_json": CANARY}
    yield {"guided_grammar": f"start: {CANARY}"}
    yield {"guided_choice": [CANARY, 7]}
    yield {"tools": [{"type": "function", "function": {"name": f"{CANARY} x", "parameters": {"type": CANARY}}}]}
    yield {"tools": [{"type": CANARY}], "tool_choice": {"type": "function", "function": {"name": CANARY}}}
    yield {"tools": [{"type": CANARY, "name": CANARY, "input_schema": {"type": CANARY}}], "system": [{"type": CANARY}]}
    yield {"tools": [{"name": f"{CANARY} x", "input_schema": {"type": CANARY}}], "stop_sequences": [CANARY * 100]}
    yield {"thinking": {"type": CANARY}, "output_config": {"format": {"type": CANARY}}, "thread": {"type": CANARY}}
    yield {"metadata": {"a": 7, "b": [CANARY]}, "stream_options": {"include_usage": CANARY}}
    yield {"chat_template": f"{{{{ {CANARY} }}}}", "chat_template_kwargs": CANARY, "suffix": CANARY, "echo": CANARY}
    yield {"on_deadline": CANARY, "early_stopping": CANARY, "priority": CANARY, "truncate_prompt_tokens": CANARY}
