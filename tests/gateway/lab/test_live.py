"""The lab of a running stack: the page gets what the admin API returns, and nothing is polled while no page is open."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import grpc.aio
import httpx
import pytest

from gateway_svc.calls import DefaultTenantOnly
from gateway_svc.http.server import HttpServer
from gateway_svc.lab import translation
from gateway_svc.lab.app import MAX_PAGES, lab_app
from gateway_svc.lab.guard import LabGuard
from gateway_svc.lab.live import LiveLabSource
from protos.inference.v1 import admin_pb2 as pb
from svc_common.errors import Unavailable
from svc_common.net import rpc
from tests.support.services.harness import Stack, eventually, run_async, stack

pytestmark = pytest.mark.processes

PROMPT = [101 + 3 * i for i in range(40)]
SLOW = {"time_scale": 1.0, "step_base_s": 0.01, "num_gpu_blocks": 24, "max_model_len": 256}


class Counted:
    """A way to the scheduler that counts how often it is asked for."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.num_calls = 0
        self.is_away = False
        self._channel = rpc.channel(address)

    async def __call__(self) -> grpc.aio.Channel:
        self.num_calls += 1
        if self.is_away:
            raise Unavailable("the scheduler has not been reached yet", reason="SCHEDULER_AWAY", retry_after_s=1.0)
        return self._channel

    async def close(self) -> None:
        await self._channel.close()


@contextlib.asynccontextmanager
async def lab(running: Stack) -> AsyncIterator[tuple[httpx.AsyncClient, Counted]]:
    """The lab over a real listener: streams must break when their readers go."""
    asked = Counted(running.admin_address)
    source = LiveLabSource(asked, title="here", can_generate=False)
    server = HttpServer(LabGuard(lab_app(source), DefaultTenantOnly()), 1.0)
    url = f"http://127.0.0.1:{server.bind('127.0.0.1', 0, option='')}"
    serving = asyncio.create_task(server.run_bound())
    try:
        async with httpx.AsyncClient(base_url=url, timeout=20, verify=False) as http:
            yield http, asked
    finally:
        server.stop()
        await serving
        server.close()
        await asked.close()


@dataclass
class Page:
    """One open stream, read as the page reads it. `tables`: after each step."""

    steps: list[dict[str, Any]] = field(default_factory=list)
    snapshots: list[dict[str, Any]] = field(default_factory=list)
    errors: list[dict[str, Any]] = field(default_factory=list)
    tables: dict[int, dict[str, list[str]]] = field(default_factory=dict)

    async def read(self, answer: httpx.Response) -> None:
        kind = ""
        async for line in answer.aiter_lines():
            if line.startswith("event: "):
                kind = line.removeprefix("event: ")
            elif line.startswith("data: "):
                self.take(kind, json.loads(line.removeprefix("data: ")))

    def take(self, kind: str, value: dict[str, Any]) -> None:
        {"step": self.steps, "snapshot": self.snapshots, "error": self.errors}[kind].append(value)
        if kind == "step":
            change, last = value["tables"], next(reversed(self.tables.values()), {})
            kept = {} if change["whole"] else {n: b for n, b in last.items() if n not in change["gone"]}
            self.tables[value["step"]] = kept | change["changed"]

    def states(self) -> list[dict[str, Any]]:
        """What there was right after the plan of each step that tells it."""
        return [step["snapshot"] for step in self.steps if step["snapshot"] is not None]


@contextlib.asynccontextmanager
async def opened(http: httpx.AsyncClient, since: int = 0) -> AsyncIterator[Page]:
    """A page that looks, until the context ends."""
    page = Page()
    async with http.stream("GET", f"/lab/stream?since={since}") as answer:
        assert answer.status_code == 200, await answer.aread()
        reader = asyncio.create_task(page.read(answer))
        try:
            yield page
        finally:
            reader.cancel()
            await asyncio.gather(reader, return_exceptions=True)


