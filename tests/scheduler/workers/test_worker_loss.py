"""The worker goes away, hangs, fails a step: no stream is lost and every token comes exactly once."""

import contextlib
import random
import threading
from collections.abc import AsyncIterator
from typing import Any

import pytest

from protos.inference.v1 import admin_pb2
from protos.worker.v1 import worker_pb2
from quire.operators.why import why_json
from quire_tools.simulated_worker.engine import SimulatedEngine
from scheduler_svc.core.plan import StepPlan
from scheduler_svc.core.scheduler import Scheduler
from svc_common.errors import Internal
from tests.support.services.harness import (
    TIMEOUT_S,
    Admin,
    Gateway,
    eventually,
    once,
    run_async,
    scheduler,
    stack,
    worker,
)
from tests.support.services.proxy import Proxy, proxy

SLOW = {"time_scale": 1.0, "step_base_s": 0.004, "num_gpu_blocks": 512}
PROMPTS = [[40 + i, *range(50, 80 + i)] for i in range(6)]


@contextlib.asynccontextmanager
async def behind_proxy(worker_address: str, **values: Any) -> AsyncIterator[tuple[Proxy, Gateway, Admin]]:
    """A scheduler whose worker can be cut off."""
    async with (
        proxy(worker_address) as link,
        scheduler(link.address, **values) as (address, admin_address),
        Admin(admin_address) as admin,
        Gateway(address) as gateway,
    ):
        await eventually(lambda: gateway.states[-1].serving, "a worker is ready")
        yield link, gateway, admin


@once
async def _longest() -> list[list[int]]:
    async with stack({"num_gpu_blocks": 512}) as s:
        handles = await s.gateway.submit_all(PROMPTS, max_tokens=100)
        return [(await s.gateway.end_of(h)).tokens for h in handles]


async def undisturbed(max_tokens: int) -> list[list[int]]:
    """What each prompt gives when nothing goes wrong: the first `max_tokens`, at most 100."""
    return [tokens[:max_tokens] for tokens in await _longest()]


@run_async
async def test_a_broken_stream_resumes_in_its_epoch() -> None:
    """Same worker process: rows and results are still there, nothing is recomputed, tokens come exactly once."""
    expected = await undisturbed(40)
    async with worker(**SLOW) as (address,), behind_proxy(address) as (link, gateway, admin):
        handles = [await gateway.submit(p, max_tokens=40) for p in PROMPTS]
        for at in (3, 12, 25):
            await gateway.tokens_of(handles[0], at)
            link.cut()
        assert [(await gateway.end_of(h)).tokens for h in handles] == expected
        assert link.num_connections >= 4
        steps = await admin.steps()
        assert {r.epoch for r in steps} == {1} and not any(r.error for r in steps)
        assert sum(r.computed_tokens for r in steps) == sum(len(p) + 39 for p in PROMPTS)
        assert all(gateway.outputs[h].finished.account.num_migrations == 0 for h in handles)
        await admin.assert_all_free()


@run_async
async def test_another_worker_goes_on_with_the_tokens() -> None:
    """A worker of another boot: new epoch, all that ran is recomputed from its tokens, prefixes of the old one are forgotten."""
    expected = await undisturbed(40)
    async with worker(**SLOW) as (first,), worker(**SLOW) as (second,), behind_proxy(first) as (link, gateway, admin):
        handles = [await gateway.submit(p, max_tokens=40) for p in PROMPTS]
        await gateway.tokens_of(handles[0], 10)
        link.upstream = second
        link.cut()
        assert [(await gateway.end_of(h)).tokens for h in handles] == expected
        accounts = [gateway.outputs[h].finished.account for h in handles]
        assert all(a.num_migrations == 1 and a.preempted_ns > 0 and a.completion_tokens == 40 for a in accounts)
        assert any("lost" in state.reason for state in gateway.states) and gateway.states[-1].serving
        await admin.assert_all_free()
        reports = await admin.steps()
        assert [r.step for r in reports] == sorted({r.step for r in reports})


@run_async
async def test_a_worker_with_less_memory_and_a_new_core() -> None:
    """It comes back with fewer blocks: the core is built anew, requests go on with their tokens."""
    expected = await undisturbed(30)
    async with (
        worker(**SLOW) as (first,),
        worker(**{**SLOW, "num_gpu_blocks": 16}) as (second,),
        behind_proxy(first) as (link, gateway, admin),
    ):
        handles = [await gateway.submit(p, max_tokens=30) for p in PROMPTS]
        await gateway.tokens_of(handles[0], 10)
        link.upstream = second
        link.cut()
        assert [(await gateway.end_of(h)).tokens for h in handles] == expected
        assert (await admin.blocks()).gpu.total == 15
        await admin.assert_all_free()


@run_async
async def test_an_idle_scheduler_notices() -> None:
    """Readiness never lies: a worker that goes while nothing runs is noticed without any request."""
    async with worker() as (address,), behind_proxy(address) as (link, gateway, _):
        link.upstream = "127.0.0.1:1"
        link.cut()
        await eventually(lambda: not gateway.states[-1].serving, "not serving")
        await eventually(lambda: "cannot be reached" in gateway.states[-1].reason, "why")
        link.upstream = address
        await eventually(lambda: gateway.states[-1].serving, "serving again")
        assert len((await gateway.end_of(await gateway.submit(PROMPTS[0]))).tokens) == 8


