"""The Messages routes of a real gateway whose scheduler the test plays: streams, errors, keys, deadlines, leaving.

What a real model answers: tests/e2e/test_messages.py.
"""

import asyncio
import contextlib
import hashlib
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from protos.common.v1 import common_pb2
from protos.engine.v1 import engine_pb2
from protos.worker.v1 import worker_pb2
from tests.gateway.anthropic.test_message_events import DocumentedReader
from tests.gateway.openai.test_openai_tools import CITIES, CONTENT, SCHEMA, TEMPLATE, THOUGHT, play
from tests.support.services.access_keys import KEYS, bearer, tenants_file
from tests.support.services.models import tiny
from tests.support.services.scripted_engine import Attachment, asynchronous, engine, finished, gateway, pair, tokens

pytestmark = pytest.mark.processes

USER = [{"role": "user", "content": "What is the weather in Rome and Oslo?"}]
WISH: dict[str, Any] = {"model": "tiny", "max_tokens": 500, "messages": USER}
TOOLS = [{"name": "weather", "input_schema": SCHEMA}]
VERSION = {"anthropic-version": "2023-06-01"}
ANSWER_S = 20.0


@contextlib.asynccontextmanager
async def served(**changes: Any) -> AsyncIterator[tuple[Attachment, httpx.AsyncClient]]:
    """A gateway whose model calls as Hermes and thinks as Qwen do, its scheduler's side, and a client of it."""
    async with engine() as scheduler:
        bundle = worker_pb2.ModelBundle.FromString(scheduler.bundle)
        bundle.chat_template = TEMPLATE
        scheduler.bundle = bundle.SerializeToString(deterministic=True)
        scheduler.welcome.limits.bundle_digest = hashlib.sha256(scheduler.bundle).hexdigest()
        async with (
            gateway(scheduler.address, **changes) as running,
            httpx.AsyncClient(base_url=f"http://{running.http}", headers=VERSION, timeout=ANSWER_S) as http,
        ):
            yield await scheduler.attached(), http


def events_of(text: str) -> list[dict[str, Any]]:
    """Events of a stream's text, each named by its type."""
    found = []
    for part in filter(None, text.split("\n\n")):
        name, data = part.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        found.append(event)
    return found


def failed(handle: int, **fields: Any) -> engine_pb2.EngineMessage:
    """The scheduler refuses."""
    return engine_pb2.EngineMessage(
        failed=[engine_pb2.Failed(handle=handle, error=common_pb2.ErrorStatus(message="no", **fields))]
    )


@pytest.mark.parametrize("num_per_run", [1, 7, 1000])
@asynchronous
async def test_thinking_text_and_calls(num_per_run: int) -> None:
    """Blocks in the order of the output, whole and streamed alike, however tokens come; the prompt is that of the turns."""
    async with served() as (attachment, http):
        answers = []
        for stream in (False, True):
            playing = asyncio.ensure_future(play(attachment, num_per_run=num_per_run))
            answers.append(await http.post("/v1/messages", json={**WISH, "tools": TOOLS, "stream": stream}))
            submit = await playing
        assert submit.stop.max_tokens == 500
    whole, streamed = answers
    assert [answer.status_code for answer in answers] == [200, 200]
    assert streamed.headers["content-type"].startswith("text/event-stream")
    reader = DocumentedReader()
    for event in events_of(streamed.text):
        reader.read(event)
    assert reader.state == "over"
    message = whole.json()
    assert message["id"] == f"msg_{whole.headers['request-id']}" == f"msg_{whole.headers['x-request-id']}"
    for answer in (message, reader.message):
        thought, text, *calls = answer["content"]
        assert (thought["type"], thought["thinking"]) == ("thinking", THOUGHT)
        assert (text["type"], text["text"].strip()) == ("text", CONTENT.strip())
        assert [(call["name"], call["input"]) for call in calls] == [("weather", {"city": city}) for city in CITIES]
        assert len({call["id"] for call in calls}) == len(CITIES)
        assert (answer["stop_reason"], answer["stop_sequence"]) == ("tool_use", None)
        assert (answer["usage"]["input_tokens"], answer["usage"]["cache_read_input_tokens"]) == (2, 1)
        assert answer["usage"]["output_tokens_details"]["thinking_tokens"] > 0


