"""SGLang Model Gateway, unchanged, in front of a running stack, over HTTP and over its engine contract (docs/routers.md)."""

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from google.protobuf.descriptor import FieldDescriptor

from protos.routers.v1 import smg_common_pb2, vllm_engine_pb2
from quire.local_stack.stack import LocalStack
from tests.support.client_tools import run_tool
from tests.support.routers.smg import FORCED, MODES, WEATHER, delta, loads, router

# The first run installs it.
pytestmark = [pytest.mark.long, pytest.mark.timeout(1_200)]

CHAT = [{"role": "user", "content": "What is 2+2?"}]
WISH: dict[str, Any] = {"model": "tiny", "messages": CHAT, "max_tokens": 16, "temperature": 0}


def content(answer: httpx.Response) -> str:
    """Text of a chat's answer."""
    assert answer.status_code == 200, answer.text
    return str(answer.json()["choices"][0]["message"]["content"])


def streamed(client: httpx.Client, wish: dict[str, Any]) -> Iterator[str]:
    """Texts of a stream's chunks."""
    with client.stream("POST", "/v1/chat/completions", json={**wish, "stream": True}) as answer:
        yield from map(delta, answer.iter_lines())


@pytest.mark.parametrize(("mode", "policy"), MODES)
def test_a_router_drives_the_stack(mode: str, policy: str, stack: LocalStack, tmp_path: Path) -> None:
    """Loads, answers as without it, streams, tool calls, schemas, and a client that leaves."""
    http = httpx.Client(base_url=stack.http_url, timeout=300)
    port = (stack.http_url if mode == "http" else stack.grpc_address).rpartition(":")[2]
    urls = [f"{mode}://127.0.0.1:{port}", f"{mode}://localhost:{port}"]
    with http, router(urls, policy, tmp_path) as client:
        own = content(http.post("/v1/chat/completions", json=WISH))
        assert content(client.post("/v1/chat/completions", json=WISH)) == own
        assert "".join(streamed(client, WISH)) == own
        until(lambda: [load["max_total_num_tokens"] > 0 for load in loads(client)] == [True, True])

        answer = client.post("/v1/chat/completions", json={**WISH, **FORCED, "max_tokens": 200})
        assert answer.status_code == 200, answer.text
        [made] = answer.json()["choices"][0]["message"]["tool_calls"]
        assert made["function"]["name"] == "weather" and json.loads(made["function"]["arguments"]) == {"city": "Oslo"}

        schema = {"type": "json_schema", "json_schema": {"name": "w", "schema": WEATHER}}
        typed = client.post("/v1/chat/completions", json={**WISH, "max_tokens": 200, "response_format": schema})
        assert json.loads(content(typed)) == {"city": "Oslo"}

        leaving = streamed(client, {**WISH, "max_tokens": 1_500, "ignore_eos": True})
        assert next(filter(None, leaving))
        leaving.close()
        until(lambda: http.get("/load").json()["server_load"] == 0)


_FIELDS_OF_THEIRS = """
import json
from smg_grpc_proto.generated import common_pb2, vllm_engine_pb2
print(json.dumps({m.full_name: {f.name: [f.number, f.type, f.is_repeated] for f in m.fields}
                  for pb in (common_pb2, vllm_engine_pb2) for m in pb.DESCRIPTOR.message_types_by_name.values()}))
"""


def test_our_protos_are_theirs_on_the_wire(tmp_path: Path) -> None:
    """Each of our fields has the number and type that the package of the contract has; what we refuse may be bytes."""
    theirs = json.loads(run_tool("smg", "python", "-c", _FIELDS_OF_THEIRS, cwd=tmp_path))
    for proto in (smg_common_pb2, vllm_engine_pb2):
        for message in proto.DESCRIPTOR.message_types_by_name.values():
            for field in message.fields:
                number, kind, repeated = theirs[message.full_name][field.name]
                own = FieldDescriptor.TYPE_MESSAGE if field.type == FieldDescriptor.TYPE_BYTES != kind else field.type
                assert (field.number, own, field.is_repeated) == (number, kind, repeated), field.full_name


def until(holds: Any) -> None:
    """Waits until `holds()`."""
    while not holds():
        time.sleep(0.1)
