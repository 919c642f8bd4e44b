"""All three services, traced: in this process for small runs, in three for large ones."""

import asyncio
import contextlib
import os
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from gateway_svc import app as gateway_app
from gateway_svc.settings import GatewaySettings
from protos.inference.v1 import admin_pb2
from quire.client.connections import Credentials
from quire.local_stack.otlp_receiver import OtlpReceiver
from quire.local_stack.stack import LocalStack
from quire.operators.admin import AdminClient
from tests.support.services.harness import Admin, eventually, scheduler, service, worker
from tests.traces.asks import KEYS, TENANTS, Ask, Clients

MAX_STEPS = 400_000


@contextlib.contextmanager
def exporting(otlp: OtlpReceiver, monkeypatch: pytest.MonkeyPatch, **environ: str) -> Iterator[None]:
    """Services started within export to the receiver, with these variables.

    Within, set no variable through `monkeypatch`: it would be set back after all is undone here, and so outlive the test.
    """
    with monkeypatch.context() as patch:
        for name in [name for name in os.environ if name.startswith("OTEL_")]:
            patch.delenv(name)
        for name, value in {**otlp.environ(), **environ}.items():
            patch.setenv(name, value)
        yield


def gateway(scheduler_address: str, **values: Any) -> contextlib.AbstractAsyncContextManager[tuple[str, ...]]:
    """A gateway on this loop; addresses of its doors: gRPC, HTTP, and the operators'."""
    ports = dict.fromkeys(("grpc_port", "http_port", "admin_port", "admin_http_port"), 0)
    settings = GatewaySettings(schedulers=(scheduler_address,), **{**ports, "drain_s": 0.0, **values})
    return service(lambda ready, stop: gateway_app.serve(settings, on_ready=ready, stop=stop))


async def post(doors: tuple[str, ...], request_id: str, path: str, **fields: Any) -> None:
    """A request to the HTTP door, to its end."""
    async with httpx.AsyncClient(timeout=60) as client:
        url, headers = f"http://{doors[1]}/v1/{path}", {"x-request-id": request_id}
        answer = await client.post(url, json=fields, headers=headers)
        assert answer.status_code == 200, answer.text


@contextlib.asynccontextmanager
async def in_process(
    worker_values: dict[str, Any], scheduler_values: dict[str, Any], **gateway_values: Any
) -> AsyncIterator[tuple[str, str]]:
    """All three on this loop; addresses of the gateway's gRPC door and of the scheduler's admin door."""
    async with (
        worker(**worker_values) as (worker_address,),
        scheduler(worker_address, **scheduler_values) as (address, admin_address),
        gateway(address, **gateway_values) as doors,
    ):
        async with Admin(admin_address) as admin:
            await eventually(lambda: True, "services are there")
            while not (await admin.stub.GetLoad(admin_pb2.GetLoadRequest(), wait_for_ready=True)).serving:
                await asyncio.sleep(0.005)
        yield doors[0], admin_address


def tenants_file(folder: Path) -> Path:
    """The tenants of `asks`."""
    path = folder / "tenants.toml"
    path.write_text(TENANTS, encoding="utf-8")
    return path


Ran = tuple[Counter[str], list[admin_pb2.StepReport]]


def run_here(
    wanted: list[Ask], worker_values: dict[str, Any], scheduler_values: dict[str, Any], tenants: Path, num_at_once: int
) -> Ran:
    """How they ended, and the steps with block tables."""

    async def run() -> Ran:
        async with asyncio.timeout(100), in_process(worker_values, scheduler_values, tenants=tenants) as doors:
            ends = await Clients(doors[0], num_at_once).send(wanted)
            async with Admin(doors[1]) as admin:
                while (await admin.stub.GetLoad(admin_pb2.GetLoadRequest())).queues.running:
                    await asyncio.sleep(0.01)
                return ends, await admin.steps(tables=True)

    return asyncio.run(run())


def run_apart(
    wanted: list[Ask], worker_args: list[str], scheduler_args: list[str], tenants: Path, num_at_once: int
) -> Ran:
    """The same with three processes; without block tables."""
    steps = ("--max-logged-steps", str(MAX_STEPS))

    async def send(address: str) -> Counter[str]:
        return await Clients(address, num_at_once).send(wanted)

    with LocalStack(
        simulated=True, worker_args=worker_args, scheduler_args=[*scheduler_args, *steps], tenants=tenants
    ) as stack:
        ends = asyncio.run(send(stack.grpc_address))
        with AdminClient(stack.admin_address, credentials=Credentials(api_key=KEYS["many"])) as admin:
            return ends, list(admin.steps())