@run_async
async def test_cancels_and_deadlines_are_served_during_an_outage() -> None:
    """What ends while no worker is there ends at once, and does not come back with the worker."""
    async with worker(**SLOW) as (address,), behind_proxy(address) as (link, gateway, admin):
        cancelled, late, stays = [
            await gateway.submit(p, max_tokens=60, remaining_ns=ns)
            for p, ns in zip(PROMPTS[:3], (0, 500_000_000, 0), strict=True)
        ]
        await gateway.tokens_of(stays, 5)
        link.upstream = "127.0.0.1:1"
        link.cut()
        await eventually(lambda: not gateway.states[-1].serving, "not serving")
        await gateway.send(cancels=[{"handle": cancelled}])
        assert (await gateway.end_of(cancelled)).finished is not None
        assert (await gateway.end_of(late)).failed is not None
        link.upstream = address
        assert len((await gateway.end_of(stays)).tokens) == 60
        await admin.assert_all_free()


class HangingEngine(SimulatedEngine):
    """Hangs in the step after `hang` was set, until `go` is set."""

    hang, go = threading.Event(), threading.Event()

    def execute(self, outputs: worker_pb2.SchedulerOutputs) -> worker_pb2.WorkerOutputs:
        if self.hang.is_set():
            self.hang.clear()
            self.go.wait(TIMEOUT_S)
        return super().execute(outputs)


@run_async
async def test_a_hanging_worker_is_lost_by_the_watchdog() -> None:
    """No result within `step_timeout_s`: not serving; when it moves again the stream goes on, tokens exactly once."""
    HangingEngine.go.clear()
    async with (
        worker(HangingEngine, **SLOW) as (address,),
        behind_proxy(address, step_timeout_s=0.3) as (_, gateway, admin),
    ):
        handle = await gateway.submit(PROMPTS[0], max_tokens=60)
        await gateway.tokens_of(handle, 5)
        HangingEngine.hang.set()
        await eventually(lambda: "no result for" in gateway.states[-1].reason or None, "the watchdog")
        HangingEngine.go.set()
        output = await gateway.end_of(handle)
        assert len(output.tokens) == 60 and output.failed is None
        await admin.assert_all_free()


class FailingEngine(SimulatedEngine):
    """Fails every step that computes a row whose prompt begins with token 99; answers NaN for those that begin with 98."""

    def execute(self, outputs: worker_pb2.SchedulerOutputs) -> worker_pb2.WorkerOutputs:
        result = super().execute(outputs)
        firsts = {row: int(self._rows.token_ids[row, 0]) for row in self._rows.occupied_rows().tolist()}  # type: ignore[union-attr]
        if 99 in firsts.values():
            raise Internal("the kernel failed", reason="KERNEL")
        for i, row in enumerate(memoryview(result.rows).cast("i").tolist()):
            if firsts.get(row) == 98:
                return self._not_finite(result, i)
        return result

    @staticmethod
    def _not_finite(result: worker_pb2.WorkerOutputs, at: int) -> worker_pb2.WorkerOutputs:
        def without(data: bytes, size: int) -> bytes:
            return data[: at * size] + data[(at + 1) * size :]

        counts = bytearray(result.num_tokens)
        counts[4 * at : 4 * at + 4] = bytes(4)
        flags = bytearray(result.flags)
        flags[at] = worker_pb2.ROW_FLAG_NOT_FINITE
        result.num_tokens, result.flags = bytes(counts), bytes(flags)
        result.token_ids = without(result.token_ids, 4)
        return result


@run_async
async def test_not_finite_fails_alone() -> None:
    """NaN logits: that request fails INTERNAL, its batchmates get what they get alone."""
    expected = await undisturbed(20)
    async with stack(make_engine=FailingEngine) as s:
        handles = [await s.gateway.submit(p, max_tokens=20) for p in PROMPTS]
        bad = await s.gateway.submit([98, 1, 2, 3], max_tokens=20)
        output = await s.gateway.end_of(bad)
        assert output.failed is not None and output.failed.error.status == "INTERNAL"
        assert "not finite" in output.failed.error.message
        assert [(await s.gateway.end_of(h)).tokens for h in handles] == expected
        await s.admin.assert_all_free()


@run_async
async def test_a_failed_step_fails_its_requests_and_the_service_goes_on() -> None:
    """The step's sequences end with the error, the log shows it, the next request is served."""
    async with stack(make_engine=FailingEngine) as s:
        output = await s.gateway.end_of(await s.gateway.submit([99, 1, 2, 3]))
        assert output.failed is not None and output.failed.error.reason == "STEP_FAILED"
        good = await s.gateway.end_of(await s.gateway.submit(PROMPTS[0]))
        assert good.finished is not None and len(good.tokens) == 8
        steps = await s.admin.steps()
        assert steps[0].error == "the kernel failed"
        await s.admin.assert_all_free()


