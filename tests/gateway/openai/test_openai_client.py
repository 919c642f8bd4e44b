"""The official `openai` package against a real gateway whose scheduler the test plays: errors, deadlines, leaving, small routes.

What a real model answers: tests/e2e/test_openai.py.
"""

import asyncio
import contextlib
import hashlib
from collections.abc import AsyncIterator
from typing import Any

import httpx
import openai
import pytest

from protos.common.v1 import common_pb2
from protos.engine.v1 import engine_pb2
from protos.worker.v1 import worker_pb2
from svc_common import wire_arrays
from tests.support.services.models import tiny
from tests.support.services.scripted_engine import (
    Attachment,
    Gateway,
    asynchronous,
    engine,
    finished,
    gateway,
    pair,
    tokens,
)

pytestmark = pytest.mark.processes

USER = [{"role": "user", "content": "hi"}]
WORDS = tiny().encode("once upon a time")


@contextlib.asynccontextmanager
async def served(**changes: Any) -> AsyncIterator[tuple[Attachment, Gateway, openai.AsyncOpenAI]]:
    """A gateway, its scheduler's side, and the package as users have it, but without retries."""
    async with pair(**changes) as (_, attachment, running):
        base_url = f"http://{running.http}/v1"
        async with openai.AsyncOpenAI(base_url=base_url, api_key="x", timeout=20, max_retries=0) as client:
            yield attachment, running, client


def failed(handle: int, **fields: Any) -> engine_pb2.EngineMessage:
    """The scheduler refuses."""
    return engine_pb2.EngineMessage(
        failed=[engine_pb2.Failed(handle=handle, error=common_pb2.ErrorStatus(message="no", **fields))]
    )


ERRORS: list[tuple[str, str, type[openai.APIStatusError], int]] = [
    ("INVALID_ARGUMENT", "X", openai.BadRequestError, 400),
    ("OUT_OF_RANGE", "PROMPT_TOO_LONG", openai.BadRequestError, 400),
    ("UNAUTHENTICATED", "X", openai.AuthenticationError, 401),
    ("PERMISSION_DENIED", "X", openai.PermissionDeniedError, 403),
    ("NOT_FOUND", "MODEL_NOT_FOUND", openai.NotFoundError, 404),
    ("NOT_FOUND", "RESUME_EXPIRED", openai.APIStatusError, 410),
    ("ALREADY_EXISTS", "X", openai.ConflictError, 409),
    ("RESOURCE_EXHAUSTED", "QUEUE_FULL", openai.RateLimitError, 429),
    ("UNAVAILABLE", "NO_WORKER", openai.InternalServerError, 503),
    ("DEADLINE_EXCEEDED", "EXPIRED_IN_QUEUE", openai.InternalServerError, 504),
    ("INTERNAL", "BUG", openai.InternalServerError, 500),
]


@asynchronous
async def test_each_error_is_the_packages_own() -> None:
    """Class, status, code and request id, streamed or not: a stream that has not begun fails like any other answer."""
    async with served() as (attachment, _, client):
        for stream in (False, True):
            for status, reason, cls, number in ERRORS:
                asking = asyncio.ensure_future(
                    client.chat.completions.create(
                        model="tiny", messages=USER, stream=stream, extra_headers={"x-request-id": f"e-{number}"}
                    )
                )
                submit = await attachment.next_submit()
                attachment.send(failed(submit.handle, status=status, reason=reason, retry_after_ns=250_000_000))
                with pytest.raises(cls) as caught:
                    await asking
                error = caught.value
                assert (error.status_code, error.request_id) == (number, f"e-{number}")
                assert error.message and error.type
                headers = error.response.headers
                assert headers.get("www-authenticate") == ("Bearer" if number == 401 else None)
                if number == 401:
                    continue
                assert (headers["retry-after"], headers["retry-after-ms"]) == ("1", "250")
                assert int(headers["openai-processing-ms"]) >= 0


@asynchronous
async def test_an_error_behind_the_first_output_ends_the_stream() -> None:
    """The package raises in the middle; what came before was delivered."""
    async with served() as (attachment, _, client):
        asking = asyncio.ensure_future(client.chat.completions.create(model="tiny", messages=USER, stream=True))
        submit = await attachment.next_submit()
        attachment.send(tokens(submit.handle, 0, WORDS))
        stream = await asking
        attachment.send(failed(submit.handle, status="UNAVAILABLE", reason="NO_WORKER"))
        texts = []
        with pytest.raises(openai.APIError) as caught:
            async for chunk in stream:
                texts.append(chunk.choices[0].delta.content or "")
        assert caught.value.code == "no_worker"
        assert "once" in "".join(texts)


