"""SGLang Model Gateway, unchanged, in front of two cells, over HTTP and over its engine contract."""

import asyncio
import random
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx

from quire.local_stack.stack import LocalStack
from tests.cells.load import AT_ONCE, RouterLoad, prompts, wish
from tests.support.commands import Failure, Progress
from tests.support.routers.smg import MODES, loads, router

SAMPLE_S = 0.5


@contextmanager
def cells(count: int) -> Iterator[list[LocalStack]]:
    """So many stacks with the built-in model."""
    with ExitStack() as held:
        yield [held.enter_context(LocalStack(worker_args=("--dtype", "float32"))) for _ in range(count)]


@contextmanager
def found_router(stacks: Sequence[LocalStack], mode: str, policy: str, home: Path) -> Iterator[httpx.Client]:
    """A router that has found all of them."""
    urls = [stack.http_url if mode == "http" else f"grpc://{stack.grpc_address}" for stack in stacks]
    with router(urls, policy, home) as client:
        while len(loads(client)) < len(stacks):
            time.sleep(0.1)
        yield client


def expected(stack: LocalStack, rng: random.Random) -> dict[str, str]:
    """What a cell answers without a router."""
    with httpx.Client(base_url=stack.http_url, timeout=120) as client:
        return {text: _content(client.post("/v1/chat/completions", json=wish(text))) for text in prompts(rng)}


def _content(answer: httpx.Response) -> str:
    answer.raise_for_status()
    return str(answer.json()["choices"][0]["message"]["content"])


def counters(stack: LocalStack) -> Counter[str]:
    """The values of a cell that are compared before and after, by name."""
    text = httpx.get(f"{stack.http_url}/metrics").text
    wanted = (
        "vllm:prefix_cache_queries_total",
        "vllm:prefix_cache_hits_total",
        "vllm:e2e_request_latency_seconds_count",
    )
    found: Counter[str] = Counter()
    for line in text.splitlines():
        name = line.partition("{")[0]
        if name in wanted:
            found[name] += int(float(line.rpartition(" ")[2]))
    return found


def follow(
    mode: str, policy: str, count: int, stacks: Sequence[LocalStack], answers: Mapping[str, str], home: Path
) -> str:
    """Load of `count` requests; a line of what was seen. Raises Failure for an error of any request."""
    before = [counters(stack) for stack in stacks]
    with found_router(stacks, mode, policy, home) as client:
        load, seen = asyncio.run(_loaded(client, count, answers))
        idle = [httpx.get(f"{stack.http_url}/load").json()["server_load"] for stack in stacks]
    used = [counters(stack) - start for stack, start in zip(stacks, before, strict=True)]
    hits, queries = (sum(one[f"vllm:prefix_cache_{name}_total"] for one in used) for name in ("hits", "queries"))
    requests = [one["vllm:e2e_request_latency_seconds_count"] for one in used]
    said = (
        f"{mode} {policy}: {count} requests, {load.num_failed} failed, {requests} at each cell; "
        f"{hits} of {queries} prompt tokens cached ({hits / max(queries, 1):.0%}); "
        f"most requests at once at a cell, as the router told: {seen}"
    )
    if load.num_failed or any(idle) or not all(requests) or len(seen) < len(stacks):
        raise Failure(f"{said}; left: {idle}; {dict(load.ended)} {load.errors[:5]}")
    return said


async def _loaded(client: httpx.Client, count: int, answers: Mapping[str, str]) -> tuple[RouterLoad, list[int]]:
    load = RouterLoad(str(client.base_url), answers, random.Random(count))
    running = asyncio.create_task(load.run(count))
    most: Counter[str] = Counter()
    while not running.done():
        most |= Counter({one["worker"]: one["num_total_reqs"] for one in await asyncio.to_thread(loads, client)})
        await asyncio.wait([running], timeout=SAMPLE_S)
    await running
    await load.close()
    return load, sorted(most.values())


def lose(mode: str, count: int, answers: Mapping[str, str], home: Path) -> str:
    """A cell is killed in the middle of a load; a line of what that cost.

    Raises Failure for a wrong answer, an error of a later request, and more errors than requests were in flight.
    """
    with cells(2) as stacks, found_router(stacks, mode, "power_of_two", home) as client:
        during, after = asyncio.run(_killed(client, count, answers, stacks[1]))
    wrong = {key: value for load in (during, after) for key, value in load.ended.items() if key[1] == "wrong"}
    failed = Counter(error.partition(":")[0] for error in during.errors)
    said = f"{mode}, a cell killed: {dict(failed)} of {count} requests failed, then {after.num_failed} of {count}"
    if wrong or after.num_failed or during.num_failed > AT_ONCE:
        raise Failure(f"{said}; {wrong} {during.errors[:3]} {after.errors[:3]}")
    return said


async def _killed(
    client: httpx.Client, count: int, answers: Mapping[str, str], cell: LocalStack
) -> tuple[RouterLoad, ...]:
    found: list[RouterLoad] = []
    for kills in (True, False):
        load = RouterLoad(str(client.base_url), answers, random.Random(count + kills))
        running = asyncio.create_task(load.run(count))
        while kills and sum(load.ended.values()) < count // 3 and not running.done():
            await asyncio.sleep(0.02)
        if kills:
            cell.kill()
        await running
        await load.close()
        found.append(load)
    return tuple(found)


def check(count: int, home: Path, progress: Progress) -> None:
    """The whole of it, with `count` requests in all."""
    with cells(2) as stacks:
        answers = expected(stacks[0], random.Random(0))
        progress.say(f"{len(answers)} prompts answered without a router")
        for mode, policy in MODES:
            progress.say(follow(mode, policy, count // len(MODES), stacks, answers, _folder(home, mode, policy)))
    for mode in ("http", "grpc"):
        progress.say(lose(mode, max(count // 20, 60), answers, _folder(home, mode, "killed")))


def _folder(home: Path, *names: Any) -> Path:
    folder = home / "-".join(names)
    folder.mkdir(parents=True)
    return folder
