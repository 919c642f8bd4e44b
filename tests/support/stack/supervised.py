"""A stack whose dead services are started again, streams read from it meanwhile, and services killed under them."""

import os
import random
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from quire import SamplingParams
from quire.client.messages import Prompt, RequestOptions
from quire.client.outputs import RequestOutput
from quire.client.sync_client import Client
from quire.local_stack.processes import ServiceProcess
from quire.local_stack.restarts import RestartRules
from quire.local_stack.stack import LocalStack
from tests.support.stack.up_process import born, is_running, wait_gone

OFTEN = RestartRules(max_deaths=10_000, first_pause_s=0.05, longest_pause_s=0.05)
"""For tests that kill by the dozen."""
NOTICED_S = 5.0
"""How soon a stopped process is noticed: half of it is promised; machines that run tests are busy."""
BUG = "a bug in the scheduler"
"""What the scheduler logs of an exception that it did not expect, before it starts over."""
_READ_S = 1500.0


@dataclass(frozen=True)
class Case:
    """A request."""

    prompt: Prompt
    params: SamplingParams
    options: RequestOptions = field(default_factory=RequestOptions)


class Supervised:
    """A running stack with a thread that revives it. `deaths`: what `quire up` would say about each."""

    def __init__(self, stack: LocalStack, deaths: list[str]) -> None:
        self.stack = stack
        self.deaths = deaths
        self.births: dict[int, str | None] = {}
        self._note_births()
        # A process that was killed is there for a moment still: a second signal would be no second kill.
        self._killed: set[int] = set()
        self.error: Exception | None = None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._revive, name="revive")
        self._thread.start()

    def _revive(self) -> None:
        try:
            while not self._stop.wait(0.02):
                self.stack.revive()
                self._note_births()
        except Exception as error:
            self.error = error

    def _note_births(self) -> None:
        """Of each process of the stack: where many die, their numbers come again."""
        for pid in self.stack.pids.values():
            self.births[pid] = born(pid) or self.births.get(pid)

    @property
    def left(self) -> list[int]:
        """Processes of the stack, of all its lives, that run."""
        return [pid for pid, when in self.births.items() if when is not None and born(pid) == when]

    def close(self) -> None:
        self._stop.set()
        self._thread.join()

    def kill(self, name: str, number: int = signal.SIGKILL) -> int:
        """Signals the service's process, once it is there; its pid."""
        deadline = time.monotonic() + 60
        while (pid := self.stack.pids[name]) in self._killed or not is_running(pid):
            assert self.error is None and time.monotonic() < deadline, f"the {name} is not started again: {self.error}"
            time.sleep(0.01)
        os.kill(pid, number)
        if number == signal.SIGKILL:
            self._killed.add(pid)
        return pid


@contextmanager
def supervised(**options: object) -> Iterator[Supervised]:
    """A stack with the fields `options` of StackOptions, revived on a thread.

    Nothing outlives it, its thread saw no error, and its services told of no bug, from which they would have recovered.
    """
    deaths: list[str] = []
    lines: list[str] = []
    callbacks = {
        "on_restart": lambda death, pause_s: deaths.append(death),
        "on_line": lambda _name, line: lines.append(line),
    }
    with LocalStack(**callbacks, **{"restart": OFTEN, **options}) as stack:
        running = Supervised(stack, deaths)
        try:
            yield running
        finally:
            running.close()
    assert running.error is None, running.error
    assert not any(BUG in line for line in lines), lines[-200:]
    wait_gone(running.left, timeout_s=5)
    assert running.left == [], "processes outlived their stack"


@dataclass
class Readings:
    """Streams being read, one thread each. `num_tokens` so far, over all of them."""

    futures: list[Future[Any]] = field(default_factory=list)
    num_tokens: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def read(self, client: Client, case: Case) -> list[list[int]]:
        """Tokens of each choice; AssertionError for one that is lost or repeated on the way."""
        return [list(output.token_ids) for output in self.follow(client, case).outputs]

    def follow(self, client: Client, case: Case) -> RequestOutput:
        """The same with all that came."""
        stream = client.generate_stream(case.prompt, case.params, options=case.options, timeout_s=_READ_S)
        counts: Counter[int] = Counter()
        for delta in stream:
            assert delta.token_offset == counts[delta.choice], "tokens are lost or repeated"
            counts[delta.choice] += len(delta.token_ids)
            self.add(len(delta.token_ids))
        lengths = [len(output.token_ids) for output in stream.result.outputs]
        assert lengths == [counts[i] for i in range(len(lengths))]
        return stream.result

    def add(self, num_tokens: int) -> None:
        """So many more have come."""
        with self._lock:
            self.num_tokens += num_tokens

    def wait_for(self, num_tokens: int) -> None:
        """Returns when that many have come; raises what ended a stream before."""
        while self.num_tokens < num_tokens:
            self.check()
            assert not all(future.done() for future in self.futures), "all streams are over"
            time.sleep(0.002)

    def check(self) -> None:
        """Raises what ended a stream."""
        for future in self.futures:
            if future.done():
                future.result()


def read_all(
    address: str, cases: Sequence[Case], meanwhile: Callable[[Readings], None] | None = None
) -> list[list[list[int]]]:
    """Tokens of each choice of each case, all read at the same time while `meanwhile` runs here."""
    readings = Readings()
    with Client(address) as client, ThreadPoolExecutor(len(cases)) as threads:
        readings.futures = [threads.submit(readings.read, client, case) for case in cases]
        if meanwhile is not None:
            meanwhile(readings)
        return [future.result() for future in readings.futures]


def kills(running: Supervised, name: str, count: int, total_tokens: int, seed: int) -> Callable[[Readings], None]:
    """Kills the service `count` times while `total_tokens` are generated, after random numbers of them."""
    draw = random.Random(seed)
    moments = sorted(draw.sample(range(total_tokens // 50, total_tokens * 19 // 20), count))

    def kill(readings: Readings) -> None:
        for moment in moments:
            readings.wait_for(moment)
            time.sleep(draw.uniform(0, 0.02))
            running.kill(name)

    return kill


@contextmanager
def gateway_of(environ: Mapping[str, str], *schedulers: str) -> Iterator[str]:
    """One more gateway, of these schedulers: its gRPC door, once it serves."""
    ports = ("--port", "0", "--http-port", "0", "--admin-port", "0", "--admin-http-port", "0")
    arguments = ("gateway", *(word for one in schedulers for word in ("--scheduler", one)), *ports)
    service = ServiceProcess("gateway-2", arguments, environ=environ, on_line=lambda name, line: None)
    try:
        deadline = time.monotonic() + 60
        while not (service.announced and is_serving(service.address)):
            service.check()
            assert time.monotonic() < deadline
            time.sleep(0.05)
        yield service.address
    finally:
        service.terminate()
        service.wait(10)


def is_serving(address: str) -> bool:
    """What the health of the service at `address` says."""
    with grpc.insecure_channel(address) as channel:
        try:
            answer = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=5)
        except grpc.RpcError:
            return False
    return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)