class DyingEngine(SimulatedEngine):
    """The device dies whenever a row begins with token 97: UNAVAILABLE for that step, and again after each new start."""

    def execute(self, outputs: worker_pb2.SchedulerOutputs) -> worker_pb2.WorkerOutputs:
        result = super().execute(outputs)
        if any(self._rows.token_ids[row, 0] == 97 for row in self._rows.occupied_rows().tolist()):  # type: ignore[union-attr]
            result.Clear()
            result.error.status, result.error.message = "INVALID_ARGUMENT", "rows do not fit"
        return result


@run_async
async def test_a_poisonous_request_fails_in_the_end() -> None:
    """A request that loses the worker again and again is failed after `max_worker_losses`; others are served."""
    async with stack(make_engine=DyingEngine, max_worker_losses=3) as s:
        output = await s.gateway.end_of(await s.gateway.submit([97, 1, 2, 3]))
        assert output.failed is not None and output.failed.error.reason == "WORKER_LOST_REPEATEDLY"
        assert len((await s.gateway.end_of(await s.gateway.submit(PROMPTS[0]))).tokens) == 8
        await s.admin.assert_all_free()


async def explained_as_a_suspect(admin: Admin, request_id: str) -> None:
    """Returns when its timeline says so."""
    while True:
        answer = await admin.stub.ExplainRequest(admin_pb2.ExplainRequestRequest(request_id=request_id))
        for episode in why_json(answer)["episodes"]:
            if episode["reason"] == "WORKER_LOST" and episode["numbers"].get("losses", 0) >= 2:
                return


@run_async
async def test_poisonous_requests_fail_alone() -> None:
    """Those that were in every lost step with them are computed one by one, and get what they get in peace."""
    expected = await undisturbed(60)
    async with stack(make_engine=DyingEngine) as s:
        handles = [await s.gateway.submit(p, max_tokens=60) for p in PROMPTS[:3]]
        poison = [await s.gateway.submit([97, n], max_tokens=60) for n in range(2)]
        handles += [await s.gateway.submit(p, max_tokens=60, request_id=f"late-{p[0]}") for p in PROMPTS[3:]]
        await eventually(lambda: s.gateway.outputs[handles[-1]].started, "the last of them runs")
        await explained_as_a_suspect(s.admin, f"late-{PROMPTS[-1][0]}")
        for handle in poison:
            output = await s.gateway.end_of(handle)
            assert output.failed is not None and output.failed.error.reason == "WORKER_LOST_REPEATEDLY"
        outputs = [await s.gateway.end_of(h) for h in handles]
        assert [o.tokens for o in outputs] == expected
        assert max(o.finished.account.num_migrations for o in outputs) >= 2, "they were in lost steps too"
        await s.admin.assert_all_free()


@pytest.mark.parametrize(("num_tokens", "num_cuts"), [(50, 5), pytest.param(100, 10, marks=pytest.mark.long)])
@run_async
async def test_random_cuts_never_lose_or_repeat_a_token(num_tokens: int, num_cuts: int) -> None:
    """Streams break at random, half the time onto another worker: every output is the undisturbed one."""
    rng = random.Random(5)
    expected = await undisturbed(num_tokens)
    async with (
        worker(**SLOW) as (first,),
        worker(**SLOW) as (second,),
        behind_proxy(first, max_worker_losses=50) as (link, gateway, admin),
    ):
        handles = [await gateway.submit(p, max_tokens=num_tokens) for p in PROMPTS]
        for at in sorted(rng.sample(range(1, num_tokens - 5), num_cuts)):
            await gateway.tokens_of(handles[0], at)
            link.upstream = rng.choice([first, second])
            link.cut()
        assert [(await gateway.end_of(h)).tokens for h in handles] == expected
        assert link.num_connections >= num_cuts - 2
        await admin.assert_all_free()


@run_async
async def test_a_bug_in_the_core_does_not_wedge_the_service(monkeypatch: pytest.MonkeyPatch) -> None:
    """schedule() raises while one request is there: the core is built anew, that request fails in the end, others are served."""
    schedule = Scheduler.schedule

    def broken(core: Scheduler, now: float) -> list[StepPlan]:
        if core.request("bug") is not None:
            raise RuntimeError("cannot plan this")
        return schedule(core, now)

    monkeypatch.setattr(Scheduler, "schedule", broken)
    async with stack(max_worker_losses=3) as s:
        before = await s.gateway.end_of(await s.gateway.submit(PROMPTS[0]))
        output = await s.gateway.end_of(await s.gateway.submit(PROMPTS[1], request_id="bug"))
        assert output.failed is not None and output.failed.error.reason == "WORKER_LOST_REPEATEDLY"
        await eventually(lambda: s.gateway.states[-1].serving, "serving again")
        after = await s.gateway.end_of(await s.gateway.submit(PROMPTS[0]))
        assert after.tokens == before.tokens
        steps = [report.step for report in await s.admin.steps()]
        assert steps == sorted(set(steps)), "step numbers go on"
        await s.admin.assert_all_free()
