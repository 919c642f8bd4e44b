"""Anthropic's Messages API on a real stack with the built-in model, over plain HTTP and by Anthropic's package for Python."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from quire.local_stack.stack import LocalStack
from tests.support.client_tools import run_tool, tool_environment
from tests.support.stack.commands import ROOT

WISH: dict[str, Any] = {
    "model": "tiny",
    "max_tokens": 60,
    "seed": 3,
    "messages": [{"role": "user", "content": "What is the weather in Oslo?"}],
}
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"enum": ["Paris", "Oslo"]}},
    "required": ["city"],
    "additionalProperties": False,
}
FORCED = {
    "max_tokens": 100,
    "tools": [{"name": "get_weather", "input_schema": SCHEMA}],
    "tool_choice": {"type": "any", "disable_parallel_tool_use": True},
}


@pytest.fixture
def http(stack: LocalStack) -> Iterator[httpx.Client]:
    """Plain HTTP."""
    with httpx.Client(base_url=stack.http_url, timeout=60) as made:
        yield made


def streamed(http: httpx.Client, body: dict[str, Any]) -> tuple[list[str], str, dict[str, Any]]:
    """Kinds of events, the text or input of all blocks, and the end."""
    text = http.post("/v1/messages", json={**body, "stream": True}).text
    events = [json.loads(line.removeprefix("data: ")) for line in text.splitlines() if line.startswith("data: ")]
    deltas = [event["delta"] for event in events if event["type"] == "content_block_delta"]
    whole = "".join(delta.get("text") or delta.get("partial_json") or "" for delta in deltas)
    return [event["type"] for event in events], whole, events[-2]


def test_a_message_and_its_stream(http: httpx.Client) -> None:
    """Equal text, end and usage; the prompt has as many tokens as count_tokens says."""
    whole = http.post("/v1/messages", json=WISH).json()
    kinds, text, end = streamed(http, WISH)
    assert "".join(block["text"] for block in whole["content"]) == text != ""
    assert kinds[0] == "message_start" and kinds[-2:] == ["message_delta", "message_stop"]
    assert (end["delta"]["stop_reason"], end["usage"]["output_tokens"]) == (
        whole["stop_reason"],
        whole["usage"]["output_tokens"],
    )
    counted = http.post("/v1/messages/count_tokens", json={"messages": WISH["messages"]}).json()
    usage = whole["usage"]
    assert counted == {"input_tokens": usage["input_tokens"] + usage["cache_read_input_tokens"]}


def test_a_forced_call_and_its_result(http: httpx.Client) -> None:
    """Input by its schema, streamed alike; the conversation goes on with the result."""
    called = http.post("/v1/messages", json={**WISH, **FORCED}).json()
    (call,) = called["content"]
    assert (called["stop_reason"], call["type"], call["name"]) == ("tool_use", "tool_use", "get_weather")
    assert call["input"]["city"] in SCHEMA["properties"]["city"]["enum"]
    _, text, end = streamed(http, {**WISH, **FORCED})
    assert (json.loads(text), end["delta"]["stop_reason"]) == (call["input"], "tool_use")
    result = {"type": "tool_result", "tool_use_id": call["id"], "content": "7 degrees"}
    turns = [*WISH["messages"], {"role": "assistant", "content": [call]}, {"role": "user", "content": [result]}]
    answered = http.post("/v1/messages", json={**WISH, **FORCED, "messages": turns, "tool_choice": {"type": "none"}})
    assert answered.status_code == 200 and answered.json()["stop_reason"] in {"end_turn", "max_tokens"}


# The first run installs it.
@pytest.mark.long
@pytest.mark.timeout(1_200)
def test_anthropics_package(stack: LocalStack, tmp_path: Path) -> None:
    """Messages, streams and their helper, tools and the tool runner, schemas, count_tokens, models, errors; also asynchronous."""
    tool_environment("anthropic")
    script = str(ROOT / "tests" / "clients" / "anthropic_calls.py")
    assert run_tool("anthropic", "python", script, stack.http_url, cwd=tmp_path).endswith("all calls answered\n")
