"""Requests with a fixed order of arrival.

Workers are stopped while the requests arrive, so that no step completes in between.
"""

import os
import signal
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from types import MappingProxyType

from quire.client.outputs import Delta, RequestOutput
from quire.client.streams import Stream
from quire_tools.tour.stage import TourRequest, TourStack, ended
from svc_common.errors import NotFound

_LONGEST_S = 1.5
_NO_PAUSES: Mapping[str, float] = MappingProxyType({})


def one_by_one(
    stack: TourStack,
    requests: Sequence[TourRequest],
    *,
    pauses_s: Mapping[str, float] = _NO_PAUSES,
    keep_errors: bool = False,
) -> list[RequestOutput]:
    """Outputs of requests that arrive in this order while the first one's step is in flight.

    The first request runs in its own step, which completes only after the last one has arrived. `pauses_s`:
    seconds between the arrival of a request and the next one; their sum must be well below 1 s.
    `keep_errors`: keep errors in the outputs instead of raising.
    """
    with ExitStack() as opened:
        with standing_still(stack):
            first, *others = requests
            streams = [opened.enter_context(stack.start(first))]
            wait_running(stack, first.id)
            for request in others:
                streams.append(arrive(stack, request, opened))
                time.sleep(pauses_s.get(request.id, 0.0))
        return [ended(stream, keep_error=keep_errors) for stream in streams]


def in_turn(stack: TourStack, requests: Sequence[TourRequest]) -> list[RequestOutput]:
    """Outputs of requests that arrive when the previous one has ended."""
    return [output for request in requests for output in stack.together([request])]


def arrive(stack: TourStack, request: TourRequest, opened: ExitStack) -> Stream:
    """Start a request and wait until the scheduler has it; `opened` closes its stream."""
    stream = opened.enter_context(stack.start(request))
    stack.wait(lambda: has_arrived(stack, request.id), f"{request.id} to arrive")
    return stream


def queues(stack: TourStack) -> dict[str, str]:
    """Unfinished requests by id, with the queue that each is in."""
    return {request.id: request.queue for request in stack.admin.requests().requests}


def has_arrived(stack: TourStack, name: str) -> bool:
    """True if the scheduler knows the request, finished or not."""
    try:
        return name in queues(stack) or bool(stack.why(name))
    except NotFound:
        return False


def wait_running(stack: TourStack, name: str) -> None:
    """Wait until the request has been scheduled (it may have finished since)."""
    stack.wait(lambda: has_arrived(stack, name) and queues(stack).get(name) != "waiting", f"{name} to run")


@contextmanager
def standing_still(stack: TourStack) -> Iterator[None]:
    """Stop the workers with SIGSTOP and continue them with SIGCONT at the end.

    They continue after 1.5 s at the latest, before the scheduler takes them for lost.
    """
    pids = [pid for name, pid in stack.local.pids.items() if name.startswith("worker")]
    latest = threading.Timer(_LONGEST_S, _signal, (pids, signal.SIGCONT))
    _signal(pids, signal.SIGSTOP)
    latest.start()
    try:
        yield
    finally:
        latest.cancel()
        _signal(pids, signal.SIGCONT)


def _signal(pids: Sequence[int], number: signal.Signals) -> None:
    for pid in pids:
        os.kill(pid, number)


def read_on(readings: Sequence[Iterator[Delta]]) -> None:
    """Read started streams to their ends, one after the other."""
    for reading in readings:
        for _ in reading:
            pass
