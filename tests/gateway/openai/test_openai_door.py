"""The HTTP door on a real stack: the official client, streams, errors in OpenAI's shape."""

import asyncio
import json
import time
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

from tests.gateway.test_grpc_door import FREE_WITHIN_S, free_blocks, until_free
from tests.support.services.scripted_engine import asynchronous
from tests.support.services.served_stack import ServedStack

pytestmark = pytest.mark.processes

JSON = {"content-type": "application/json"}
CHAT = [{"role": "user", "content": "hello"}]


@pytest.fixture
def client(stack: ServedStack) -> Iterator[openai.OpenAI]:
    """The official client, unchanged."""
    with openai.OpenAI(base_url=f"{stack.http_url}/v1", api_key="anything", timeout=20, max_retries=0) as made:
        yield made


@pytest.fixture
def http(stack: ServedStack) -> Iterator[httpx.Client]:
    """Plain HTTP."""
    with httpx.Client(base_url=stack.http_url, timeout=20) as made:
        yield made


# --- the official client ---------------------------------------------------------------------------------------------


def test_completion_whole_and_streamed(client: openai.OpenAI) -> None:
    """Equal text, finish reason and usage."""
    wish: dict[str, Any] = {"model": "simulated", "prompt": "hello", "max_tokens": 12, "seed": 5}
    whole = client.completions.create(**wish)
    chunks = list(client.completions.create(**wish, stream=True, stream_options={"include_usage": True}))
    assert whole.object == "text_completion"
    assert len(whole.choices[0].text) == 12
    assert "".join(chunk.choices[0].text for chunk in chunks if chunk.choices) == whole.choices[0].text
    assert chunks[-2].choices[0].finish_reason == whole.choices[0].finish_reason == "length"
    assert chunks[-1].usage == whole.usage
    assert (whole.usage.prompt_tokens, whole.usage.completion_tokens, whole.usage.total_tokens) == (5, 12, 17)
    assert len({chunk.id for chunk in chunks}) == 1


