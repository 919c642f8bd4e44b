"""Several workers under one scheduler: each request stays with its rank, tokens are those of one worker, and one may be lost."""

import contextlib
import random
from collections.abc import AsyncIterator
from typing import Any

import pytest

from protos.inference.v1 import admin_pb2
from scheduler_svc.policy.assembly import policy_of
from scheduler_svc.settings import SchedulerSettings
from svc_common.errors import ConfigError
from tests.support.services.harness import Admin, Gateway, eventually, once, run_async, scheduler, stack, worker
from tests.support.services.proxy import Proxy, proxy

FEW = {"num_gpu_blocks": 512}  # all of them are checked after each step
SLOW = {"time_scale": 1.0, "step_base_s": 0.004, **FEW}
NOWHERE = "127.0.0.1:1"
PROMPTS = [[40 + i, *range(50, 80 + i)] for i in range(7)]


class Ranks:
    """A scheduler of data-parallel ranks; each of its workers can be cut off."""

    def __init__(self, links: list[Proxy], gateway: Gateway, admin: Admin) -> None:
        self.links = links
        self.gateway = gateway
        self.admin = admin

    async def submit_all(self, max_tokens: int) -> list[int]:
        return await self.gateway.submit_all(PROMPTS, max_tokens=max_tokens)

    async def tokens(self, handles: list[int]) -> list[list[int]]:
        return [(await self.gateway.end_of(handle)).tokens for handle in handles]

    @property
    def states(self) -> list[Any]:
        return self.gateway.states


@contextlib.asynccontextmanager
async def ranks(*addresses: str, is_ready: bool = True, **values: Any) -> AsyncIterator[Ranks]:
    """Over running workers."""
    async with contextlib.AsyncExitStack() as exits:
        links = [await exits.enter_async_context(proxy(address)) for address in addresses]
        made = scheduler(*(link.address for link in links), **{"policy": "chitu-dp", **values})
        address, admin_address = await exits.enter_async_context(made)
        admin = await exits.enter_async_context(Admin(admin_address))
        gateway = await exits.enter_async_context(Gateway(address))
        if is_ready:
            await eventually(lambda: gateway.states[-1].serving, "the workers are ready")
        yield Ranks(links, gateway, admin)


@once
async def _longest() -> list[list[int]]:
    async with stack(FEW) as s:
        handles = await s.gateway.submit_all(PROMPTS, max_tokens=100)
        return [(await s.gateway.end_of(h)).tokens for h in handles]


async def undisturbed(max_tokens: int) -> list[list[int]]:
    """What each prompt gives with one worker: the first `max_tokens`, at most 100."""
    return [tokens[:max_tokens] for tokens in await _longest()]


def lanes_of(steps: list[admin_pb2.StepReport]) -> dict[str, list[int]]:
    """The lanes that each sequence ran on, each time anew."""
    found: dict[str, list[int]] = {}
    for report in steps:
        for group in report.scheduled:
            for name in group.seqs:
                lanes = found.setdefault(name, [])
                if lanes[-1:] != [report.lane]:
                    lanes.append(report.lane)
    return found


@run_async
async def test_owners_are_sticky_and_tokens_are_those_of_one_worker() -> None:
    """R188, R190: three ranks in turn, for life; a step never has another rank's sequences."""
    expected = await undisturbed(16)
    async with (
        worker(**FEW) as (a,),
        worker(**FEW) as (b,),
        worker(**FEW) as (c,),
        ranks(a, b, c, max_num_seqs=6) as r,
    ):
        assert await r.tokens(await r.submit_all(16)) == expected
        steps = await r.admin.steps(tables=True)
        lanes = lanes_of(steps)
        assert all(len(of_sequence) == 1 for of_sequence in lanes.values()), "an owner for life"
        tables = [table for report in steps for table in report.tables]
        assert all(block.endswith(f"@{lanes[t.sequence][0]}") for t in tables for block in t.blocks), (
            "each its own blocks"
        )
        assert sorted(lane for [lane] in lanes.values()) == [0, 0, 0, 1, 1, 2, 2]
        await r.admin.assert_all_free()