@asynchronous
async def test_thinking_reaches_the_template() -> None:
    """`disabled` closes the template's thinking; a carried thought is in the next prompt's tokens or not by the template."""
    async with served() as (_, http):
        counts = {}
        for kind in ("disabled", "adaptive"):
            body = {"model": "tiny", "messages": USER, "thinking": {"type": kind}}
            counts[kind] = (await http.post("/v1/messages/count_tokens", json=body)).json()["input_tokens"]
        # This template ends with an empty thought where thinking is on.
        marks = len(tiny().encode("<think></think>"))
        assert counts["adaptive"] == counts["disabled"] + marks


@asynchronous
async def test_a_stop_sequence_is_named() -> None:
    """The output ends before it."""
    async with served() as (attachment, http):
        playing = asyncio.ensure_future(play(attachment, "one two three"))
        message = (await http.post("/v1/messages", json={**WISH, "stop_sequences": ["x", " two"]})).json()
        await playing
    assert (message["stop_reason"], message["stop_sequence"]) == ("stop_sequence", " two")
    assert [block["text"] for block in message["content"]] == ["one"]


ERRORS = [
    ("INVALID_ARGUMENT", "INVALID_FIELD", 400, "invalid_request_error"),
    ("PERMISSION_DENIED", "X", 403, "permission_error"),
    ("NOT_FOUND", "MODEL_NOT_FOUND", 404, "not_found_error"),
    ("ALREADY_EXISTS", "X", 409, "conflict_error"),
    ("RESOURCE_EXHAUSTED", "QUEUE_FULL", 429, "rate_limit_error"),
    ("INTERNAL", "BUG", 500, "api_error"),
    ("UNAVAILABLE", "NO_WORKER", 503, "overloaded_error"),
    ("DEADLINE_EXCEEDED", "EXPIRED_IN_QUEUE", 504, "timeout_error"),
]


@asynchronous
async def test_errors_before_the_first_output() -> None:
    """Status, type, reason and request id, streamed or not."""
    async with served() as (attachment, http):
        for stream in (False, True):
            for number, (status, reason, code, kind) in enumerate(ERRORS):
                name = f"e-{stream}-{number}"
                asking = asyncio.ensure_future(
                    http.post("/v1/messages", json={**WISH, "stream": stream}, headers={"x-request-id": name})
                )
                submit = await attachment.next_submit()
                attachment.send(failed(submit.handle, status=status, reason=reason, retry_after_ns=250_000_000))
                answer = await asking
                assert (answer.status_code, answer.headers["request-id"]) == (code, name)
                body = answer.json()
                assert (body["type"], body["error"]["type"], body["request_id"]) == ("error", kind, name)
                assert body["error"]["details"] == {"error_code": reason.lower()} and body["error"]["message"]


@asynchronous
async def test_an_error_behind_the_first_output() -> None:
    """Is the stream's last event."""
    async with served() as (attachment, http):
        asking = asyncio.ensure_future(http.post("/v1/messages", json={**WISH, "stream": True}))
        submit = await attachment.next_submit()
        attachment.send(tokens(submit.handle, 0, tiny().encode("once upon a time")))
        await asyncio.sleep(0.05)
        attachment.send(failed(submit.handle, status="UNAVAILABLE", reason="NO_WORKER"))
        *events, last = events_of((await asking).text)
    assert events[0]["type"] == "message_start"
    assert (last["type"], last["error"]["type"]) == ("error", "overloaded_error")
    assert events[0]["message"]["id"] == f"msg_{last['request_id']}"


@asynchronous
async def test_a_deadline() -> None:
    """Of the header, as for all routes."""
    async with served() as (_, http):
        answer = await http.post("/v1/messages", json=WISH, headers={"x-request-timeout-ms": "400"})
        assert (answer.status_code, answer.json()["error"]["type"]) == (504, "timeout_error")