@asynchronous
async def test_the_package_comes_again_when_it_is_told_to() -> None:
    """429 with a retry time in milliseconds: its own retry is served."""
    async with served() as (attachment, _, client):
        again = client.with_options(max_retries=1)
        asking = asyncio.ensure_future(again.chat.completions.create(model="tiny", messages=USER, max_tokens=4))
        first = await attachment.next_submit()
        attachment.send(failed(first.handle, status="RESOURCE_EXHAUSTED", reason="QUEUE_FULL", retry_after_ns=10**7))
        second = await attachment.next_submit()
        assert second.handle != first.handle
        attachment.send(tokens(second.handle, 0, WORDS[:4]), finished(second.handle, 4))
        assert (await asking).choices[0].finish_reason == "length"


@pytest.mark.parametrize("stream", [True, False])
@asynchronous
async def test_leaving_cancels(stream: bool) -> None:
    """A closed stream, or a call that is given up, ends the request at the scheduler."""
    async with served() as (attachment, _, client):
        asking = asyncio.ensure_future(client.chat.completions.create(model="tiny", messages=USER, stream=stream))
        submit = await attachment.next_submit()
        attachment.send(tokens(submit.handle, 0, WORDS))
        if stream:
            opened = await asking
            assert (await anext(opened)).choices[0].delta.role == "assistant"
            await opened.close()
        else:
            asking.cancel()
        assert [cancel.handle for cancel in (await attachment.next()).cancels] == [submit.handle]


# --- headers ---------------------------------------------------------------------------------------------------------


@asynchronous
async def test_the_deadline_header() -> None:
    """Milliseconds left reach the scheduler, less a margin; nonsense is refused by its name; what is late is 504."""
    async with served() as (attachment, running, client):
        create = client.completions.create
        asking = asyncio.ensure_future(create(model="tiny", prompt="x", extra_headers={"x-request-timeout-ms": "1000"}))
        submit = await attachment.next_submit()
        assert 0.1e9 < submit.remaining_ns <= 1e9
        with pytest.raises(openai.InternalServerError) as caught:
            await asking
        assert (caught.value.status_code, caught.value.code) == (504, "expired_in_queue")
        assert caught.value.response.headers["x-should-retry"] == "false"
        for nonsense in ("0", "-5", "1.5", "soon", "", "1" * 13, "١"):
            headers = [(b"x-request-timeout-ms", nonsense.encode())]
            async with httpx.AsyncClient(base_url=f"http://{running.http}") as http:
                answer = await http.post("/v1/completions", json={"prompt": "x"}, headers=headers)
            assert answer.status_code == 400, nonsense
            assert answer.json()["error"]["param"] == "x-request-timeout-ms"


PATHS = [
    ("GET", "/v1/models", 200),
    ("GET", "/v1/models/tiny", 200),
    ("GET", "/v1/models/nope", 404),
    ("GET", "/health", 200),
    ("GET", "/health/live", 200),
    ("GET", "/health/ready", 200),
    ("GET", "/ping", 200),
    ("GET", "/version", 200),
    ("GET", "/openapi.json", 200),
    ("HEAD", "/v1/models", 200),
    ("HEAD", "/health", 200),
    ("GET", "/nothing", 404),
    ("GET", "/v1/chat/completions", 405),
    ("DELETE", "/v1/models", 405),
    ("OPTIONS", "/v1/models", 405),
    ("POST", "/v1/responses", 400),
    ("GET", "/v1/responses/resp_1", 404),
    ("POST", "/v1/completions", 400),
]


@asynchronous
async def test_every_answer_has_an_id_and_the_right_shape() -> None:
    """x-request-id, the client's own where it has one; errors of routing in OpenAI's shape; HEAD without a body."""
    async with pair() as (_, _, running), httpx.AsyncClient(base_url=f"http://{running.http}") as http:
        while (await http.get("/health")).status_code != 200:
            await asyncio.sleep(0.01)
        for method, path, status in PATHS:
            for sent in ({}, {"x-request-id": "mine"}):
                answer = await http.request(method, path, headers={"content-type": "application/json", **sent})
                assert answer.status_code == status, (method, path, answer.text)
                assert answer.headers["x-request-id"] == (sent.get("x-request-id") or answer.headers["x-request-id"])
                assert len(answer.headers["x-request-id"]) >= 4
                if method == "HEAD":
                    assert answer.content == b""
                elif status >= 400:
                    error = answer.json()["error"]
                    assert error["message"] and error["code"] and error["type"]
        assert "--enable-tokenizer-info-endpoint" in (await http.get("/tokenizer_info")).json()["error"]["message"]
        assert "GET" in (await http.options("/v1/models")).headers["allow"]


@asynchronous
async def test_all_but_health_is_taken_in_first() -> None:
    """A caller is looked at before anything is told: an id of no use is refused by every route that goes through the intake."""
    async with pair() as (_, _, running), httpx.AsyncClient(base_url=f"http://{running.http}") as http:
        routes = [("GET", "/v1/models"), ("GET", "/v1/models/tiny"), ("POST", "/tokenize"), ("POST", "/detokenize")]
        routes += [("POST", f"/v1/{name}") for name in ("completions", "chat/completions", "embeddings", "responses")]
        routes += [("GET", "/v1/responses/a"), ("DELETE", "/v1/responses/a"), ("GET", "/v1/responses/a/input_items")]
        routes.append(("POST", "/v1/responses/a/cancel"))
        for method, path in routes:
            answer = await http.request(method, path, headers={"x-request-id": "no good"})
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, "x-request-id")
        for path in ("/health/live", "/version", "/openapi.json"):
            assert (await http.get(path, headers={"x-request-id": "no good"})).status_code == 200