@run_async
async def test_the_log_is_in_step_order_and_tables_are_each_ranks_own() -> None:
    """R194: a step of each rank with work, in order, whichever worker is done first; ids are those of a rank's own blocks."""
    async with (
        worker(**SLOW) as (slow,),
        worker(time_scale=1.0, step_base_s=0.001) as (fast,),
        ranks(slow, fast, max_num_seqs=4) as r,
    ):
        await r.tokens(await r.submit_all(12))
        reports = await r.admin.steps(tables=True)
        assert [report.step for report in reports] == sorted(report.step for report in reports)
        assert {report.lane for report in reports} == {0, 1} and all(report.scheduled for report in reports)
        for report in reports:
            tables = {table.sequence: table.blocks for table in report.tables}
            for group in report.scheduled:
                num_blocks = -(-(group.computed_before + group.tokens) // 16)
                assert all(len(tables[name]) >= num_blocks for name in group.seqs), report


@run_async
async def test_a_rank_without_work_is_idle() -> None:
    """R193, R194: one request runs on one rank; the other gets no message, and what is served goes on."""
    async with worker(**FEW) as (a,), worker(**FEW) as (b,), ranks(a, b) as r:
        output = await r.gateway.end_of(await r.gateway.submit(PROMPTS[0], max_tokens=20))
        assert len(output.tokens) == 20
        assert {report.lane for report in await r.admin.steps()} == {0}
        again = await r.gateway.end_of(await r.gateway.submit(PROMPTS[0], max_tokens=20))
        assert again.tokens == output.tokens
        assert {report.lane for report in await r.admin.steps()} == {0, 1}, "the next newcomer has the next rank"


@run_async
async def test_a_broken_stream_of_one_resumes_in_its_epoch() -> None:
    """Nothing is computed again, no sequence changes its rank, and the service is ready throughout."""
    expected = await undisturbed(30)
    async with worker(**SLOW) as (a,), worker(**SLOW) as (b,), ranks(a, b) as r:
        handles, num_states = await r.submit_all(30), len(r.states)
        for at in (3, 10, 20):
            # Tokens of both ranks: the one that was cut before is back.
            for handle in handles[:2]:
                await r.gateway.tokens_of(handle, at)
            r.links[at % 2].cut()
        assert await r.tokens(handles) == expected
        steps = await r.admin.steps()
        assert sum(report.computed_tokens for report in steps) == sum(len(p) + 29 for p in PROMPTS)
        assert all(len(lanes) == 1 for lanes in lanes_of(steps).values())
        assert all(state.serving for state in r.states[num_states:])
        await r.admin.assert_all_free()


@run_async
async def test_what_a_lost_worker_ran_goes_on_at_the_other() -> None:
    """One of two dies for good: its sequences are computed again elsewhere; those of the other never stop; it may come back."""
    expected = await undisturbed(40)
    async with worker(**SLOW) as (a,), worker(**SLOW) as (b,), ranks(a, b) as r:
        handles, num_states = await r.submit_all(40), len(r.states)
        await r.gateway.tokens_of(handles[0], 10)
        r.links[1].upstream = NOWHERE
        r.links[1].cut()
        assert await r.tokens(handles) == expected
        lanes = lanes_of(await r.admin.steps())
        assert sorted(lanes.values()) == [[0]] * 4 + [[1, 0]] * 3, "those of the lost rank, and only they, moved"
        accounts = [r.gateway.outputs[h].finished.account for h in handles]
        assert sorted(account.num_migrations for account in accounts) == [0] * 4 + [1] * 3
        assert all(state.serving for state in r.states[num_states:])
        await r.admin.assert_all_free()
        r.links[1].upstream = b
        await eventually(lambda: r.links[1].num_connections >= 3, "tried again")
        await both_serve(r)


@run_async
async def test_a_worker_that_is_cut_off_delays_no_other() -> None:
    """No byte comes through to one of two: the other's requests end meanwhile; when it is back, so do its own."""
    expected = await undisturbed(40)
    async with worker(**SLOW) as (a,), worker(**SLOW) as (b,), ranks(a, b) as r:
        handles = await r.submit_all(40)
        await r.gateway.tokens_of(handles[6], 10)
        r.links[1].hold()
        at_once = [await r.gateway.end_of(handle) for handle in handles[::2]]
        assert [output.tokens for output in at_once] == expected[::2]
        assert not any(r.gateway.outputs[handle].is_over for handle in handles[1::2])
        r.links[1].release()
        assert await r.tokens(handles) == expected
        await r.admin.assert_all_free()


async def both_serve(r: Ranks) -> None:
    """Until newcomers are owned by both ranks again."""
    for _ in range(100):
        since = (await r.admin.blocks()).step
        handles = [await r.gateway.submit(p, max_tokens=4) for p in PROMPTS[:2]]
        await r.tokens(handles)
        if {report.lane for report in await r.admin.steps(since_step=since + 1)} == {0, 1}:
            return
    raise AssertionError("the returned rank owns no request")


@run_async
async def test_a_worker_of_another_boot_takes_the_rank_over() -> None:
    """R178: a new process answers at once at the same address: a new epoch for that lane alone."""
    expected = await undisturbed(40)
    async with worker(**SLOW) as (a,), worker(**SLOW) as (b,), worker(**SLOW) as (c,), ranks(a, b) as r:
        handles = await r.submit_all(40)
        await r.gateway.tokens_of(handles[0], 10)
        r.links[0].upstream = c
        r.links[0].cut()
        assert await r.tokens(handles) == expected
        moved = [h for h in handles if r.gateway.outputs[h].finished.account.num_migrations]
        assert len(moved) == 4
        steps = await r.admin.steps()
        assert [report.step for report in steps] == sorted({report.step for report in steps})
        await r.admin.assert_all_free()


@run_async
async def test_all_workers_lost_and_back() -> None:
    """Not serving while there is none; all streams end as if nothing had happened."""
    expected = await undisturbed(40)
    async with worker(**SLOW) as (a,), worker(**SLOW) as (b,), ranks(a, b) as r:
        handles = await r.submit_all(40)
        await r.gateway.tokens_of(handles[0], 10)
        for link in r.links:
            link.upstream = NOWHERE
            link.cut()
        await eventually(lambda: not r.states[-1].serving, "not serving")
        assert r.links[0].address in r.states[-1].reason and r.links[1].address in r.states[-1].reason
        r.links[0].upstream, r.links[1].upstream = b, a
        assert await r.tokens(handles) == expected
        await r.admin.assert_all_free()


@pytest.mark.parametrize(("num_tokens", "num_cuts"), [(50, 6), pytest.param(100, 12, marks=pytest.mark.long)])
@run_async
async def test_random_losses_never_lose_or_repeat_a_token(num_tokens: int, num_cuts: int) -> None:
    """R190: streams of both ranks break at random, onto the same or another process, or for good for a while."""
    rng = random.Random(11)
    expected = await undisturbed(num_tokens)
    async with (
        worker(**SLOW) as (a,),
        worker(**SLOW) as (b,),
        worker(**SLOW) as (c,),
        ranks(a, b, max_worker_losses=50) as r,
    ):
        handles, free = await r.submit_all(num_tokens), c
        for at in sorted(rng.sample(range(1, num_tokens - 5), num_cuts)):
            await r.gateway.tokens_of(handles[rng.randrange(7)], at)
            link = rng.choice(r.links)
            dice = rng.random()
            if dice < 0.4 and free:
                link.upstream, free = free, link.upstream if link.upstream != NOWHERE else ""
            elif dice < 0.6 and NOWHERE not in [other.upstream for other in r.links]:
                free, link.upstream = link.upstream, NOWHERE
            link.cut()
        assert await r.tokens(handles) == expected
        assert sum(link.num_connections for link in r.links) >= num_cuts - 2
        await r.admin.assert_all_free()


@run_async
async def test_it_serves_once_all_workers_are_there() -> None:
    """Readiness while one is missing says which; requests queue meanwhile."""
    async with (
        worker(**FEW) as (a,),
        worker(**FEW) as (b,),
        ranks(a, NOWHERE, is_ready=False) as r,
    ):
        await eventually(lambda: "cannot be reached" in r.states[-1].reason, "why")
        handle = await r.gateway.submit(PROMPTS[0])
        assert not r.states[-1].serving and r.links[1].address in r.states[-1].reason
        assert r.links[0].address not in r.states[-1].reason
        r.links[1].upstream = b
        assert len((await r.gateway.end_of(handle)).tokens) == 8
        assert r.states[-1].serving


@run_async
async def test_workers_allocate_the_least_of_each_count() -> None:
    """As many blocks in each rank as the smallest worker has; also when a smaller one takes a rank over."""
    expected = await undisturbed(24)
    async with (
        worker(**{**SLOW, "num_gpu_blocks": 40}) as (a,),
        worker(**{**SLOW, "num_gpu_blocks": 60}) as (b,),
        worker(**{**SLOW, "num_gpu_blocks": 20}) as (c,),
        ranks(a, b) as r,
    ):
        assert (await r.admin.blocks()).gpu.total == 2 * 39
        handles = await r.submit_all(24)
        await r.gateway.tokens_of(handles[0], 5)
        r.links[1].upstream = c
        r.links[1].cut()
        assert await r.tokens(handles) == expected
        assert (await r.admin.blocks()).gpu.total == 2 * 19
        await r.admin.assert_all_free()


def one(model: str) -> Any:
    """A worker that serves it."""
    return worker(served_model_name=model)


@run_async
async def test_workers_with_different_models_are_refused() -> None:
    """Not served, and it is said which worker has which model."""
    async with one("llama") as (a,), one("qwen") as (b,), ranks(a, b, is_ready=False) as r:
        await eventually(lambda: "its model is" in r.states[-1].reason, "why")
        assert not r.states[-1].serving and "same model" in r.states[-1].reason


@run_async
async def test_several_lanes_of_one_worker() -> None:
    """R176, R183: scheduler groups and skew slots are steps in flight of one worker. None has room for more than three of seven."""
    expected = await undisturbed(16)
    sizes = ("infer.pp_size=3", "infer.max_reqs=7")
    for policy in ("chitu", "chitu-skew"):
        async with worker(**SLOW) as (a,), ranks(a, policy=policy, policy_set=sizes) as r:
            assert await r.tokens(await r.submit_all(16)) == expected
            steps = await r.admin.steps()
            assert {report.lane for report in steps} == {0, 1, 2}
            assert [report.lane for report in steps[:3]] == [0, 1, 2]
            assert steps[2].times.planned_ns < steps[0].times.finished_ns, "three in flight"
            await r.admin.assert_all_free()


@pytest.mark.parametrize(
    ("policy", "sets", "num_workers", "named"),
    [
        ("chitu-dp", ("infer.dp_size=3",), 2, ["infer.dp_size=3", "2 are given", "--worker 3 times", "--workers 3"]),
        ("chitu", ("dp_size=2",), 1, ["dp_size=2", "1 is given", "--worker 2 times"]),
        ("chitu-dp", ("dp_size=1",), 2, ["dp_size=1", "2 are given"]),
    ],
)
def test_wrong_numbers_of_workers(policy: str, sets: tuple[str, ...], num_workers: int, named: list[str]) -> None:
    """R188: a worker for each rank; what was given and what to give instead."""
    workers = tuple(f"host-{i}:1" for i in range(num_workers))
    with pytest.raises(ConfigError) as error:
        policy_of(SchedulerSettings(policy=policy, policy_set=sets, workers=workers))
    assert all(text in error.value.message for text in named), error.value.message


@pytest.mark.parametrize("num_workers", [1, 2, 5])
def test_ranks_follow_the_workers(num_workers: int) -> None:
    """R188: `dp_size` not given is the number of workers."""
    workers = tuple(f"host-{i}:1" for i in range(num_workers))
    assert policy_of(SchedulerSettings(policy="chitu-dp", workers=workers)).spec.dp_size == num_workers
