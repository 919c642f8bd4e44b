"""P2: the worker, with a real model, is killed in the middle of a stream and started again; the stream goes on (design.md 8)."""

import os
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from quire import SamplingParams
from quire.client import Client
from quire.processes import ServiceProcess, ignore_line
from quire.stack import default_model

_PROMPT = "class Node:"
_PARAMS = SamplingParams(temperature=0.9, seed=5, max_tokens=200, ignore_eos=True)


def _serve(name: str, *arguments: str) -> ServiceProcess:
    """One service, listening."""
    service = ServiceProcess(name, [name, *arguments], environ=os.environ, on_line=ignore_line)
    deadline = time.monotonic() + 60
    while not service.announced:
        assert time.monotonic() < deadline, f"{name} says nothing"
        time.sleep(0.02)
    service.check()
    return service


@contextmanager
def _ended(service: ServiceProcess) -> Iterator[ServiceProcess]:
    try:
        yield service
    finally:
        service.kill()
        service.wait(10)


def _worker(port: str) -> ServiceProcess:
    return _serve("worker", "--model", str(default_model()), "--port", port)


def test_a_stream_survives_the_death_of_the_worker() -> None:
    """kill -9 and a restart: every token exactly once, the same as in an undisturbed run, and no error."""
    with ExitStack() as running:
        worker = running.enter_context(_ended(_worker("0")))
        scheduler = running.enter_context(
            _ended(_serve("scheduler", "--worker", worker.address, "--port", "0", "--admin-port", "0"))
        )
        ports = ("--port", "0", "--http-port", "0", "--admin-port", "0")
        gateway = running.enter_context(_ended(_serve("gateway", "--scheduler", scheduler.address, *ports)))
        client = running.enter_context(Client(gateway.address))
        undisturbed = client.generate(_PROMPT, _PARAMS, timeout_s=60)
        stream = client.generate_stream(_PROMPT, _PARAMS, timeout_s=90)
        token_ids: list[int] = []
        killed = False
        for delta in stream:
            assert delta.token_offset == len(token_ids)
            token_ids += delta.token_ids
            if len(token_ids) > 40 and not killed:
                killed = True
                worker.kill()
                worker.wait(10)
                running.enter_context(_ended(_worker(worker.address.rpartition(":")[2])))
    assert killed
    assert token_ids == undisturbed.outputs[0].token_ids
    assert stream.result.outputs[0].text == undisturbed.outputs[0].text
