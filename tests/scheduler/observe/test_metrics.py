"""GET /metrics of the scheduler: equal to the step log and to what requests were told, read without holding steps up."""

import asyncio
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from opentelemetry.trace import NoOpTracerProvider
from prometheus_client import CollectorRegistry

from protos.engine.v1 import engine_pb2
from protos.inference.v1 import admin_pb2
from scheduler_svc import app
from scheduler_svc.observe.metrics.definitions import METRICS, STEPS, WAIT_REASONS
from scheduler_svc.observe.metrics.reading import Readings
from scheduler_svc.settings import SchedulerSettings
from svc_common.clock import NS_PER_S
from svc_common.observability import metrics
from svc_common.observability.metrics_server import MetricsServer
from svc_common.observability.telemetry import Telemetry
from tests.support.scraping import Scrape, check_names, scrape
from tests.support.services.harness import Gateway, Stack, run_async, service, stack

SLOW = {"time_scale": 1.0, "step_base_s": 0.01, "num_gpu_blocks": 512}
SMALL = {"num_gpu_blocks": 24, "num_cpu_blocks": 64, "block_size": 4}


async def _load(s: Stack) -> list[Any]:
    """Prompts that begin alike, samples that share a prompt, more than fits: hits, copies, preemptions. Outputs."""
    for first in (1, 2, 1, 2):
        await s.gateway.end_of(await s.gateway.submit([first, *range(20, 40)], max_tokens=4))
    handles = [await s.gateway.submit([first, *range(20, 40)], max_tokens=24) for first in range(1, 7)]
    handles.append(await s.gateway.submit([7, *range(50, 60)], max_tokens=6, num_choices=3))
    return [await s.gateway.end_of(handle) for handle in handles]


@pytest.mark.parametrize(("policy", "mode"), [("vllm-v1", "recompute"), ("vllm-v0", "swap")])
@run_async
async def test_metrics_are_the_step_log(policy: str, mode: str) -> None:
    """R5, R46, R80, R119: tokens by phase, moves, preemptions, times and hits, number for number after a known load."""
    sets = ("preemption_mode=swap",) if policy == "vllm-v0" else ()
    async with stack(SMALL, policy=policy, policy_set=sets, enable_prefix_caching=policy == "vllm-v1") as s:
        outputs = await _load(s)
        steps = await s.admin.steps()
        told = await scrape(s.metrics_address)
    groups = [group for step in steps for group in step.scheduled]
    assert told.value("quire_steps_total") == len(steps)
    for phase, prefill in (("prefill", True), ("decode", False)):
        expected = sum(group.tokens for group in groups if group.prefill is prefill)
        assert told.value("quire_step_tokens_total", phase=phase) == expected
    assert told.value("quire_prompt_steps_total") == sum(any(g.prefill for g in step.scheduled) for step in steps)
    assert told.value("quire_output_tokens_total") == sum(len(one.tokens) for step in steps for one in step.sampled)
    for direction in ("in", "out"):
        moved = sum(len(getattr(step, f"swap_{direction}")) for step in steps)
        assert told.value("quire_kv_swap_blocks_total", direction=direction) == moved
    num_copied = sum(len(step.copy) for step in steps)
    assert told.value("quire_kv_copied_blocks_total") == num_copied and (num_copied > 0) == (policy == "vllm-v0")
    num_left = Counter(one.mode for step in steps for one in step.preempted)
    assert num_left[mode] > 0
    for name in ("recompute", "swap"):
        assert told.value("quire_preemptions_total", mode=name) == num_left[name]
    assert told.value("quire_step_duration_seconds_count") == len(steps)
    assert told.value("quire_step_duration_seconds_sum") == pytest.approx(sum(s.duration_ns for s in steps) / NS_PER_S)
    schedule_s = sum(step.times.schedule_ns for step in steps) / NS_PER_S
    assert told.value("quire_schedule_duration_seconds_sum") == pytest.approx(schedule_s)
    accounts = [output.finished.account for output in outputs]
    assert told.value("quire_queue_time_seconds_count") == len(outputs) + 4
    assert told.value("quire_prefix_cache_queried_tokens_total") == 10 * 21 + 11
    hits = told.value("quire_prefix_cache_hit_tokens_total")
    assert (hits >= sum(account.cached_prompt_tokens for account in accounts) > 0) or policy == "vllm-v0"
    assert told.value("quire_requests_ended_total", status="OK", reason="LENGTH") == len(outputs) + 4
    assert told.total("quire_failed_steps_total") == told.total("quire_requests_refused_total") == 0


