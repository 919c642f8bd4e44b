"""Checks of a running service from outside: reachable, serving, and of the same build."""

from collections.abc import Iterator
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from protos.inference.v1 import inference_pb2, inference_pb2_grpc
from protos.worker.v1 import worker_pb2, worker_pb2_grpc
from quire.client.connections import Credentials, blocking_channel
from quire.client.sync_client import Client
from quire.operators.admin import AdminClient
from quire_tools.doctor.findings import Finding, ok, problem, warning
from svc_common.errors import PermissionDenied, QuireError, Unauthenticated
from svc_common.net import rpc
from svc_common.version import SPOKEN, VERSION, Revisions

_TIMEOUT_S = 5.0
_LOG_HINT = "its log (standard error) says why"


def health(name: str, address: str, credentials: Credentials) -> Iterator[Finding]:
    """Check that a service listens at `address` and reports SERVING."""
    with blocking_channel(credentials)(address) as channel:
        try:
            answer = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=_TIMEOUT_S)
        except grpc.RpcError as error:
            yield problem(
                name,
                f"{address} does not answer: {rpc.from_rpc_error(error).message}",
                f"start it, or check the address; {_LOG_HINT}",
            )
            return
    if answer.status == health_pb2.HealthCheckResponse.SERVING:
        yield ok(name, f"{address} serves")
    else:
        yield problem(name, f"{address} listens, but does not serve", f"what it waits for comes below; {_LOG_HINT}")


def gateway(address: str, credentials: Credentials) -> Iterator[Finding]:
    """Check a gateway and its models."""
    yield from health("gateway", address, credentials)
    with Client(address, credentials=credentials) as client:
        try:
            cards = client.models()
        except QuireError as error:
            yield problem(
                "models", error.message, _to_do(error, "give --target the address that `quire up` prints as grpc=")
            )
            return
    yield from _gateway_build(address, credentials)
    if cards:
        yield ok("models", ", ".join(f"{card.name} ({card.max_model_len} tokens)" for card in cards))
    else:
        yield problem("models", "none is loaded", "a worker is missing or still loading; see below with --admin")


def scheduler(address: str, credentials: Credentials) -> Iterator[Finding]:
    """Check through the admin API that steps can complete, and check each worker."""
    with AdminClient(address, credentials=credentials) as client:
        try:
            load, workers = client.load(), client.workers()
        except QuireError as error:
            to_do = _to_do(error, "give --admin the address that `quire up` prints as admin=")
            yield problem("scheduler", error.message, to_do)
            return
    if load.draining:
        yield warning("scheduler", "it drains: no more requests are taken", "quire drain --undo")
    elif load.serving:
        yield ok(
            "scheduler", f"serves; {load.queues.running} requests run, {load.num_waiting} of {load.max_waiting} wait"
        )
    else:
        yield problem("scheduler", "steps cannot complete", "see its workers")
    if not workers:
        yield problem("workers", "the scheduler knows none", "start it with --worker HOST:PORT")
    for worker in workers:
        yield _worker(worker)


def _to_do(error: QuireError, otherwise: str) -> str:
    """The remedy: another key if the call was refused (then the address is right), else `otherwise`."""
    refused = isinstance(error, Unauthenticated | PermissionDenied)
    return "call with another key: --api-key or QUIRE_API_KEY (`quire keys new`)" if refused else otherwise


def _worker(worker: Any) -> Finding:
    what = f"{worker.address} {worker.model or 'without a model yet'}"
    if worker.ready:
        return ok("worker", f"{what}, {worker.num_gpu_blocks} blocks")
    if worker.warming:
        return warning("worker", f"{what}: {worker.reason or 'on the way'}", "wait until it has loaded its model")
    return problem("worker", f"{what}: {worker.reason or 'it does not run steps'}", _LOG_HINT)


def worker(address: str, credentials: Credentials) -> Iterator[Finding]:
    """Check a worker directly: whether it serves, and its build."""
    yield from health("worker", address, credentials)
    with blocking_channel(credentials)(address) as channel:
        try:
            stub = worker_pb2_grpc.WorkerServiceStub(channel)  # type: ignore[no-untyped-call]
            peer = stub.Describe(worker_pb2.DescribeRequest(), timeout=_TIMEOUT_S).identity
        except grpc.RpcError:
            return  # reported above
    yield from _build(f"worker {address}", peer.build, rpc.revisions_of(peer))


def _gateway_build(address: str, credentials: Credentials) -> Iterator[Finding]:
    """Check the gateway's release, which it sends with every response."""
    with blocking_channel(credentials)(address) as channel:
        stub = inference_pb2_grpc.InferenceServiceStub(channel)  # type: ignore[no-untyped-call]
        call = stub.ListModels.with_call(
            inference_pb2.ListModelsRequest(), timeout=_TIMEOUT_S, metadata=credentials.metadata()
        )[1]
        said = dict(call.initial_metadata())
    if "x-quire-version" in said:
        yield from _build("gateway", str(said["x-quire-version"]), SPOKEN)


def _build(name: str, theirs: str, spoken: Revisions) -> Iterator[Finding]:
    """Compare a service's build with this one. Services must have a protocol revision in common."""
    what = f"release {theirs or 'unknown'}, protocol revision {spoken}"
    if SPOKEN.agreed(spoken) is None:
        yield problem(f"{name}'s build", f"{what}; here {VERSION}, {SPOKEN}", "run the same release everywhere")
    elif theirs != VERSION:
        yield warning(
            f"{name}'s build", f"{what}; here {VERSION}", "they work together; run the same release when you can"
        )
    else:
        yield ok(f"{name}'s build", what)
