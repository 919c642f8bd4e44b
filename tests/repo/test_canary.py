"""A canary in everything that a caller writes appears in no log, span, metric, error or recording."""

import contextlib
import http.client
import json
import os
import re
import signal
import time
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from protos.inference.v1 import inference_pb2 as pb
from quire.local_stack.otlp_receiver import OtlpReceiver
from quire.local_stack.stack import LocalStack
from quire.operators import recordings, why
from quire.operators.admin import AdminClient
from svc_common import wire_arrays
from svc_common.net import rpc
from svc_common.observability.log_format import LogFormat
from tests.support.canaries import CANARY, grpc_calls, http_bodies

SERVICE = "/quire.inference.v1.InferenceService"
STREAMS = ("GenerateStream", "ChatStream")
IDS = ("kept", "killed")
_FRAME_HEADER = 1 + 8 + 8 + 16


class Watched:
    """A stack whose every word is kept."""

    def __init__(self, otlp: OtlpReceiver, **options: Any) -> None:
        self.lines: list[str] = []
        self.errors: list[str] = []
        environ = {**os.environ, **otlp.environ(), "QUIRE_LOG_LEVEL": "DEBUG"}
        self.stack = LocalStack(
            environ=environ, on_line=lambda name, line: self.lines.append(f"{name}: {line}"), **options
        )

    def call(self, method: str, message: Any, **metadata: str) -> None:
        """One call; how it failed is kept."""
        raw = message if isinstance(message, bytes) else message.SerializeToString()
        with grpc.insecure_channel(self.stack.grpc_address) as channel:
            make = channel.unary_stream if method in STREAMS else channel.unary_unary
            try:
                answer = make(f"{SERVICE}/{method}")(raw, timeout=30, metadata=tuple(metadata.items()))
                list(answer) if method in STREAMS else answer
            except grpc.RpcError as error:
                known = rpc.from_rpc_error(error)
                trailing = dict(error.trailing_metadata() or ())
                self.errors.append(
                    f"{method}: {known.status} {known.reason} {known} {trailing} {error.debug_error_string()}"
                )

    def post(self, path: str, body: bytes) -> None:
        """One request; what an error says is kept."""
        connection = http.client.HTTPConnection(self.stack.http_url.removeprefix("http://"), timeout=30)
        connection.request("POST", path, body, {"content-type": "application/json"})
        answer = connection.getresponse()
        text = answer.read().decode()
        if answer.status >= 400:
            self.errors.append(f"{path}: {answer.status} {text} {answer.getheaders()}")
        connection.close()

    def get(self, path: str, address: str = "") -> str:
        connection = http.client.HTTPConnection(address or self.stack.http_url.removeprefix("http://"), timeout=30)
        with contextlib.closing(connection):
            connection.request("GET", path)
            return connection.getresponse().read().decode()

    def metrics(self, name: str, address: str) -> str:
        """Of a service that may be on its way back."""
        deadline = time.monotonic() + 30
        while True:
            self.stack.revive()
            try:
                return self.get("/metrics", address)
            except TimeoutError:
                last = "\n".join([line for line in self.lines if line.startswith(f"{name}:")][-20:])
                raise AssertionError(
                    f"the {name} does not answer at {address}; the last that it said:\n{last}"
                ) from None
            except ConnectionError:
                assert time.monotonic() < deadline, address
                time.sleep(0.05)


@pytest.fixture
def otlp() -> Iterator[OtlpReceiver]:
    with OtlpReceiver() as receiver:
        yield receiver


def _send_everything(watched: Watched) -> int:
    """Of every kind; how many."""
    calls, bodies = list(grpc_calls()), list(http_bodies())
    for method, message in calls:
        watched.call(method, message)
    for path, body in bodies:
        watched.post(path, body)
    return len(calls) + len(bodies)


def _lose_the_worker(watched: Watched) -> None:
    """With a request running, which is cut off by its deadline or goes on on the next worker."""
    request = pb.GenerateRequest(text=f"{CANARY} long", stop=pb.StopConditions(max_tokens=400))
    watched.call(
        "Generate", pb.GenerateRequest(text=CANARY, stop=pb.StopConditions(max_tokens=3)), **{"x-request-id": IDS[0]}
    )
    with grpc.insecure_channel(watched.stack.grpc_address) as channel:
        call = channel.unary_stream(
            f"{SERVICE}/GenerateStream", pb.GenerateRequest.SerializeToString, pb.GenerateEvent.FromString
        )
        stream = call(request, timeout=60, metadata=(("x-request-id", IDS[1]),))
        for event in stream:
            if event.HasField("delta"):
                break
        os.kill(watched.stack.pids["worker"], signal.SIGKILL)
        deadline = time.monotonic() + 1.5
        while time.monotonic() < deadline:
            watched.stack.revive()
            time.sleep(0.05)
        stream.cancel()