@run_async
async def test_grants_are_those_of_the_step_log() -> None:
    """Steps that were repeated, and revocations by reason: requests arrive and are cancelled while steps are granted."""
    async with stack(SLOW, overlap=False) as s:
        revoked, num_cancels = Counter[str](), 0
        while not {"REQUEST_WAITS", "ROW_ENDED"} <= set(revoked):
            running = await s.gateway.submit([1, 2, 3], max_tokens=90)
            for number in range(4):
                other = await s.gateway.submit([4, 5, number], max_tokens=60)
                await s.gateway.tokens_of(other, 3)
                await s.gateway.send(cancels=[engine_pb2.Cancel(handle=other)])
                await s.gateway.end_of(other)
                num_cancels += 1
            await s.gateway.end_of(running)
            steps, told = await s.admin.steps(), await scrape(s.metrics_address)
            revoked = Counter(step.revoked for step in steps if step.revoked)
    assert told.value("quire_repeated_steps_total") == sum(step.is_repeat for step in steps) > 0
    counted = {reason: told.value("quire_revoked_grants_total", reason=reason) for reason in revoked}
    # A plan without work is not in the step log: one follows a cancel of a request that runs alone.
    assert all(0 <= number - revoked[reason] <= num_cancels for reason, number in counted.items())


@run_async
async def test_what_is_there_is_what_operators_are_shown() -> None:
    """Queues, limits and reasons are those of GetLoad and ListRequests at the same moment; blocks those of GetBlocks at rest."""
    async with stack({"num_gpu_blocks": 64, **SLOW}, max_num_seqs=2, max_waiting_requests=100) as s:
        handles = [await s.gateway.submit([100 + i, *range(30)], max_tokens=90) for i in range(7)]
        before, told, after = None, await scrape(s.metrics_address), await _shown(s)
        while before != after or after[0]["waiting"] != 5:
            before, told, after = await _shown(s), await scrape(s.metrics_address), await _shown(s)
        check_names(told.families, METRICS)
        for handle in handles:
            await s.gateway.send(cancels=[engine_pb2.Cancel(handle=handle)])
            await s.gateway.end_of(handle)
        blocks, at_rest = await s.admin.blocks(), await scrape(s.metrics_address)
    queues, waiting, num_tokens = after
    assert {name: told.value("quire_scheduler_requests", queue=name) for name in queues} == queues
    assert {name: told.value("quire_scheduler_waiting_by_reason", reason=name) for name in WAIT_REASONS} == (
        dict.fromkeys(WAIT_REASONS, 0) | waiting
    )
    assert told.value("quire_scheduler_waiting_tokens") == num_tokens == 5 * 31
    assert told.value("quire_scheduler_waiting_limit", of="requests") == 100
    assert told.value("quire_scheduler_serving") == told.value("quire_worker_up", worker=s.worker_address) == 1
    for tier, pool in (("gpu", blocks.gpu), ("cpu", blocks.cpu)):
        parts = {
            state: at_rest.value("quire_kv_blocks", tier=tier, state=state) for state in ("used", "cached", "free")
        }
        assert parts == {"used": pool.total - pool.free, "cached": pool.cached, "free": pool.free - pool.cached}


async def _shown(s: Stack) -> tuple[dict[str, int], dict[str, int], int]:
    """Queues, waiting requests by reason, and their prompt tokens."""
    load = await s.admin.stub.GetLoad(admin_pb2.GetLoadRequest())
    listed = await s.admin.stub.ListRequests(admin_pb2.ListRequestsRequest())
    queues = {name: getattr(load.queues, name) for name in ("waiting", "running", "swapped")}
    reasons = {count.reason: count.num_requests for count in listed.reasons if count.queue == "waiting"}
    return queues, reasons, load.num_waiting_tokens


@run_async
async def test_refusals_and_ends_by_reason() -> None:
    """One for each, by a documented reason; a full queue, an id that is there, a cancel, a request too long."""
    async with stack(SLOW, max_num_seqs=1, max_waiting_requests=1) as s:
        running = await s.gateway.submit([1, 2, 3], max_tokens=200, request_id="first")
        await s.gateway.tokens_of(running, 1)
        waits = await s.gateway.submit([1, 2, 3], max_tokens=200, request_id="second")
        for request_id in ("third", "first"):
            await s.gateway.end_of(await s.gateway.submit([4, 5], request_id=request_id, resumable=False))
        for handle in (running, waits):
            await s.gateway.send(cancels=[engine_pb2.Cancel(handle=handle)])
            await s.gateway.end_of(handle)
        await s.gateway.end_of(await s.gateway.submit([1] * 5_000))
        told = await scrape(s.metrics_address)
    assert told.value("quire_requests_refused_total", reason="QUEUE_FULL") == 1
    assert told.total("quire_requests_refused_total") + told.total("quire_requests_ended_total") == 5
    assert told.value("quire_requests_ended_total", status="CANCELLED", reason="CANCELLED") == 2
    assert told.labels("quire_requests_ended_total", "status") <= {"CANCELLED", "OUT_OF_RANGE", "INVALID_ARGUMENT"}


