"""The service as a process: quick, light, without torch; wrong settings are clear errors; health tells the truth."""

import asyncio
import json
import signal
import socket
import subprocess
import sys

import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from scheduler_svc.settings import SchedulerSettings
from svc_common.errors import ConfigError
from svc_common.net import rpc
from tests.support.services.harness import eventually, run_async, scheduler, stack, worker

SERVE = """
import asyncio, json, sys
import psutil
from scheduler_svc import app
from scheduler_svc.settings import SchedulerSettings

def ready(address, admin_address, metrics_address):
    rss_mb = psutil.Process().memory_info().rss / 2**20
    heavy = sorted({"torch", "transformers", "tokenizers"} & set(sys.modules))
    print(json.dumps({"address": address, "admin": admin_address, "rss_mb": rss_mb, "heavy": heavy}), flush=True)

asyncio.run(app.serve(SchedulerSettings(workers=("127.0.0.1:1",), port=0, admin_port=0, metrics_port=0), on_ready=ready))
"""


def test_light_and_stopped_by_sigterm() -> None:
    """Under 150 MB and no torch (P5; how soon it listens is `benchmarks.startup`'s); SIGTERM ends it in order."""
    process = subprocess.Popen([sys.executable, "-c", SERVE], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        said = json.loads(process.stdout.readline())
        process.send_signal(signal.SIGTERM)
        _, errors = process.communicate(timeout=20)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 0, errors
    assert said["heavy"] == [] and said["rss_mb"] < 150
    assert "Traceback" not in errors


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"workers": ()}, "--worker"),
        ({"workers": ("a:1", "a:1")}, "given twice"),
        ({"workers": ("nonsense",)}, "HOST:PORT"),
        ({"policy": "nope"}, "unknown policy 'nope'"),
        ({"max_num_batched_tokens": 8, "max_num_seqs": 9}, "max_num_batched_tokens (8)"),
        ({"policy_set": ("cache=none",)}, "policy_set cache=none"),
    ],
)
def test_settings_that_cannot_work(values: dict[str, object], named: str) -> None:
    """ConfigError, before anything listens, naming the setting."""
    with pytest.raises(ConfigError) as error:
        asyncio.run(_start_and_stop(**{"workers": ("127.0.0.1:1",), **values}))
    assert named in error.value.message


async def _start_and_stop(**values: object) -> None:
    from scheduler_svc import app

    settings = SchedulerSettings(**{"port": 0, "admin_port": 0, "metrics_port": 0, **values})  # type: ignore[arg-type]
    await app.serve(settings, on_ready=lambda *_: None, stop=asyncio.Event())


@pytest.mark.parametrize("option", ["--port", "--admin-port", "--metrics-port"])
def test_a_taken_port_is_named(option: str) -> None:
    """Port in use: which one and what to do."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        values = {option[2:].replace("-", "_"): taken.getsockname()[1]}
        with pytest.raises(ConfigError, match=option):
            asyncio.run(_start_and_stop(workers=("127.0.0.1:1",), **values))


async def health(address: str, service: str = "") -> int:
    channel = rpc.channel(address)
    try:
        stub = health_pb2_grpc.HealthStub(channel)
        return (await stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=5)).status
    finally:
        await channel.close()


@run_async
async def test_health_follows_the_worker() -> None:
    """ "" is SERVING iff steps can run, "liveness" always; on both listeners."""
    serving, not_serving = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING
    async with scheduler("127.0.0.1:1") as (address, admin_address):
        assert await health(address) == await health(admin_address) == not_serving
        assert await health(address, "liveness") == serving
    async with stack() as s:
        assert await health(s.address) == await health(s.admin_address) == serving
        assert await health(s.address, "quire.engine.v1.EngineService") == serving


@run_async
async def test_reflection_names_the_services() -> None:
    """Any gRPC client can ask what is offered."""
    async with scheduler("127.0.0.1:1") as (address, admin_address):
        for where, name in (
            (address, "quire.engine.v1.EngineService"),
            (admin_address, "quire.inference.v1.AdminService"),
        ):
            channel = rpc.channel(where)
            call = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo()
            await call.write(reflection_pb2.ServerReflectionRequest(list_services=""))
            answer = await call.read()
            assert name in [s.name for s in answer.list_services_response.service]
            call.cancel()
            await channel.close()


@run_async
async def test_a_scheduler_that_stops_gives_its_worker_back() -> None:
    """The next scheduler need not wait for the lease; another that comes too early is told which one owns it and tries again."""
    async with worker(owner_lease_s=60.0) as (worker_address,):
        async with scheduler(worker_address) as (first, _):
            await until_serving(first)
            async with scheduler(worker_address) as (second, _):
                await asyncio.sleep(0.3)
                assert await health(second) == health_pb2.HealthCheckResponse.NOT_SERVING
        async with scheduler(worker_address) as (third, _):
            await until_serving(third)


@run_async
async def test_force_takes_a_worker_over() -> None:
    """`force_ownership`: the former owner loses it at once and says so."""
    async with worker(owner_lease_s=60.0) as (worker_address,), scheduler(worker_address) as (first, _):
        await until_serving(first)
        async with scheduler(worker_address, force_ownership=True) as (second, _):
            await until_serving(second)
            await eventually_not_serving(first)


async def until_serving(address: str) -> None:
    for _ in range(2_000):
        if await health(address) == health_pb2.HealthCheckResponse.SERVING:
            return
        await asyncio.sleep(0.02)
    raise AssertionError("not serving")


async def eventually_not_serving(address: str) -> None:
    for _ in range(2_000):
        if await health(address) == health_pb2.HealthCheckResponse.NOT_SERVING:
            return
        await asyncio.sleep(0.02)
    raise AssertionError("still serving")


@run_async
async def test_stopping_ends_streams_in_order() -> None:
    """Gateways see the stream end, not a broken connection; nothing keeps running."""
    before = asyncio.all_tasks()
    async with stack() as s:
        handle = await s.gateway.submit(list(range(32, 60)), max_tokens=4000)
        await s.gateway.tokens_of(handle, 1)
    await eventually(lambda: asyncio.all_tasks() <= before, "tasks are gone")
