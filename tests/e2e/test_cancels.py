"""Cancel, deadline and disconnect at random moments through three real processes: nothing is left behind.

100 here, 1,000 in `make test-long`; both print their size.
"""

import asyncio
import random
import time
import uuid
from collections import Counter
from collections.abc import Callable

import psutil
import pytest

from quire import SamplingParams
from quire.client.sync_client import AsyncClient, Client
from quire.local_stack.stack import LocalStack
from svc_common.errors import Cancelled, DeadlineExceeded
from tests.support.stack.commands import blocks, last_step, steps

_LONG = SamplingParams(temperature=1.0, max_tokens=400, ignore_eos=True)


async def _leave(client: AsyncClient, kind: str, number: int, draw: random.Random) -> str:
    """Starts a long request and leaves it in one of the ways a client has; what came of it."""
    delay = draw.random() * 0.3
    name = f"leave-{kind}-{number}-{uuid.uuid4().hex}"
    if kind == "deadline":
        try:
            await client.generate("x " * draw.randrange(1, 60), _LONG, request_id=name, timeout_s=0.02 + delay)
        except DeadlineExceeded:
            return "deadline"
        return "finished"
    stream = client.generate_stream("y " * draw.randrange(1, 60), _LONG, request_id=name)
    reader = asyncio.create_task(stream.read())
    await asyncio.sleep(delay)
    if kind == "cancel":
        await client.cancel(name)
    else:
        reader.cancel()
    try:
        await reader
    except (Cancelled, asyncio.CancelledError):
        return kind
    return "finished"


async def _storm(address: str, count: int) -> Counter[str]:
    draw = random.Random(count)
    async with AsyncClient(address) as client:
        kinds = [draw.choice(["cancel", "deadline", "disconnect"]) for _ in range(count)]
        done: Counter[str] = Counter()
        for start in range(0, count, 50):
            batch = [_leave(client, kind, start + i, draw) for i, kind in enumerate(kinds[start : start + 50])]
            done.update(await asyncio.gather(*batch))
    return done


def _descriptors(stack: LocalStack) -> dict[str, tuple[int, int]]:
    """(file descriptors, threads) of each process."""
    processes = {name: psutil.Process(pid) for name, pid in stack.pids.items()}
    return {name: (process.num_fds(), process.num_threads()) for name, process in processes.items()}


def _until_free(stack: LocalStack) -> dict:
    """The blocks once everything is free, or as they are after five seconds."""
    deadline = time.monotonic() + 5
    while (report := blocks(stack.admin_address))["gpu"]["free"] != report["gpu"]["total"]:
        if time.monotonic() > deadline:
            break
        time.sleep(0.1)
    return report


def _check(stack: LocalStack, count: int) -> str:
    asyncio.run(_storm(stack.grpc_address, 50))
    before = _descriptors(stack)
    done = asyncio.run(_storm(stack.grpc_address, count))
    report = _until_free(stack)
    assert report["gpu"]["free"] == report["gpu"]["total"]
    assert report["tables"] == {}
    assert report["refs"] == {}
    after = _descriptors(stack)
    for name, (fds, threads) in after.items():
        assert fds <= before[name][0] + 8, f"{name}: descriptors {before[name][0]} -> {fds}"
        assert threads <= before[name][1] + 2, f"{name}: threads {before[name][1]} -> {threads}"
    with Client(stack.grpc_address) as client:
        assert len(client.generate("z", SamplingParams(max_tokens=5, ignore_eos=True)).outputs[0].token_ids) == 5
    assert min(done[kind] for kind in ("cancel", "deadline", "disconnect")) > count // 10
    return f"left at random moments: {count} requests, {dict(sorted(done.items()))}"


@pytest.mark.timeout(240)
def test_leaving_at_random_moments(stack: LocalStack, record_property: Callable[[str, object], None]) -> None:
    """100 of them."""
    record_property("size", _check(stack, 100))


@pytest.mark.long
@pytest.mark.timeout(900)
def test_a_thousand_that_leave_at_random_moments(record_property: Callable[[str, object], None]) -> None:
    """1,000 of them, at a worker that takes no processor time from the others."""
    with LocalStack(simulated=True, worker_args=("--time-scale", "1")) as simulated:
        record_property("size", _check(simulated, 1000))


def test_blocks_are_free_before_the_next_plan(stack: LocalStack, client: Client) -> None:
    """After a cancel no later step schedules the request, and its blocks are gone from the very next step's tables."""
    first = last_step(stack.admin_address) + 1
    keep = client.generate_stream("while True:", SamplingParams(temperature=0, max_tokens=1_900, ignore_eos=True))
    drop = client.generate_stream("import os", _LONG, request_id="to-be-dropped")
    next(iter(drop))
    client.cancel("to-be-dropped")
    behind: list[dict] = []
    while len(behind) < 20:  # the other one goes on
        enough = last_step(stack.admin_address) + 20
        while last_step(stack.admin_address) < enough:
            time.sleep(0.02)
        log = steps(stack.admin_address, "--tables", "--since", str(first))
        mine = [i for i, s in enumerate(log) if any(g["id"] == "to-be-dropped" for g in s["scheduled"])]
        assert mine, "it ran"
        behind = log[mine[-1] + 1 :]
    keep.cancel()
    assert len(mine) < 100, "it was cut short"
    assert all("to-be-dropped/0" not in s["tables"] for s in behind)