def _plain(file: Path) -> bytes:
    """All frames of a recording, unpacked."""
    data, found = file.read_bytes(), b""
    for match in re.finditer(rb"\x78[\x01\x5e\x9c\xda]", data):
        unpacker = zlib.decompressobj()
        try:
            found += unpacker.decompress(data[match.start() :])
        except zlib.error:
            continue
    return found


def _told_to_operators(watched: Watched, folder: Path) -> dict[str, bytes]:
    """Steps, explanations, load, and a recording."""
    with AdminClient(watched.stack.admin_address) as admin:
        steps = "".join(str(step) for step in admin.steps(tables=True))
        reasons = "".join(str(why.why_json(admin.explain(request_id))) for request_id in IDS)
        file = folder / "canary.rec"
        with recordings.written(file) as writer:
            fetch = recordings.Fetch(admin, writer, lambda fetched: None)
            fetch.held()
            fetch.finish()
        looked = f"{admin.load()} {admin.blocks()} {admin.workers()}"
    return {
        "quire steps": steps.encode(),
        "quire why": reasons.encode(),
        "load, blocks, workers": looked.encode(),
        "a recording": file.read_bytes() + _plain(file),
    }


NAMED_KEY = f"logit_bias: has the key '{CANARY}'"


def _search(watched: Watched, otlp: OtlpReceiver, folder: Path) -> tuple[dict[str, bytes], list[str]]:
    """Everything that was said, and in which of it the canary is."""
    said = _told_to_operators(watched, folder)
    said["metrics"] = watched.get("/metrics").encode()
    for name, address in watched.stack.metrics_addresses.items():
        said[f"metrics of the {name}"] = watched.metrics(name, address).encode()
    watched.stack.stop()
    spans = [repr((s.name, s.status_message, dict(s.attributes), s.events, s.links)) for s in otlp.spans()]
    said |= {f"span {i}": span.encode() for i, span in enumerate(spans)}
    # The caller is told which key of logit_bias is wrong, as with vLLM; of its other words errors tell nothing.
    said |= {f"error {i}": error.replace(NAMED_KEY, "").encode() for i, error in enumerate(watched.errors)}
    said |= {f"log {i}": line.encode() for i, line in enumerate(watched.lines)}
    needle = CANARY.encode()
    return said, [f"{place}: {_around(text, needle)}" for place, text in said.items() if needle in text]


def _around(text: bytes, needle: bytes) -> str:
    at = text.index(needle)
    return repr(text[max(0, at - 300) : at + 100])


def _check(watched: Watched, otlp: OtlpReceiver, folder: Path) -> str:
    num_sent = _send_everything(watched)
    _lose_the_worker(watched)
    said, found = _search(watched, otlp, folder)
    assert not found, "\n".join(found)
    num_spans = sum(place.startswith("span") for place in said)
    assert num_spans > num_sent and len(watched.errors) > 40, (num_spans, len(watched.errors))
    assert any("DEBUG" in line for line in watched.lines)
    # A recording has the prompt under other tokens, whichever way it is written.
    ids = wire_arrays.pack(list(CANARY.encode()))
    assert ids not in said["a recording"]
    return f"canaries: {num_sent} inputs, {len(watched.errors)} errors, {num_spans} spans, {len(watched.lines)} log lines searched"


def test_simulated(otlp: OtlpReceiver, tmp_path: Path, record_property: Callable[[str, object], None]) -> None:
    """Gateway and scheduler are the real ones. Their logs are JSON, every line, and say what they are about."""
    watched = Watched(otlp, simulated=True, worker_args=("--time-scale", "0.5"), log_format=LogFormat.JSON)
    with watched.stack:
        record_property("size", _check(watched, otlp, tmp_path))
    # Besides, the stack itself says so of a service that a busy machine could not stop in time.
    said = [line for line in watched.lines if not line.endswith("s: killed")]
    lines = [json.loads(line.partition(": ")[2]) for line in said]
    assert {line["service"] for line in lines} >= {"gateway", "scheduler", "worker"}
    calls = [line for line in lines if line["logger"] == "gateway_svc.metrics" and line.get("request_id") == IDS[0]]
    assert calls and all(len(line["trace_id"]) == 32 and len(line["span_id"]) == 16 for line in calls)
    assert {line["trace_id"] for line in calls} <= {span.trace_id for span in otlp.spans()}


@pytest.mark.long
def test_with_a_model(otlp: OtlpReceiver, tmp_path: Path, record_property: Callable[[str, object], None]) -> None:
    """The worker too: its grammars, its spans, its log."""
    watched = Watched(otlp, worker_args=("--dtype", "float32"))
    with watched.stack:
        record_property("size", _check(watched, otlp, tmp_path))
