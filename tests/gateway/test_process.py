"""A gateway as a process: quick and small, port conflicts, stopping, and its spans."""

import asyncio
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import grpc
import grpc.aio
import httpx
import psutil
import pytest

from gateway_svc import app
from gateway_svc.settings import GatewaySettings
from protos.inference.v1 import inference_pb2 as pb
from protos.inference.v1 import inference_pb2_grpc
from quire.local_stack.otlp_receiver import OtlpReceiver
from svc_common.errors import ConfigError
from tests.support.services.harness import run_async, scheduler, worker
from tests.traces.serving import exporting, gateway, post

pytestmark = pytest.mark.processes

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = """
import asyncio, sys
from gateway_svc.app import serve
from gateway_svc.settings import GatewaySettings
settings = GatewaySettings(schedulers=("127.0.0.1:1",), grpc_port=0, http_port=0, admin_port=0, admin_http_port=0)
asyncio.run(serve(settings, on_ready=lambda *addresses: print(*addresses, flush=True)))
assert not {"torch", "transformers"} & set(sys.modules)
"""


@pytest.fixture
def process() -> Iterator[subprocess.Popen[str]]:
    """A gateway without a scheduler."""
    running = subprocess.Popen([sys.executable, "-c", PROGRAM], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    try:
        yield running
    finally:
        running.kill()
        running.communicate()


@pytest.mark.skipif(not hasattr(os, "SCHED_BATCH"), reason="the system has no such policy")
def test_the_thread_that_has_word_of_writes_waits_its_turn(process: subprocess.Popen[str]) -> None:
    """gRPC's poller, found by its name: one thread; those that compute and those that read the network are as they were."""
    assert process.stdout is not None
    process.stdout.readline()
    policies = [os.sched_getscheduler(thread.id) for thread in psutil.Process(process.pid).threads()]
    assert policies.count(os.SCHED_BATCH) == 1 and os.sched_getscheduler(process.pid) == os.SCHED_OTHER


def test_a_gateway_is_up_quickly_small_and_live_without_a_scheduler(process: subprocess.Popen[str]) -> None:
    """Listens at once, says that it is live and not ready, needs no torch, stops with status 0 on SIGTERM."""
    assert process.stdout is not None
    _, http, _, _ = process.stdout.readline().split()
    cpu = psutil.Process(process.pid).cpu_times()
    assert httpx.get(f"http://{http}/health/live").status_code == 200
    ready = httpx.get(f"http://{http}/health/ready")
    assert (ready.status_code, "127.0.0.1:1" in ready.json()["reason"]) == (503, True)
    assert psutil.Process(process.pid).memory_info().rss < 150 * 2**20
    assert cpu.user + cpu.system < 10  # about 1 s of an idle machine; this one may be slow
    process.send_signal(signal.SIGTERM)
    assert process.wait(40) == 0


@pytest.mark.parametrize("option", ["--grpc-port", "--http-port", "--admin-port", "--admin-http-port"])
def test_a_port_in_use_names_its_option(option: str) -> None:
    """ConfigError that says which option to change; nothing stays behind."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        name = option.removeprefix("--").replace("-", "_")
        names = ("grpc_port", "http_port", "admin_port", "admin_http_port")
        ports = {**dict.fromkeys(names, 0), name: taken.getsockname()[1]}
        settings = GatewaySettings(schedulers=("127.0.0.1:1",), **ports)
        with pytest.raises(ConfigError, match=f"in use.*{option} "):
            asyncio.run(asyncio.wait_for(app.serve(settings, on_ready=lambda *_: None), 20))


def test_the_spans_of_a_request(otlp: OtlpReceiver, monkeypatch: pytest.MonkeyPatch) -> None:
    """SERVER span in the caller's trace, GenAI span inside it with the attributes of the conventions, never the prompt."""
    trace_id, secret = "1af7651916cd43dd8448eb211c80319d", "a-secret-prompt"

    @run_async
    async def scenario() -> None:
        async with (
            worker() as (worker_address,),
            scheduler(worker_address) as (address, _),
            gateway(address) as doors,
            grpc.aio.insecure_channel(doors[0]) as channel,
        ):
            await post(doors, "warm", "completions", prompt="a", max_tokens=1)
            metadata = (("traceparent", f"00-{trace_id}-b7ad6b7169203331-01"), ("x-request-id", "traced"))
            request = pb.GenerateRequest(text=secret, stop=pb.StopConditions(max_tokens=4), labels={"team": "blue"})
            stub = inference_pb2_grpc.InferenceServiceStub(channel)
            await stub.Generate(request, timeout=20, metadata=metadata)
            with pytest.raises(grpc.RpcError):
                await stub.Generate(pb.GenerateRequest(text="x", model="nope"), timeout=20)
            await post(doors, "over-http", "completions", prompt=secret, max_tokens=2)

    with exporting(otlp, monkeypatch):
        scenario()
    spans = [span for span in otlp.spans() if span.service == "quire-gateway"]
    server = next(span for span in spans if span.trace_id == trace_id and span.kind == "SERVER")
    inner = next(span for span in spans if span.parent_id == server.span_id)
    assert (server.name, server.parent_id) == ("quire.inference.v1.InferenceService/Generate", "b7ad6b7169203331")
    assert (inner.name, inner.kind) == ("text_completion simulated", "INTERNAL")
    expected = {
        "gen_ai.operation.name": "text_completion",
        "gen_ai.provider.name": "quire",
        "gen_ai.request.model": "simulated",
        "gen_ai.request.max_tokens": 4,
        "gen_ai.usage.input_tokens": len(secret),
        "gen_ai.usage.output_tokens": 4,
        "gen_ai.response.id": "traced",
        "quire.label.team": "blue",
    }
    assert expected.items() <= inner.attributes.items()
    assert list(inner.attributes["gen_ai.response.finish_reasons"]) == ["length"]
    below = [span for span in otlp.spans() if span.parent_id == inner.span_id]
    assert {span.service for span in below} >= {"quire-scheduler"}
    assert any(span.attributes.get("error.type") == "MODEL_NOT_FOUND" for span in spans)
    assert any(span.name == "POST /v1/completions" and span.parent_id == "" for span in spans)
    assert all(secret not in str(span.attributes) for span in otlp.spans())
