"""SGLang Model Gateway as a process, in an environment of its own."""

import contextlib
import json
import os
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.client_tools import tool_environment

MODES = [(mode, policy) for mode in ("http", "grpc") for policy in ("cache_aware", "power_of_two")]
WEATHER = {
    "type": "object",
    "properties": {"city": {"enum": ["Oslo"]}},
    "required": ["city"],
    "additionalProperties": False,
}
FORCED = {
    "tools": [{"type": "function", "function": {"name": "weather", "description": "Tells it.", "parameters": WEATHER}}],
    "tool_choice": {"type": "function", "function": {"name": "weather"}},
}


def free_ports(count: int) -> list[str]:
    """Ports that nothing listens on at present."""
    with contextlib.ExitStack() as held:
        sockets = [held.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [str(one.getsockname()[1]) for one in sockets]


@contextlib.contextmanager
def router(urls: list[str], policy: str, home: Path) -> Iterator[httpx.Client]:
    """Starts it in front of these workers; it has found the model. Its output goes to `home`/smg.log."""
    port, metrics = free_ports(2)
    command = [tool_environment("smg") / "smg", "launch", "--host", "127.0.0.1", "--port", port]
    command += [
        "--prometheus-port",
        metrics,
        "--policy",
        policy,
        "--load-monitor-interval",
        "1",
        "--worker-urls",
        *urls,
    ]
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    env |= {"HOME": str(home), "HF_HUB_OFFLINE": "1"}
    with (
        (home / "smg.log").open("w") as log,
        subprocess.Popen(command, cwd=home, env=env, stdin=subprocess.DEVNULL, stdout=log, stderr=log) as process,
        httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=300) as client,
    ):
        try:
            _wait_for_model(client, process, home / "smg.log")
            yield client
        finally:
            process.terminate()


def _wait_for_model(client: httpx.Client, process: subprocess.Popen[bytes], log: Path) -> None:
    while process.poll() is None:
        with contextlib.suppress(httpx.TransportError):
            answer = client.get("/v1/models")
            if answer.is_success and any(model["id"] == "tiny" for model in answer.json()["data"]):
                return
        time.sleep(0.2)
    pytest.fail(log.read_text()[-2_000:])


def loads(client: httpx.Client) -> list[dict[str, Any]]:
    """The workers' loads as the router tells of them."""
    return list(client.get("/get_loads").json().get("loads", []))


def delta(line: str) -> str:
    """Text of a line of a streamed chat."""
    if not line.startswith("data: {"):
        return ""
    data = json.loads(line.removeprefix("data: "))
    if "choices" not in data:
        raise ValueError(line)
    return "".join(choice["delta"].get("content") or "" for choice in data["choices"])