# --- small routes ----------------------------------------------------------------------------------------------------


@asynchronous
async def test_tokens_of_texts_and_conversations() -> None:
    """vLLM's shapes; a conversation has the tokens that a chat submits."""
    async with served() as (attachment, running, client), httpx.AsyncClient(base_url=f"http://{running.http}") as http:
        made = (await http.post("/tokenize", json={"prompt": "once upon", "return_token_strs": True})).json()
        assert made["tokens"] == tiny().encode("once upon")
        assert (made["count"], made["max_model_len"]) == (len(made["tokens"]), 2048)
        assert "".join(made["token_strs"]) == "onceĠupon"
        back = (await http.post("/detokenize", json={"tokens": made["tokens"]})).json()
        assert back == {"prompt": "once upon"}
        conversation = (await http.post("/tokenize", json={"model": "tiny", "messages": USER})).json()
        asking = asyncio.ensure_future(client.chat.completions.create(model="tiny", messages=USER))
        submit = await attachment.next_submit()
        assert conversation["tokens"] == wire_arrays.unpack(submit.token_ids, "x").tolist()
        asking.cancel()
        for path, body, status, param in (
            ("/tokenize", {}, 400, "prompt"),
            ("/tokenize", {"prompt": "x", "messages": USER}, 400, "prompt"),
            ("/tokenize", {"messages": [{"role": "user"}]}, 400, "messages[0].content"),
            ("/tokenize", {"prompt": "x", "model": "nope"}, 404, None),
            ("/detokenize", {"tokens": [10**6]}, 400, "tokens"),
            ("/detokenize", {"tokens": "x"}, 400, "tokens"),
        ):
            answer = await http.post(path, json=body)
            assert (answer.status_code, answer.json()["error"]["param"]) == (status, param), (path, body)


@asynchronous
async def test_a_developer_is_the_system_to_templates_that_know_none() -> None:
    """Equal tokens for both roles, unless the template speaks of developers itself."""
    knows = "{% for m in messages %}{{ m.role == 'developer' }}{{ m.content }}{% endfor %}"
    for template, are_equal in (("", True), (knows, False)):
        async with engine() as scheduler:
            bundle = worker_pb2.ModelBundle.FromString(scheduler.bundle)
            bundle.chat_template = template or bundle.chat_template
            scheduler.bundle = bundle.SerializeToString(deterministic=True)
            scheduler.welcome.limits.bundle_digest = hashlib.sha256(scheduler.bundle).hexdigest()
            async with (
                gateway(scheduler.address) as running,
                httpx.AsyncClient(base_url=f"http://{running.http}", timeout=20) as http,
            ):
                found = []
                for role in ("developer", "system"):
                    body = {"messages": [{"role": role, "content": "be kind"}, *USER]}
                    found.append((await http.post("/tokenize", json=body)).json()["tokens"])
        assert (found[0] == found[1]) == are_equal


@asynchronous
async def test_the_description_is_true() -> None:
    """Every path of /openapi.json is served, and every reference in it leads somewhere."""
    async with pair() as (_, _, running), httpx.AsyncClient(base_url=f"http://{running.http}") as http:
        document = (await http.get("/openapi.json")).json()
        for path, operations in document["paths"].items():
            for method in operations:
                answer = await http.request(method, path.replace("{name}", "tiny"))
                assert answer.status_code not in (405, 500), (method, path)
                assert '"code":"unknown_path"' not in answer.text, (method, path)
        schemas = document["components"]["schemas"]
        text = str(document)
        for reference in set(part.split("'")[0] for part in text.split("#/components/schemas/")[1:]):
            assert reference in schemas
        assert {"messages", "tools", "tool_choice", "response_format"} <= set(
            schemas["ChatCompletionRequest"]["properties"]
        )


@asynchronous
async def test_health_while_nothing_can_be_served() -> None:
    """503 with the reason on all three readiness paths; alive all the same."""
    async with pair() as (_, attachment, running), httpx.AsyncClient(base_url=f"http://{running.http}") as http:
        while (await http.get("/health")).status_code != 200:
            await asyncio.sleep(0.01)
        state = engine_pb2.ServiceState(serving=False, reason="the worker is gone")
        attachment.send(engine_pb2.EngineMessage(state=state))
        while (await http.get("/health")).status_code == 200:
            await asyncio.sleep(0.01)
        for path in ("/health", "/health/ready", "/ping"):
            answer = await http.get(path)
            assert (answer.status_code, answer.json()["reason"]) == (503, "the worker is gone")
        assert (await http.get("/health/live")).status_code == 200