@run_async
async def test_only_metrics_are_served() -> None:
    """404 beside the path, 405 for another verb; nothing names the software behind it."""
    async with stack() as s:
        answers = [
            await asyncio.to_thread(_status, s.metrics_address, path, method)
            for path, method in (("/", "GET"), ("/metrics/", "GET"), ("/metrics", "POST"), ("/metrics", "GET"))
        ]
    assert [status for status, _ in answers] == [404, 404, 405, 200]
    assert {server for _, server in answers} == {"quire"}


@run_async
async def test_a_loop_that_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """503 after a bounded time, and what was to be read is given up; a loop that has ended is an error of its own."""
    monkeypatch.setattr(metrics, "READ_TIMEOUT_S", 0.05)
    gone, registry = asyncio.Event(), CollectorRegistry()

    async def never() -> dict[Any, Any]:
        try:
            return await asyncio.get_running_loop().create_future()
        finally:
            gone.set()

    registry.register(metrics.OnLoop(asyncio.get_running_loop(), [STEPS], never))
    server = MetricsServer(registry)
    address = server.start("127.0.0.1", 0, None)
    assert (await asyncio.to_thread(_status, address, "/metrics", "GET"))[0] == 503
    await gone.wait()
    server.close()
    server.close()
    again = MetricsServer(registry)
    assert again.start("127.0.0.1", int(address.rpartition(":")[2]), None) == address
    again.close()
    ended = asyncio.new_event_loop()
    ended.close()
    with pytest.raises(RuntimeError):
        list(metrics.OnLoop(ended, [STEPS], never).collect())


def test_dropped_spans_are_those_of_the_exporter() -> None:
    """As of the moment of the scrape."""
    num_dropped, registry = [7], CollectorRegistry()
    tracing = Telemetry(NoOpTracerProvider(), enabled=True, num_dropped=lambda: num_dropped[0])
    registry.register(metrics.DroppedSpans(tracing))
    num_dropped[0] += 1
    assert registry.get_sample_value("quire_telemetry_dropped_spans_total") == 8


def _status(address: str, path: str, method: str) -> tuple[int, str]:
    request = urllib.request.Request(f"http://{address}{path}", method=method)
    try:
        with urllib.request.urlopen(request, timeout=10) as answer:
            return answer.status, answer.headers["server"]
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.headers["server"]


async def _check_a_long_queue(num_waiting: int, monkeypatch: pytest.MonkeyPatch) -> str:
    """The loop goes round between two parts of a scrape's work, as often as there are dozens of requests."""
    read, num_turns = Readings.read, []

    async def counted(readings: Readings) -> Any:
        turns = asyncio.create_task(_count_turns(num_turns))
        try:
            return await read(readings)
        finally:
            turns.cancel()

    monkeypatch.setattr(Readings, "read", counted)
    ports = {"port": 0, "admin_port": 0, "metrics_port": 0}
    settings = SchedulerSettings(workers=("127.0.0.1:1",), max_waiting_requests=20_000, **ports)  # type: ignore[arg-type]
    async with (
        service(lambda ready, stop: app.serve(settings, on_ready=ready, stop=stop)) as (address, _, place),
        Gateway(address) as gateway,
    ):
        for _ in range(num_waiting // 500):
            await gateway.send(submits=[gateway.make_submit([1, 2, 3]) for _ in range(500)])

        def counted_by(told: Scrape) -> set[float]:
            by_reason = told.value("quire_scheduler_waiting_by_reason", reason="NO_WORKER")
            return {told.value("quire_scheduler_requests", queue="waiting"), by_reason}

        while counted_by(await scrape(place)) != {num_waiting}:
            num_turns.clear()
    assert len(num_turns) >= num_waiting // 64 - 1
    return f"scrape: {num_waiting} requests wait, {len(num_turns)} turns of the loop meanwhile"


async def _count_turns(turns: list[None]) -> None:
    while True:
        turns.append(None)
        await asyncio.sleep(0)


@run_async
async def test_a_scrape_holds_no_step_up(
    monkeypatch: pytest.MonkeyPatch, record_property: Callable[[str, object], None]
) -> None:
    """With a long queue the loop is free every few dozens of requests."""
    record_property("size", await _check_a_long_queue(1_500, monkeypatch))


@pytest.mark.long
@run_async
async def test_a_scrape_holds_no_step_up_whole(
    monkeypatch: pytest.MonkeyPatch, record_property: Callable[[str, object], None]
) -> None:
    """The same with 10,000 waiting."""
    record_property("size", await _check_a_long_queue(10_000, monkeypatch))
