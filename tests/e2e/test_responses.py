"""The Responses API by the official `openai` package on a real stack with the built-in model, and with services killed."""

import os
import time
from collections.abc import Iterator
from typing import Any, Literal

import openai
import pytest
from pydantic import BaseModel, ConfigDict

from quire.local_stack.ports import reserved
from quire.local_stack.processes import ServiceProcess, ignore_line
from quire.local_stack.stack import LocalStack
from tests.support.stack.supervised import Supervised

WISH: dict[str, Any] = {
    "model": "tiny",
    "input": "Tell me a story.",
    "max_output_tokens": 40,
    "extra_body": {"seed": 3},
}
TOOL: Any = {
    "type": "function",
    "name": "get_weather",
    "strict": True,
    "parameters": {
        "type": "object",
        "properties": {"city": {"enum": ["Rome", "Oslo"]}},
        "required": ["city"],
        "additionalProperties": False,
    },
}


class Animal(BaseModel):
    """What the model must name."""

    model_config = ConfigDict(extra="forbid")

    kind: Literal["cat", "dog"]
    legs: Literal[2, 4]


def package(url: str, max_retries: int = 0) -> openai.OpenAI:
    """The package as users have it, but for the number of retries."""
    return openai.OpenAI(base_url=f"{url}/v1", api_key="anything", timeout=60, max_retries=max_retries)


@pytest.fixture
def ai(stack: LocalStack) -> Iterator[openai.OpenAI]:
    """At the running stack."""
    with package(stack.http_url) as made:
        yield made


def test_text_and_log_probabilities(ai: openai.OpenAI) -> None:
    """The stream's sum is the whole answer; each token has its alternatives."""
    wish = {**WISH, "include": ["message.output_text.logprobs"], "top_logprobs": 2}
    whole = ai.responses.create(**wish)
    with ai.responses.stream(**wish) as stream:
        events = list(stream)
    deltas = [event for event in events if event.type == "response.output_text.delta"]
    assert "".join(event.delta for event in deltas) == whole.output_text != ""
    (message,) = whole.output
    entries = message.content[0].logprobs
    assert b"".join(bytes(entry.bytes) for entry in entries).decode() == whole.output_text
    assert {len(entry.top_logprobs) for entry in entries} == {2}
    chat = ai.chat.completions.create(
        model="tiny", messages=[{"role": "user", "content": WISH["input"]}], max_tokens=40, seed=3
    )
    assert whole.output_text == chat.choices[0].message.content
    assert ai.responses.retrieve(whole.id) == whole


def test_parse_gives_objects(ai: openai.OpenAI) -> None:
    """The schema of a class goes out, an object of it comes back, whole and streamed."""
    wish: dict[str, Any] = {"model": "tiny", "input": "x", "text_format": Animal, "max_output_tokens": 60}
    assert isinstance(ai.responses.parse(**wish).output_parsed, Animal)
    with ai.responses.stream(**wish) as stream:
        assert isinstance(stream.get_final_response().output_parsed, Animal)


@pytest.mark.parametrize("choice", ["required", {"type": "function", "name": "get_weather"}])
def test_a_tools_round_trip(ai: openai.OpenAI, choice: Any) -> None:
    """A call by its grammar, and its result, continued by items and by the response's id."""
    wish: dict[str, Any] = {**WISH, "tools": [TOOL], "tool_choice": choice, "parallel_tool_calls": False}
    called = ai.responses.create(**{**wish, "max_output_tokens": 100})
    (call,) = called.output
    assert (call.type, call.name, called.status) == ("function_call", "get_weather", "completed")
    assert Weather.model_validate_json(call.arguments)
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}
    asked = {"role": "user", "content": WISH["input"]}
    wish["tool_choice"] = "none"
    by_items = ai.responses.create(**{**wish, "input": [asked, call.to_dict(), result]})
    by_id = ai.responses.create(**{**wish, "input": [result]}, previous_response_id=called.id)
    assert by_items.output_text == by_id.output_text != ""


class Weather(BaseModel):
    """Arguments of the tool."""

    city: Literal["Rome", "Oslo"]


@pytest.fixture
def second_gateway(stack: LocalStack) -> Iterator[tuple[ServiceProcess, str]]:
    """Another gateway of the stack's scheduler, to be killed, and its URL."""
    with reserved("127.0.0.1", {"port": 0, "http-port": 0, "admin-port": 0, "admin-http-port": 0}) as ports:
        options = [word for name, port in ports.items() for word in (f"--{name}", str(port))]
    arguments = ["gateway", *options, "--scheduler", stack.scheduler_address]
    gateway = ServiceProcess("gateway", arguments, environ=os.environ, on_line=ignore_line)
    try:
        while not gateway.announced:
            gateway.check()
            time.sleep(0.02)
        yield gateway, f"http://127.0.0.1:{ports['http-port']}"
    finally:
        gateway.kill()
        gateway.wait(10)


def ended(ai: openai.OpenAI, name: str) -> Any:
    """The response, once it has ended."""
    while (found := ai.responses.retrieve(name)).status == "in_progress":
        time.sleep(0.02)
    return found


def test_a_gateway_is_killed(ai: openai.OpenAI, second_gateway: tuple[ServiceProcess, str]) -> None:
    """What it stored is there; what it ran in the background goes on at another gateway, with the same tokens."""
    wish = {**WISH, "max_output_tokens": 600, "extra_body": {"seed": 3, "ignore_eos": True}}
    gateway, url = second_gateway
    with package(url) as lost:
        stored = lost.responses.create(**WISH)
        begun = lost.responses.create(**wish, background=True)
        gateway.kill()
    assert ai.responses.retrieve(stored.id) == stored
    assert ai.responses.create(**WISH, previous_response_id=stored.id).output_text
    found = ended(ai, begun.id)
    assert found.usage.output_tokens == 600
    assert found.output_text == ai.responses.create(**wish).output_text


@pytest.mark.long
def test_the_scheduler_is_killed(killable: Supervised) -> None:
    """Stored responses are lost, and the error says so; one in the background goes on, and is stored again at its end."""
    with package(killable.stack.http_url, max_retries=60) as ai:
        stored = ai.responses.create(**WISH)
        wish = {**WISH, "max_output_tokens": 120, "extra_body": {"seed": 3, "ignore_eos": True}}
        begun = ai.responses.create(**wish, background=True)
        killable.kill("scheduler")
        with pytest.raises(openai.NotFoundError, match="lost when the scheduler restarted"):
            ai.responses.retrieve(stored.id)
        assert ended(ai, begun.id).output_text == ai.responses.create(**wish).output_text