def test_chat_whole_and_streamed(client: openai.OpenAI) -> None:
    """The first chunk has the role, the last the finish reason; without include_usage there is no usage chunk."""
    wish: dict[str, Any] = {"model": "simulated", "messages": CHAT, "max_completion_tokens": 9, "seed": -3}
    whole = client.chat.completions.create(**wish)
    chunks = list(client.chat.completions.create(**wish, stream=True))
    assert whole.choices[0].message.role == chunks[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == whole.choices[0].message.content
    assert (whole.choices[0].finish_reason, chunks[-1].choices[0].finish_reason) == ("length", "length")
    assert all(chunk.usage is None for chunk in chunks)
    assert whole.id.startswith("chatcmpl-")


@asynchronous
async def test_the_asynchronous_client(stack: ServedStack) -> None:
    """Streams of several conversations at once."""
    async with openai.AsyncOpenAI(base_url=f"{stack.http_url}/v1", api_key="x", timeout=20) as client:

        async def one(seed: int) -> str:
            stream = await client.chat.completions.create(
                model="simulated", messages=CHAT, seed=seed, max_tokens=10, stream=True
            )
            return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

        texts = await asyncio.gather(*(one(seed) for seed in (1, 2, 1)))
    assert texts[0] == texts[2] != texts[1]


def test_prompts_in_every_form(client: openai.OpenAI) -> None:
    """A string, tokens, several strings, several token lists; choices in the order of prompts, streamed and not."""
    wish: dict[str, Any] = {"model": "simulated", "max_tokens": 7, "seed": 1}
    texts = [client.completions.create(prompt=p, **wish).choices[0].text for p in ("ab", "cd")]
    assert texts[0] != texts[1]
    assert client.completions.create(prompt=[97, 98], **wish).choices[0].text == texts[0]
    for prompts in (["ab", "cd"], [[97, 98], [99, 100]]):
        whole = client.completions.create(prompt=prompts, **wish)
        assert [(choice.index, choice.text) for choice in whole.choices] == list(enumerate(texts))
        assert (whole.usage.prompt_tokens, whole.usage.completion_tokens) == (4, 14)
        streamed = ["", ""]
        for chunk in client.completions.create(prompt=prompts, stream=True, **wish):
            streamed[chunk.choices[0].index] += chunk.choices[0].text
        assert streamed == texts


def test_stop_strings(client: openai.OpenAI) -> None:
    """One as a string, several as a list; finish_reason is stop and text ends before it."""
    wish: dict[str, Any] = {"model": "simulated", "prompt": "hello", "max_tokens": 40, "seed": 5}
    whole = client.completions.create(**wish).choices[0].text
    for stop in (whole[6:8], ["never there", whole[6:8]]):
        choice = client.completions.create(**wish, stop=stop).choices[0]
        assert (choice.text, choice.finish_reason) == (whole[: whole.index(whole[6:8])], "stop")
        assert choice.stop_reason == whole[6:8]


def test_logprobs(client: openai.OpenAI) -> None:
    """Of the chosen tokens, in the shapes of completions and chat, streamed and not."""
    wish: dict[str, Any] = {"model": "simulated", "max_tokens": 5, "seed": 5}
    found = client.completions.create(prompt="x", logprobs=1, **wish).choices[0]
    assert found.logprobs.text_offset == [0, 1, 2, 3, 4]
    assert "".join(found.logprobs.tokens) == found.text
    assert all(logprob <= 0 for logprob in found.logprobs.token_logprobs)
    parts = [c.choices[0].logprobs for c in client.completions.create(prompt="x", logprobs=0, stream=True, **wish)]
    assert [p for part in parts if part for p in part.token_logprobs] == found.logprobs.token_logprobs
    assert [o for part in parts if part for o in part.text_offset] == [0, 1, 2, 3, 4]
    chat = client.chat.completions.create(messages=CHAT, logprobs=True, **wish).choices[0]
    assert "".join(entry.token for entry in chat.logprobs.content) == chat.message.content
    assert all(bytes(entry.bytes).decode() == entry.token for entry in chat.logprobs.content)


def test_extra_fields_of_vllm(client: openai.OpenAI) -> None:
    """top_k, min_tokens, ignore_eos and stop_token_ids work through extra_body; unknown fields are accepted."""
    wish: dict[str, Any] = {"model": "simulated", "prompt": "hello", "max_tokens": 20, "seed": 5}
    whole = client.completions.create(**wish).choices[0].text
    token = ord(whole[3])
    stopped = client.completions.create(**wish, extra_body={"stop_token_ids": [token], "unheard_of": 1}).choices[0]
    assert (stopped.finish_reason, stopped.stop_reason) == ("stop", token)
    assert stopped.text == whole[: whole.index(chr(token))]
    later = client.completions.create(
        **wish, extra_body={"stop_token_ids": [token], "min_tokens": 10, "top_k": -1, "ignore_eos": True}
    )
    assert later.usage.completion_tokens >= 10


def test_groups_and_vectors(client: openai.OpenAI) -> None:
    """n choices in completions and chat, each its own; embeddings by the client's own base64."""
    wish: dict[str, Any] = {"model": "simulated", "seed": 5, "max_tokens": 6, "n": 3}
    texts = [choice.text for choice in client.completions.create(prompt="x", **wish).choices]
    assert len(set(texts)) == 3
    streamed = [""] * 3
    for chunk in client.completions.create(prompt="x", stream=True, **wish):
        streamed[chunk.choices[0].index] += chunk.choices[0].text
    assert streamed == texts
    chat = client.chat.completions.create(messages=CHAT, logprobs=True, top_logprobs=2, **wish)
    assert [choice.index for choice in chat.choices] == [0, 1, 2]
    assert all(len(entry.top_logprobs) == 2 for choice in chat.choices for entry in choice.logprobs.content)
    beams = client.completions.create(
        model="simulated", prompt="x", n=2, max_tokens=6, extra_body={"use_beam_search": True}
    )
    assert len({choice.text for choice in beams.choices}) == 2
    made = client.embeddings.create(model="simulated", input=["ab", "abc"])
    assert [sum(value**2 for value in entry.embedding) for entry in made.data] == [pytest.approx(1, abs=1e-5)] * 2


def test_chat_content_in_parts(client: openai.OpenAI) -> None:
    """Text parts are joined."""
    parts = [{"type": "text", "text": "hel"}, {"type": "text", "text": "lo"}]
    answers = [
        client.chat.completions.create(
            model="simulated", messages=[{"role": "user", "content": content}], seed=1, max_tokens=6
        )
        for content in (parts, "hello")
    ]
    assert answers[0].choices[0].message.content == answers[1].choices[0].message.content


def test_models(client: openai.OpenAI) -> None:
    """Listed and by name; an unknown one is 404."""
    assert [model.id for model in client.models.list()] == ["simulated"]
    assert client.models.retrieve("simulated").owned_by == "quire"
    with pytest.raises(openai.NotFoundError) as caught:
        client.models.retrieve("org/other")
    assert caught.value.code == "model_not_found"


# --- errors ----------------------------------------------------------------------------------------------------------


def test_neutral_values_are_accepted(http: httpx.Client) -> None:
    """What clients send by default and changes nothing."""
    neutral = {"n": 1, "best_of": 1, "echo": False, "logit_bias": {}, "presence_penalty": 0, "frequency_penalty": 0.0}
    neutral |= {"tools": None, "response_format": {"type": "text"}, "user": "me", "suffix": None, "top_logprobs": 0}
    assert http.post("/v1/completions", json={"prompt": "x", "max_tokens": 1, **neutral}).status_code == 200


@pytest.mark.parametrize(
    ("body", "param", "code"),
    [
        ({"prompt": "x", "top_p": 0}, "top_p", "invalid_field"),
        ({"prompt": "x", "max_tokens": 0}, "max_tokens", "invalid_field"),
        ({"prompt": "x", "max_tokens": "many"}, "max_tokens", "invalid_field"),
        ({"prompt": "x", "max_tokens": True}, "max_tokens", "invalid_field"),
        ({"prompt": "x", "max_tokens": 10**30}, "max_tokens", "invalid_field"),
        ({"prompt": "x", "temperature": 1e39}, "temperature", "invalid_field"),
        ({"prompt": "x", "stop": ["a"] * 17}, "stop", "invalid_field"),
        ({"prompt": "x", "stop": [""]}, "stop", "invalid_field"),
        ({"prompt": ""}, "prompt", "invalid_field"),
        ({"prompt": []}, "prompt", "unsupported_field"),
        ({"prompt": [1, "x"]}, "prompt", "invalid_field"),
        ({"prompt": [400]}, "prompt", "invalid_field"),
        ({"prompt": {"x": 1}}, "prompt", "invalid_field"),
        ({}, "prompt", "invalid_field"),
        ({"prompt": "x" * 5000}, None, "context_length_exceeded"),
    ],
)
def test_a_bad_parameter_is_named(http: httpx.Client, body: dict[str, Any], param: str | None, code: str) -> None:
    """400 with OpenAI's error object, whether a stream was wanted or not."""
    for stream in (False, True):
        answer = http.post("/v1/completions", json={**body, "stream": stream})
        assert answer.status_code == 400, answer.text
        error = answer.json()["error"]
        assert (error["param"], error["code"], bool(error["message"])) == (param, code, True)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b'{"prompt": "\xff"}',
        b'{"prompt": "\\ud800"}',
        b'{"prompt": "x", "top_p": NaN}',
        b"[" * 100_000,
        b'{"a": ' * 5000,
    ],
)
def test_a_bad_body_is_400(http: httpx.Client, body: bytes) -> None:
    """No JSON, no object, no UTF-8, half a surrogate, NaN, nested too deeply."""
    answer = http.post("/v1/completions", content=body, headers=JSON)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "body")