@pytest.mark.parametrize("stream", [True, False])
@asynchronous
async def test_leaving_cancels(stream: bool) -> None:
    """A call that is given up ends the request at the scheduler."""
    async with served() as (attachment, http):
        asking = asyncio.ensure_future(http.post("/v1/messages", json={**WISH, "stream": stream}))
        submit = await attachment.next_submit()
        attachment.send(tokens(submit.handle, 0, tiny().encode("once")))
        await asyncio.sleep(0.05)
        asking.cancel()
        cancelled = await attachment.next()
        assert [cancel.handle for cancel in cancelled.cancels] == [submit.handle]


@asynchronous
async def test_routing_and_models_in_anthropics_form() -> None:
    """Unknown paths below /v1/messages, other methods, and lists of models for requests with the version header."""
    async with pair() as (_, _, running), httpx.AsyncClient(base_url=f"http://{running.http}") as http:
        while (await http.get("/health")).status_code != 200:
            await asyncio.sleep(0.01)
        for method, path, status, kind in (
            ("GET", "/v1/messages", 405, "invalid_request_error"),
            ("POST", "/v1/messages/batches", 404, "not_found_error"),
            ("POST", "/v1/messages", 415, "invalid_request_error"),
        ):
            answer = await http.request(method, path)
            assert (answer.status_code, answer.json()["error"]["type"]) == (status, kind)
            assert answer.headers["request-id"] == answer.headers["x-request-id"] == answer.json()["request_id"]
        assert (await http.get("/nothing", headers=VERSION)).json()["type"] == "error"
        assert "type" not in (await http.get("/nothing")).json()
        missing = (await http.get("/v1/models/none", headers=VERSION)).json()
        assert (missing["type"], missing["error"]["type"]) == ("error", "not_found_error")
        assert "type" not in (await http.get("/v1/models/none")).json()
        listed = (await http.get("/v1/models?limit=20", headers=VERSION)).json()
        assert (listed["first_id"], listed["last_id"], listed["has_more"]) == ("tiny", "tiny", False)
        (card,) = listed["data"]
        assert card == (await http.get("/v1/models/tiny", headers=VERSION)).json()
        assert (card["type"], card["display_name"]) == ("model", "tiny")
        assert (await http.get("/v1/models")).json()["object"] == "list"


@asynchronous
async def test_keys_in_x_api_key(tmp_path: Path) -> None:
    """Identify a caller in every route as a bearer key does; a bearer key has precedence; refusals are in the API's form."""
    async with (
        pair(tenants=tenants_file(tmp_path)) as (_, attachment, running),
        httpx.AsyncClient(base_url=f"http://{running.http}", timeout=ANSWER_S) as http,
    ):
        acme, globex = ({"x-api-key": KEYS[name]} for name in ("acme", "globex"))
        for path, body in (
            ("/v1/messages", {**WISH, "stream": True}),
            ("/v1/chat/completions", {"messages": USER}),
        ):
            asking = asyncio.ensure_future(http.post(path, json=body, headers=acme))
            submit = await attachment.next_submit()
            assert submit.tenant == "acme"
            attachment.send(tokens(submit.handle, 0, [70, 71]), finished(submit.handle, 2))
            assert (await asking).status_code == 200
        assert (await http.get("/v1/models", headers=acme)).json()["data"]
        for path in ("/v1/messages", "/v1/messages/count_tokens"):
            refused = await http.post(path, json=WISH, headers=globex)
            assert (refused.status_code, refused.json()["error"]["type"]) == (403, "permission_error")
        assert (await http.get("/v1/models", headers=bearer("acme") | globex)).json()["data"]
        assert (await http.get("/v1/models", headers={"authorization": "Basic eDp5"} | acme)).json()["data"]
        for headers, reason in (({}, "missing_key"), ({"x-api-key": "other"}, "unknown_key")):
            refused = await http.post("/v1/messages", json=WISH, headers=headers)
            assert refused.status_code == 401
            error = refused.json()["error"]
            assert (error["type"], error["details"]["error_code"]) == ("authentication_error", reason)
