"""Errors of calls: a service's own words arrive unchanged and are not asked for twice; the transport's are explained."""

import asyncio
import threading
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

import grpc
import grpc.aio
import pytest

from quire import AsyncClient, Client
from quire.operators.admin import AdminClient
from svc_common.errors import QuireError, Unavailable, Unimplemented
from svc_common.net import rpc

REFUSAL = Unavailable("no worker: failed to connect to 127.0.0.1:50061", reason="NO_MODEL", retry_after_s=2.0)


class _Door:
    """A real gRPC server on a thread's own loop; every public method answers with `error`. `calls` counts them."""

    def __init__(self, error: QuireError | None) -> None:
        self.calls = 0
        self._error = error
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._thread.start()
        self.address = self._run(self._start())

    def close(self) -> None:
        """Ends server and thread."""
        self._run(self._server.stop(None))
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _run(self, work: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(10)

    async def _start(self) -> str:
        self._server = rpc.server(public=True)
        unary = grpc.unary_unary_rpc_method_handler(self._answer)
        handlers = {
            "Generate": unary,
            "Tokenize": unary,
            "GenerateStream": grpc.unary_stream_rpc_method_handler(self._answer),
        }
        name = "quire.inference.v1.InferenceService"
        self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(name, handlers),))
        port = self._server.add_insecure_port("127.0.0.1:0")
        await self._server.start()
        return f"127.0.0.1:{port}"

    async def _answer(self, request: bytes, context: grpc.aio.ServicerContext) -> bytes:
        self.calls += 1
        if self._error is None:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "failed to connect")  # as a proxy or the transport would
        async with rpc.errors_to_status(context):
            raise self._error or AssertionError
        return b""


@pytest.fixture
def door() -> Iterator[Callable[[QuireError | None], _Door]]:
    """Makes doors and closes them."""
    made: list[_Door] = []

    def make(error: QuireError | None) -> _Door:
        made.append(_Door(error))
        return made[-1]

    yield make
    for one in made:
        one.close()


def test_a_services_own_error_arrives_unchanged_and_once(door: Callable[[QuireError | None], _Door]) -> None:
    """Text, reason and retry time are the service's, whatever words it used; a wait of its is not repeated by retries."""
    gateway = door(REFUSAL)
    with Client(gateway.address) as client:
        for call in (client.generate, client.tokenize, lambda prompt: client.generate_stream(prompt).read()):
            before = gateway.calls
            with pytest.raises(Unavailable) as caught:
                call("x")
            _assert_refusal(caught.value)
            assert gateway.calls == before + 1
    before = gateway.calls
    with pytest.raises(Unavailable) as caught:
        asyncio.run(_generate(gateway.address))
    _assert_refusal(caught.value)
    assert gateway.calls == before + 1


def test_the_transports_failure_is_tried_again_and_explained(door: Callable[[QuireError | None], _Door]) -> None:
    """Three attempts in all; then what to do."""
    broken = door(None)
    with Client(broken.address) as client, pytest.raises(Unavailable, match=r"quire up.*grpc=") as caught:
        client.generate("x")
    assert (caught.value.reason, broken.calls) == ("CONNECT_FAILED", 3)


def test_another_listener_is_named(door: Callable[[QuireError | None], _Door]) -> None:
    """The operators' commands at the users' door: says what it is not, and which address to take."""
    gateway = door(REFUSAL)
    with AdminClient(gateway.address) as admin:
        for call in (admin.blocks, lambda: next(admin.steps())):
            with pytest.raises(Unimplemented, match=r"is no admin listener.*`quire up` prints as admin="):
                call()
    with Client(gateway.address) as client, pytest.raises(Unimplemented, match=r"is no gateway.*grpc="):
        client.models()


async def _generate(address: str) -> None:
    async with AsyncClient(address) as client:
        await client.generate("x")


def _assert_refusal(error: QuireError) -> None:
    assert (error.message, error.reason, error.retry_after_s) == (REFUSAL.message, "NO_MODEL", 2.0)
