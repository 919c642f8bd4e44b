"""Node on a running stack: OpenAI's and Anthropic's own packages, and the example that speaks gRPC straight from the protos.

The scripts run as their users run them, in a folder with their packages beside them.
"""

import os
import re
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from quire.local_stack.processes import ServiceProcess, ignore_line
from quire.local_stack.stack import LocalStack
from quire.operators.admin import AdminClient
from tests.support.node import node_packages, run_node
from tests.support.stack.commands import ROOT


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A project that has the packages, and the scripts that use them."""
    (tmp_path / "node_modules").symlink_to(node_packages("tools"))
    for script in (ROOT / "tests" / "clients").glob("*.mjs"):
        shutil.copy(script, tmp_path)
    return tmp_path


@pytest.fixture
def example(tmp_path: Path) -> Path:
    """examples/node after `npm install`, in a checkout that has nothing else but the protos."""
    folder = tmp_path / "examples" / "node"
    shutil.copytree(ROOT / "examples" / "node", folder, ignore=shutil.ignore_patterns("node_modules"))
    (folder / "node_modules").symlink_to(node_packages("example"))
    (tmp_path / "protos").symlink_to(ROOT / "protos")
    return folder


def assert_all_free(stack: LocalStack, within_s: float) -> None:
    """No request is left, and no block in use."""
    deadline = time.monotonic() + within_s
    with AdminClient(stack.admin_address) as admin:
        while (left := _left(admin)) and time.monotonic() < deadline:
            time.sleep(0.02)
    assert not left, left


def _left(admin: AdminClient) -> list[str]:
    load = admin.load()
    used = load.gpu.total - load.gpu.free
    return [f"{used} blocks in use, {load.queues}"] if used or load.queues.running or load.queues.waiting else []


def run_tests(folder: Path, script: str, url: str) -> int:
    """Runs the tests of a script; the number of those that passed, which is all of them."""
    done = run_node(folder, "--test", "--test-reporter=tap", script, environ={"QUIRE_URL": url})
    assert done.returncode == 0, done.stdout
    counts = dict(re.findall(r"^# (\w+) (\d+)$", done.stdout, re.M))
    assert counts["pass"] == counts["tests"], counts
    return int(counts["pass"])


def test_openai_package(project: Path, stack: LocalStack) -> None:
    """Chat, streaming, tools, JSON schema, logprobs, n, vectors, errors, cancel, Responses; what was cancelled is over at the
    scheduler."""
    assert run_tests(project, "openai_node.mjs", f"{stack.http_url}/v1") >= 17
    assert_all_free(stack, within_s=2)


@pytest.mark.long
def test_anthropic_package(project: Path, stack: LocalStack) -> None:
    """Messages, streams, tools and the tool runner, schemas, count_tokens, models, errors, abort."""
    assert run_tests(project, "anthropic_node.mjs", stack.http_url) >= 12


@pytest.mark.long
def test_ai_sdk(project: Path, stack: LocalStack) -> None:
    """Its default API, Responses: text, streams, a tool's round trip, references to stored items, objects by a schema."""
    assert run_tests(project, "ai_sdk.mjs", f"{stack.http_url}/v1") >= 6
    assert_all_free(stack, within_s=2)
    assert_all_free(stack, within_s=2)


def test_streaming_chat_of_the_example(example: Path, stack: LocalStack) -> None:
    """Text, end and account; where the first gateway is not there, the second is asked; a refusal is typed."""
    for addresses in (stack.grpc_address, f"127.0.0.1:1,{stack.grpc_address}"):
        done = run_node(example, "chat.mjs", addresses, "Write a class.", "10")
        assert done.returncode == 0, done.stderr
        assert re.search(r"\S.*\n\[FINISH_REASON_(LENGTH|STOP)\]\n\[\d+ \+ \d+ tokens\]\n$", done.stdout, re.S), (
            done.stdout
        )
    refused = run_node(example, "chat.mjs", stack.grpc_address, "x", "0")
    assert (refused.returncode, refused.stdout) == (1, "")
    assert refused.stderr.startswith("INVALID_FIELD: stop.max_tokens: is 0")


def test_tour_of_the_example(example: Path, stack: LocalStack) -> None:
    """Models, choices with log probabilities, deadline, leaving early, a typed error, a tool's round trip; nothing is left."""
    done = run_node(example, "tour.mjs", stack.grpc_address)
    assert done.returncode == 0, done.stderr
    for line in (
        r"model tiny: 2048 tokens, chat: true",
        r"choice 1: \".*\", log probability -\d+\.\d\d",
        r"usage: 2 \+ \d+ tokens",
        r"deadline: (DEADLINE_EXCEEDED|EXPIRED_IN_QUEUE|INFEASIBLE|DURING_DECODE)",
        r"left after \".+\"",
        r"refused: INVALID_FIELD: sampling.top_p is 7; must lie in \(0, 1\]",
        r"tool: get_weather\(\{\"city\":\"(Paris|Oslo)\",\"days\":[1-7]\}\), FINISH_REASON_TOOL_CALLS",
        r"answer: \".*\"",
    ):
        assert re.search(f"^{line}$", done.stdout, re.M), f"{line} is not in\n{done.stdout}"
    assert_all_free(stack, within_s=2)


@pytest.fixture
def second_gateway(stack: LocalStack) -> Iterator[ServiceProcess]:
    """Another gateway of the stack's scheduler; the stack's own stays."""
    free = ("--port", "0", "--http-port", "0", "--admin-port", "0", "--admin-http-port", "0")
    arguments = ["gateway", *free, "--scheduler", stack.scheduler_address]
    gateway = ServiceProcess("gateway", arguments, environ=os.environ, on_line=ignore_line)
    try:
        while not (gateway.announced and gateway.address):
            gateway.check()
            time.sleep(0.02)
        yield gateway
    finally:
        gateway.kill()
        gateway.wait(10)


@pytest.mark.long
def test_a_lost_gateway(example: Path, stack: LocalStack, second_gateway: ServiceProcess) -> None:
    """The gateway of a streaming chat is killed: the example reads on at the other one, and prints what it would have printed."""
    chat = ["node", "chat.mjs", f"{second_gateway.address},{stack.grpc_address}", "Write a long class.", "300", "11"]
    with subprocess.Popen(chat, cwd=example, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        begin = process.stdout.read(20)
        second_gateway.kill()
        assert process.poll() is None, "it had all before the gateway was lost"
        text = begin + process.stdout.read()
        assert process.wait(60) == 0
    undisturbed = run_node(example, "chat.mjs", stack.grpc_address, *chat[3:])
    assert len(undisturbed.stdout) > 200
    assert text == undisturbed.stdout
