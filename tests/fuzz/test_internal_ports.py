"""The ports between services and the admin API: whatever bytes arrive, each call ends with a typed error, and no traceback."""

import asyncio
import contextlib
import os
import time
from collections.abc import Callable, Iterator

import grpc
import pytest
from google.protobuf.descriptor import ServiceDescriptor
from grpc_health.v1 import health_pb2

from protos.inference.v1 import admin_pb2
from quire.built_in_model import default_model
from quire.client.sync_client import Client
from quire.local_stack.processes import ServiceProcess
from quire.local_stack.stack import LocalStack
from quire.operators.admin import AdminClient
from svc_common.errors import AlreadyExists, InvalidArgument, QuireError
from svc_common.net import rpc
from tests.fuzz import campaign, internal, traces
from tests.fuzz.conftest import WORKER_ARGUMENTS

SEED = 20_261_123
NUM_QUICK, NUM_LONG = 200, 12_000
MALFORMED = (b"\xff\xff\xff\xff", b"\x0a\x02\xff\xfe\x12\x02\xff\xfe\x1a\x02\xff\xfe\x22\x02\xff\xfe")
ADMIN = admin_pb2.DESCRIPTOR.services_by_name["AdminService"]
HEALTH = health_pb2.DESCRIPTOR.services_by_name["Health"]
START_S = 60.0


@pytest.fixture(scope="module")
def worker(log: traces.Log) -> Iterator[ServiceProcess]:
    """A simulated worker that no scheduler uses."""
    yield from _worker(log, "simulated-worker", *WORKER_ARGUMENTS)


@pytest.fixture(scope="module")
def real_worker(log: traces.Log) -> Iterator[ServiceProcess]:
    """One with the built-in model."""
    yield from _worker(log, "worker", "--model", str(default_model()), "--max-model-len", "64", "--num-threads", "1")


def _worker(log: traces.Log, *arguments: str) -> Iterator[ServiceProcess]:
    started = ServiceProcess(
        "worker", [*arguments, "--port", "0", "--metrics-port", "0"], environ=os.environ, on_line=log
    )
    deadline = time.monotonic() + START_S
    while not started.announced and time.monotonic() < deadline:
        time.sleep(0.01)
    yield started
    started.terminate()
    started.wait(START_S)


def _refusal(address: str, service: ServiceDescriptor, name: str, raw: bytes) -> QuireError:
    method, path = service.methods_by_name[name], f"/{service.full_name}/{name}"
    with grpc.insecure_channel(address) as channel:
        kind = (
            ("stream" if method.client_streaming else "unary")
            + "_"
            + ("stream" if method.server_streaming else "unary")
        )
        request = iter([raw]) if method.client_streaming else raw
        try:
            answer = getattr(channel, kind)(path)(request, timeout=20)
            if method.server_streaming:
                list(answer)
        except grpc.RpcError as error:
            return rpc.from_rpc_error(error)
    raise AssertionError(f"{path} took {raw!r}")


@pytest.mark.parametrize("raw", MALFORMED, ids=["no protobuf", "no UTF-8"])
def test_malformed_messages_are_refused_typed(
    stack: LocalStack, worker: ServiceProcess, log: traces.Log, raw: bytes
) -> None:
    """MALFORMED_MESSAGE at every method of every service, health included; nothing of it is an error in the log."""
    ports = (
        (stack.scheduler_address, internal.ENGINE),
        (worker.address, internal.WORKER),
        (stack.admin_address, ADMIN),
        *((address, HEALTH) for address in (stack.scheduler_address, worker.address, stack.grpc_address)),
    )
    for address, service in ports:
        for method in service.methods:
            if raw is MALFORMED[0] or any(field.type == field.TYPE_STRING for field in method.input_type.fields):
                error = _refusal(address, service, method.name, raw)
                assert (error.status, error.reason) == ("INVALID_ARGUMENT", "MALFORMED_MESSAGE"), method.full_name
    assert log.errors == [], "\n".join(log.errors)


@pytest.mark.parametrize(
    "path", ["x" * 300, "/" + "x" * 5_000, "a/" * 4_000, "a\0b", ""], ids=lambda path: str(len(path))
)
def test_an_adapter_path_that_no_file_system_takes(
    stack: LocalStack, worker: ServiceProcess, log: traces.Log, path: str
) -> None:
    """INVALID_ARGUMENT naming it, from the admin API and from a worker itself."""
    with AdminClient(stack.admin_address) as admin, pytest.raises(InvalidArgument, match="path"):
        admin.load_adapter("sql", path)
        admin.unload_adapter("sql")
    assert log.errors == [], "\n".join(log.errors)


def test_an_adapter_cannot_have_the_models_name(stack: LocalStack) -> None:
    """Requests that name it would get the model."""
    with AdminClient(stack.admin_address) as admin, pytest.raises(AlreadyExists, match="name of the model"):
        admin.load_adapter("simulated", "/somewhere")


def test_a_loaded_adapter_can_be_named_at_once(stack: LocalStack) -> None:
    """The gateway that answered LoadAdapter knows it, each time."""
    with AdminClient(stack.admin_address) as admin, Client(stack.grpc_address) as client:
        for i in range(30):
            admin.load_adapter(f"a{i}", f"/{i}")
            assert f"a{i}" in {model.name for model in client.models()}
            admin.unload_adapter(f"a{i}")


def _fuzz(stack: LocalStack, worker: ServiceProcess, log: traces.Log, num_inputs: int, seed: int) -> campaign.Account:
    account = asyncio.run(campaign.run_inside(stack.scheduler_address, worker.address, num_inputs, seed))
    assert account.wrong == [], "\n".join(account.wrong)
    with contextlib.suppress(InvalidArgument):
        traces.wait_until_nothing_is_left(stack)
    worker.check()
    assert log.errors == [], "\n".join(log.errors)
    assert len(account.ended) > 3
    return account


def test_some(
    stack: LocalStack, worker: ServiceProcess, log: traces.Log, record_property: Callable[[str, object], None]
) -> None:
    """Random, derived, mutated and valid messages: results or typed errors, and the stack serves on."""
    account = _fuzz(stack, worker, log, NUM_QUICK, SEED)
    record_property("size", f"fuzzed inputs to internal ports: {account.ended.total()}")


@pytest.mark.long
@pytest.mark.timeout(900)
def test_many(
    stack: LocalStack,
    worker: ServiceProcess,
    real_worker: ServiceProcess,
    log: traces.Log,
    record_property: Callable[[str, object], None],
) -> None:
    """The same of many, half of them with a worker that has a model."""
    account = _fuzz(stack, worker, log, NUM_LONG // 2, SEED + 1)
    ends = account.ended + _fuzz(stack, real_worker, log, NUM_LONG // 2, SEED + 2).ended
    record_property("size", f"fuzzed inputs to internal ports: {ends.total()}, ended {dict(ends)}")