@run_async
async def test_the_page_sees_each_step_as_it_was() -> None:
    """Steps, grants, tables rebuilt from what changed, queues with reasons, pools and cached blocks: equal to the admin API."""
    serial = stack(SLOW, policy_set=("max_num_seqs=2",), overlap=False)
    async with serial as running, lab(running) as (http, _), opened(http) as page:
        handles = [await running.gateway.submit([*PROMPT, i], max_tokens=30, request_id=f"r{i}") for i in range(5)]
        await eventually(lambda: any(len(s["requests"]) == 5 for s in page.states()), "requests are shown")
        shown = next(s for s in page.states() if len(s["requests"]) == 5)
        reasons = {r["id"]: (r["queue"], r["reason"]) for r in shown["requests"]}
        assert len(reasons) == 5 and {queue for queue, _ in reasons.values()} == {"running", "waiting"}
        assert ("running", "RUNNING") in reasons.values()
        assert {r for _, r in reasons.values()} <= {"RUNNING", "MAX_SEQS", "BEHIND", "ARRIVED", "STEP_GRANTED"}
        for handle in handles:
            await running.gateway.end_of(handle)
        reports = await running.admin.steps(since_step=1, tables=True)
        await eventually(lambda: len(page.steps) == len(reports), "all steps are told")
        for report, step in zip(reports, page.steps, strict=True):
            assert step["step"] == report.step and page.tables[report.step] == translation.tables(report)
            assert step["sampled"] == {item.sequence: len(item.tokens) for item in report.sampled}
            assert [share["tokens"] for share in step["shares"]] == [group.tokens for group in report.scheduled]
            granted = (report.granted_steps, report.is_repeat, report.revoked)
            assert (step["granted_steps"], step["is_repeat"], step["revoked"]) == granted
            assert step["times"]["planned_ms"] <= step["times"]["finished_ms"]
        assert any(step["is_repeat"] for step in page.steps)
        await eventually(lambda: page.snapshots and page.snapshots[-1]["requests"] == [], "it is idle again")
        blocks = await running.admin.stub.GetBlocks(pb.GetBlocksRequest(cached=True))
        assert page.snapshots[-1]["cached"] == list(blocks.cached_blocks) != []
        assert sum(pool["total"] for pool in page.snapshots[-1]["pools"] if pool["tier"] == "g") == blocks.gpu.total
        why = (await http.get("/lab/why?id=r4")).json()
        assert {"RUNNING", "MAX_SEQS"} & {episode["reason"] for episode in why["episodes"]}


@run_async
async def test_blocks_queues_and_reasons_of_a_step_are_of_one_moment() -> None:
    """A request that needs 9 blocks while 2 are free is shown beside 2 free blocks, at every step of its wait."""
    sets = ("restraint=null", "makes_way=false", "tenant_fairness=false")
    async with stack(SLOW, policy_set=sets) as running, lab(running) as (http, _), opened(http) as page:
        handles = [
            await running.gateway.submit(
                [(50 * i + t) % 256 for t in range(60 + 40 * i)], max_tokens=50, request_id=f"r{i}"
            )
            for i in range(4)
        ]
        outputs = [await running.gateway.end_of(handle) for handle in handles]
        assert all(output.failed is None for output in outputs), outputs
        last = (await running.admin.steps())[-1].step
        await eventually(lambda: page.steps and page.steps[-1]["step"] == last, "all steps are told")
    seen: list[tuple[int, int]] = []
    for step in page.steps:
        state = step["snapshot"]
        if state is None:
            continue
        assert state["step"] == step["step"]
        held = {block for table in page.tables[step["step"]].values() for block in table if block.startswith("g")}
        [pool] = [pool for pool in state["pools"] if pool["tier"] == "g"]
        assert pool["total"] - len(held) == step["free"][0] >= len(state["cached"])
        assert not held & set(state["cached"])
        counts = {
            queue: sum(r["queue"] == queue for r in state["requests"]) for queue in ("waiting", "running", "swapped")
        }
        assert tuple(counts.values()) == tuple(step["queues"])
        for request in state["requests"]:
            reason = request["numbers"].get("head_reason", request["reason"])
            if reason == "NEED_BLOCKS" and request["queue"] == "waiting":
                assert request["numbers"]["free"] == step["free"][0] < request["numbers"]["need"]
                seen.append((step["step"], step["free"][0]))
    assert len({step for step, _ in seen}) >= 10 and len({free for _, free in seen}) >= 2, seen


