"""Inputs for the ports between services: streams and calls of the scheduler's EngineService and of a worker's WorkerService."""

import random
from collections.abc import Callable

from google.protobuf.message import Message

from protos.engine.v1 import engine_pb2
from protos.worker.v1 import worker_pb2
from svc_common.net.rpc import Identity
from tests.fuzz import protos

ENGINE = engine_pb2.DESCRIPTOR.services_by_name["EngineService"]
WORKER = worker_pb2.DESCRIPTOR.services_by_name["WorkerService"]
_WORKER_SHARE = 0.5
_GOOD_HELLO_SHARE = 0.8
_MOST_MESSAGES = 5
_IDENTITY = Identity().message()


def internal_input(rng: random.Random) -> protos.Input:
    """A call of one of both services; where the client streams, several messages, most often behind a hello that is taken."""
    service = WORKER if rng.random() < _WORKER_SHARE else ENGINE
    method = rng.choice(service.methods)
    path = f"/{service.full_name}/{method.name}"
    made = protos.call_input(rng, method, path)
    if not method.client_streaming:
        return made
    hello = _HELLOS[method.full_name](rng).SerializeToString()
    first = hello if rng.random() < _GOOD_HELLO_SHARE else made.raw
    more = tuple(protos.call_input(rng, method, path).raw for _ in range(rng.randrange(_MOST_MESSAGES)))
    return protos.Input(made.kind, path, True, first, made.metadata, made.timeout_s, more)


def _attach(rng: random.Random) -> Message:
    frontend_id = f"fuzz-{rng.randrange(8)}"
    return engine_pb2.FrontendMessage(hello=engine_pb2.FrontendHello(identity=_IDENTITY, frontend_id=frontend_id))


def _run(rng: random.Random) -> Message:
    epoch = 0 if rng.random() < 0.9 else rng.randrange(2**64)
    return worker_pb2.SchedulerOutputs(hello=worker_pb2.RunHello(identity=_IDENTITY, epoch=epoch, force=True))


_HELLOS: dict[str, Callable[[random.Random], Message]] = {
    ENGINE.methods_by_name["Attach"].full_name: _attach,
    WORKER.methods_by_name["Run"].full_name: _run,
}
