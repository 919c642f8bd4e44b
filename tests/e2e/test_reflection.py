"""A client by reflection alone: the example knows an address and nothing else."""

import itertools
import json
import subprocess
import sys

import pytest

from quire.local_stack.stack import LocalStack
from tests.support.stack.commands import ROOT


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    """examples/reflection.py, run where it can import nothing of Quire."""
    command = [sys.executable, "-I", str(ROOT / "examples" / "reflection.py"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def reflect(*arguments: str) -> list[str]:
    """What it prints."""
    done = run(*arguments)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_services_are_described_and_called(stack: LocalStack) -> None:
    """Methods with their messages are listed; a stream ends with Usage; its tokens are those asked for."""
    lines = reflect(stack.grpc_address)
    assert "  ChatStream(ChatRequest) -> stream GenerateEvent" in lines
    events = [json.loads(line) for line in lines if line.startswith("{")]
    deltas = [event["delta"] for event in events if "delta" in event]
    assert "started" in events[0]
    # A delta has several tokens if its reader was slow.
    begins = itertools.accumulate((len(delta["tokenIds"]) for delta in deltas[:-1]), initial=0)
    assert [delta.get("tokenOffset", 0) for delta in deltas] == list(begins)
    assert events[-1]["usage"]["completionTokens"] == sum(len(delta["tokenIds"]) for delta in deltas) <= 8


def test_a_method_that_answers_once(stack: LocalStack) -> None:
    """Its answer as JSON."""
    answer = json.loads(reflect(stack.grpc_address, "ListModels", "{}")[-1])
    assert [model["name"] for model in answer["models"]] == ["tiny"]


@pytest.mark.parametrize(
    ("method", "request_json", "said"),
    [
        ("generate", "{}", "there is no method generate; there are Generate, GenerateStream, Chat"),
        ("Generate", '{"txt": "a"}', 'no field named "txt"'),
        ("Chat", "{}", "INVALID_ARGUMENT INVALID_FIELD: messages: "),
    ],
)
def test_what_cannot_be_called(stack: LocalStack, method: str, request_json: str, said: str) -> None:
    """A sentence and status 1; of the server's errors status and reason."""
    done = run(stack.grpc_address, method, request_json)
    assert (done.returncode, said in done.stderr, "Traceback" in done.stderr) == (1, True, False), done.stderr