@run_async
async def test_nothing_is_polled_while_no_page_is_open() -> None:
    """Before the first page, and as soon as the last one is gone; the scheduler's stream ends with it."""
    async with stack(SLOW) as running, lab(running) as (http, asked):
        await running.gateway.end_of(await running.gateway.submit(PROMPT, max_tokens=5))
        assert (await http.get("/lab/about")).json()["title"] == "here" and asked.num_calls == 0
        async with opened(http) as page:
            await eventually(lambda: len(page.steps) >= 5, "the last steps are told at once")
        assert asked.num_calls > 0
        before = 0
        while before != asked.num_calls:  # until its end is noticed
            before = asked.num_calls
            await asyncio.sleep(1.0)
        await running.gateway.end_of(await running.gateway.submit(PROMPT, max_tokens=5))
        await asyncio.sleep(1.0)
        assert asked.num_calls == before


@run_async
async def test_a_page_goes_on_where_it_was_and_further_back() -> None:
    """`since` of the stream and of /lab/steps: no step twice, none left out; the first has whole tables."""
    async with stack(SLOW) as running, lab(running) as (http, _):
        await running.gateway.end_of(await running.gateway.submit(PROMPT, max_tokens=30))
        numbers = [report.step for report in await running.admin.steps()]
        async with opened(http, since=numbers[10]) as page:
            await eventually(lambda: len(page.steps) == len(numbers) - 10, "the rest is told")
        assert [step["step"] for step in page.steps] == numbers[10:]
        older = (await http.get(f"/lab/steps?since={numbers[3]}&limit=7")).json()
        assert [step["step"] for step in older] == numbers[3:10] and older[0]["tables"]["whole"]


@run_async
async def test_a_scheduler_that_is_away_is_said_and_pages_are_bounded() -> None:
    """The stream's last event says why; a ninth page is refused with a retry time."""
    async with stack(SLOW) as running, lab(running) as (http, asked):
        async with contextlib.AsyncExitStack() as pages:
            for _ in range(MAX_PAGES):
                await pages.enter_async_context(opened(http))
            refused = await http.get("/lab/stream")
            assert (refused.status_code, refused.json()["error"]["code"]) == (429, "too_many_pages")
            assert int(refused.headers["retry-after"]) > 0
        asked.is_away = True
        async with opened(http) as page:
            await eventually(lambda: page.errors, "it is said")
        assert page.errors[0]["code"] == "scheduler_away"
        assert (await http.get("/lab/steps")).status_code == 503


def test_pools_of_unequal_workers() -> None:
    """Each has its own size; one that is not there yet has none; with rules that reserve a block, names begin at 1."""
    workers = pb.ListWorkersResponse(
        workers=[
            pb.Worker(lane=0, num_gpu_blocks=40, num_cpu_blocks=3),
            pb.Worker(lane=1),
            pb.Worker(lane=2, num_gpu_blocks=100),
        ]
    )
    blocks = pb.GetBlocksResponse(block_size=16, gpu=pb.BlockPool(total=140), cpu=pb.BlockPool(total=3))
    pools = translation.snapshot(blocks, workers).pools
    assert [(p.tier, p.suffix, p.first, p.total) for p in pools] == [
        ("g", "@0", 0, 40), ("g", "@2", 0, 100), ("c", "@0", 0, 3),
    ]  # fmt: skip
    blocks.gpu.total = 138
    pools = translation.snapshot(blocks, workers).pools
    assert [(p.first, p.total) for p in pools if p.tier == "g"] == [(1, 39), (1, 99)]
