"""The library and the command `llm` against a running Quire: python llm_calls.py http://HOST:PORT/v1"""

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, Literal

# Where the library finds its own files; it reads this as it is imported.
os.environ["LLM_USER_PATH"] = str(Path.cwd() / "llm")

import llm
from llm.parts import ToolCallPart, ToolResultPart
from pydantic import BaseModel, ConfigDict

QUESTION = "What is the weather in Oslo?"
# Of the same text each time; for Responses the library can send no seed.
WISH: dict[str, Any] = {"max_tokens": 16, "temperature": 0.0}
KINDS = {
    "chat": "supports_tools: true",
    "responses": "responses: true, supports_tools: true",
    "completion": "completion: true",
}


class Review(BaseModel):
    """A typed answer."""

    model_config = ConfigDict(extra="forbid")

    language: Literal["Python", "Rust"]
    stars: Literal[1, 2, 3]


WEATHER = llm.Tool(
    name="get_weather",
    description="The weather in a city.",
    input_schema={
        "type": "object",
        "properties": {"city": {"enum": ["Paris", "Oslo"]}},
        "required": ["city"],
        "additionalProperties": False,
    },
    implementation=lambda city: f"7 degrees in {city}",
)


def add_models(url: str) -> None:
    """The file with which users of the library add a server."""
    entries = (
        f"- {{model_id: quire-{kind}, model_name: tiny, api_base: {url}, supports_schema: true, {more}}}\n"
        for kind, more in KINDS.items()
    )
    folder = llm.user_dir()
    (folder / "extra-openai-models.yaml").write_text("".join(entries), encoding="utf-8")


def texts(kind: str) -> None:
    """Whole and streamed, a second turn, usage."""
    model = llm.get_model(f"quire-{kind}")
    whole = model.prompt("Write a function.", stream=False, **WISH)
    assert "".join(model.prompt("Write a function.", **WISH)) == whole.text() != ""
    conversation = model.conversation()
    first, second = (conversation.prompt(text, stream=False, **WISH) for text in ("Write a function.", "And a test."))
    assert first.text() and second.text()
    # The library reads no usage of completions, nor of a stream of Responses that max_output_tokens cut off.
    assert kind == "completion" or second.usage().input > first.usage().input > 0


def tools(kind: str) -> None:
    """A conversation in which a tool was called goes on, with tools and a schema; the library runs what the model calls."""
    model = llm.get_model(f"quire-{kind}")
    called = ToolCallPart(name="get_weather", arguments={"city": "Oslo"}, tool_call_id="call_1")
    result = ToolResultPart(name="get_weather", output="7 degrees", tool_call_id="call_1")
    turns = [llm.user(QUESTION), llm.assistant(called), llm.tool_message(result)]
    answers = [model.prompt(messages=turns, tools=[WEATHER], stream=stream, **WISH).text() for stream in (True, False)]
    assert answers[0] == answers[1] != ""
    assert any(chained(model) for _ in range(60))


def chained(model: llm.Model) -> bool:
    """Whether the model called the tool, which the library ran; it sends the result and gets text. Else an answer by schema.

    A schema beside tools lets the model choose, and a hot one does so by chance.
    """
    ran: list[tuple[dict[str, Any], str]] = []
    chain = model.conversation().chain(
        QUESTION,
        tools=[WEATHER],
        schema=Review,
        options={"max_tokens": 120, "temperature": 2.0},
        after_call=lambda _tool, call, result: ran.append((call.arguments, result.output)),
    )
    try:
        first, *_ = (response.text() for response in chain.responses())
    except json.JSONDecodeError:
        return False  # max_tokens cut off a call
    if not ran:
        Review.model_validate_json(first)
    whole = [(arguments, output) for arguments, output in ran if "_raw" not in arguments]
    assert all(output == f"7 degrees in {arguments['city']}" for arguments, output in whole)
    return bool(whole)


def typed(kind: str) -> None:
    """An answer by schema, as a class and as JSON; an answer that is any JSON."""
    model = llm.get_model(f"quire-{kind}")
    for schema in (Review, Review.model_json_schema()):
        Review.model_validate_json(model.prompt("Review it.", schema=schema, max_tokens=100).text())
    if kind == "chat":
        assert json.loads(model.prompt("Review it.", json_object=True, max_tokens=200, temperature=0.0).text())


async def asynchronous(kind: str) -> None:
    """Streams at once."""
    model = llm.get_async_model(f"quire-{kind}")

    async def one(text: str) -> str:
        return "".join([chunk async for chunk in model.prompt(text, **WISH)])

    first, _, again = await asyncio.gather(*map(one, ("Write a function.", QUESTION, "Write a function.")))
    assert first == again != ""


def command(*arguments: str) -> str:
    """What `llm` prints."""
    program = str(Path(sys.executable).parent / "llm")
    return subprocess.run([program, *arguments], check=True, capture_output=True, text=True, timeout=100).stdout


def commands(url: str) -> None:
    """Prompts by a model of the file and by an endpoint's address, with a schema; the endpoint's models."""
    for model in ("quire-chat", "quire-responses"):
        assert command("-m", model, "-o", "max_tokens", "8", "Write a function.").strip()
        assert command("-c", "-o", "max_tokens", "8", "And a test.").strip()
    endpoint = ("openai", "endpoint", url)
    assert command(*endpoint, "--models").split() == ["tiny"]
    for api in ((), ("--responses",)):
        answered = command(
            *endpoint, "-m", "tiny", *api, "--schema", json.dumps(Review.model_json_schema()), "Review it."
        )
        Review.model_validate_json(answered)


def main(url: str) -> None:
    """Each kind of call once."""
    add_models(url)
    for kind in KINDS:
        texts(kind)
    for kind in ("chat", "responses"):
        tools(kind)
        typed(kind)
        asyncio.run(asynchronous(kind))
    commands(url)


if __name__ == "__main__":
    main(*sys.argv[1:])
    print("all calls answered")