@pytest.mark.parametrize("kind", ["image_url", "input_audio", "video_url"])
def test_other_inputs_than_text_are_refused(http: httpx.Client, kind: str) -> None:
    """An image, sound or film in a message: 400, with the part's place, its type, and what is served."""
    parts = [{"type": "text", "text": "What is this?"}, {"type": kind, kind: {"url": "https://example.org/x"}}]
    answer = http.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": parts}]})
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, "messages[0].content[1]")
    assert error["message"] == f"messages[0].content[1]: is of type {kind}; this server takes text only"


def test_other_errors_have_their_status(http: httpx.Client) -> None:
    """Too large, unknown model, unknown path, wrong method, unsupported content, no messages."""
    chat = "/v1/chat/completions"
    image = {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}
    cases = [
        (http.post("/v1/completions", content=b" " * (4 * 2**20 + 1), headers=JSON), 413),
        (http.post("/v1/completions", json={"prompt": "x", "model": "nope"}), 404),
        (http.get("/v1/nothing"), 404),
        (http.get("/v1/completions"), 405),
        (http.post(chat, json=image), 400),
        (http.post(chat, json={"messages": []}), 400),
        (http.post("/v1/completions", json={"prompt": "x"}, headers={"x-request-id": "a b"}), 400),
    ]
    for answer, status in cases:
        assert answer.status_code == status
        assert answer.json()["error"]["message"]


def test_ids_and_trace_in_the_headers(http: httpx.Client) -> None:
    """x-request-id echoed, x-trace-id the caller's; the answer's id contains the request's."""
    trace_id = "0af7651916cd43dd8448eb211c80319c"
    sent = {"x-request-id": "web-7", "traceparent": f"00-{trace_id}-b7ad6b7169203331-01"}
    for stream in (False, True):
        answer = http.post("/v1/completions", json={"prompt": "x", "max_tokens": 2, "stream": stream}, headers=sent)
        assert (answer.headers["x-request-id"], answer.headers["x-trace-id"]) == ("web-7", trace_id)
        assert "cmpl-web-7" in answer.text


def test_health(http: httpx.Client) -> None:
    """Live and ready."""
    assert http.get("/health/live").json() == {"status": "live"}
    assert http.get("/health/ready").json() == {"status": "ready"}


def test_sse_ends_with_done(http: httpx.Client) -> None:
    """The wire itself: events, data lines, the end mark."""
    answer = http.post("/v1/completions", json={"prompt": "x", "max_tokens": 3, "stream": True})
    assert answer.headers["content-type"].startswith("text/event-stream")
    events = answer.text.split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""]
    assert all(json.loads(event.removeprefix("data: "))["object"] == "text_completion" for event in events[:-2])


# --- leaving ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [True, False])
@asynchronous
async def test_a_disconnect_frees_the_blocks(stack: ServedStack, stream: bool) -> None:
    """The connection is closed in the middle: nothing is left in the scheduler."""
    await until_free(stack)
    async with httpx.AsyncClient(base_url=stack.http_url, timeout=20) as client:
        body = {"prompt": "x", "max_tokens": 4000, "stream": stream}
        asking = asyncio.create_task(client.post("/v1/completions", json=body))
        begin = time.monotonic()
        while not (await free_blocks(stack))[0]:
            assert time.monotonic() - begin < FREE_WITHIN_S
            await asyncio.sleep(0.01)
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
    await until_free(stack)
