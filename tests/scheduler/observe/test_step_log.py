"""The step log: the last steps, cheap to keep, and the block tables of any of them rebuilt from changes."""

import asyncio
import tracemalloc

from hypothesis import given, settings
from hypothesis import strategies as st

from protos.inference.v1 import admin_pb2
from scheduler_svc.core.plan import ScheduledSequence, StepOutcome, StepPlan, StepResult
from scheduler_svc.observe.step_log import StepLog, StepReader
from scheduler_svc.observe.step_notifier import StepNotifier
from scheduler_svc.observe.step_record import StepOrigin, Tables
from scheduler_svc.worker_values import WorkerResult
from tests.support.core.builders import answer, make_core, make_request
from tests.support.services.harness import run_async, stack

PROMPT = list(range(32, 72))


def result(step: int, tokens: dict[str, list[int]]) -> WorkerResult:
    return WorkerResult(step, StepResult(step, tokens), {}, sum(map(len, tokens.values())), 1_000)


class Logged:
    """A step log that is told of steps as the loop tells it."""

    def __init__(self, max_steps: int, policy: str) -> None:
        self.log = StepLog(max_steps)
        self._steps = StepNotifier([self.log], policy=policy)
        self.lost_worker = self._steps.lost_worker

    def begin(self, plan: StepPlan, epoch: int, whole: Tables | None = None) -> None:
        self._steps.planned(plan, StepOrigin(epoch=epoch), whole)

    def complete(self, found: WorkerResult) -> None:
        self._steps.returned(StepPlan(found.result.step, 0), found, StepOutcome())


def tables_of(report: admin_pb2.StepReport) -> dict[str, list[str]]:
    return {t.sequence: list(t.blocks) for t in report.tables}


@settings(max_examples=25, deadline=None)
@given(
    st.integers(8, 30),
    st.lists(st.tuples(st.integers(1, 20), st.integers(1, 12)), min_size=1, max_size=12),
    st.integers(3, 200),
)
def test_tables_of_every_held_step_are_those_of_the_core(
    num_blocks: int, requests: list[tuple[int, int]], keep: int
) -> None:
    """Rebuilt from changes they equal the ledger right after schedule(), also where older steps were dropped."""
    core, log, expected = make_core(num_gpu_blocks=num_blocks), Logged(keep, "vllm-v1"), {}
    for i, (prompt, max_tokens) in enumerate(requests):
        core.add(make_request(f"r{i}", prompt, max_tokens))
    for i in range(150):
        if i == 20:
            core.abort(["r0"])
        [plan] = core.schedule(0.0)
        log.begin(plan, epoch=1)
        if plan.is_empty:
            continue
        expected[plan.step] = core.block_tables(), plan
        tokens = answer(plan)
        log.complete(WorkerResult(i, tokens, {}, plan.num_tokens, 1))
        core.update(tokens)
    reports = list(StepReader(log.log, 0, tables=True).new())
    assert [r.step for r in reports] == sorted(expected)[-keep:]
    for report in reports:
        tables, plan = expected[report.step]
        assert tables_of(report) == tables
        assert [(g.id, list(g.seqs), g.tokens, g.computed_before, g.prefill) for g in report.scheduled] == [
            (e.request_id, [e.name], e.num_tokens, e.computed_before, e.is_prefill) for e in plan.scheduled
        ]
        assert {s.sequence: list(s.tokens) for s in report.sampled} == answer(plan).tokens
        assert (report.queues.waiting, report.queues.running, report.free.gpu) == (
            plan.num_waiting,
            plan.num_running,
            plan.free_gpu,
        )
        assert [(p.id, p.mode) for p in report.preempted] == plan.preempted


def entry(name: str, *, blocks: list[int], fresh: bool = False, computed: int = 4, index: int = 0) -> ScheduledSequence:
    return ScheduledSequence(
        name, name[:-2], index, 1, computed, blocks, fresh, False, True, False, 4, [1] if fresh else None
    )


def test_moved_blocks_are_kept_whole() -> None:
    """Swaps and copies change tables in ways the plan's additions do not show: such a step keeps its tables as they are."""
    log = Logged(10, "any")
    log.begin(StepPlan(1, 0, [entry("a/0", blocks=[3, 4], fresh=True), entry("b/0", blocks=[5], fresh=True)]), 1)
    log.complete(result(1, {"a/0": [1], "b/0": [2]}))
    moved = StepPlan(
        2,
        0,
        [entry("a/0", blocks=[])],
        swap_out=[(5, 0)],
        copy=[(4, 6)],
        num_swapped=1,
    )
    log.begin(moved, 1, {"a/0": ["g3", "g6"], "b/0": ["c0"]})
    log.complete(result(2, {"a/0": [3]}))
    log.begin(StepPlan(3, 0, [entry("a/0", blocks=[7])]), 1)
    log.complete(result(3, {"a/0": [4]}))
    second, third = list(StepReader(log.log, 2, tables=True).new())
    assert tables_of(second) == {"a/0": ["g3", "g6"], "b/0": ["c0"]}
    assert tables_of(third) == {"a/0": ["g3", "g6", "g7"], "b/0": ["c0"]}
    assert [(p.src, p.dst) for p in second.swap_out] == [(5, 0)] and second.queues.swapped == 1


def test_sequences_of_a_request_are_one_group() -> None:
    """`scheduled` lists requests: sequences side by side share an entry whose tokens add up."""
    log = Logged(10, "any")
    group = [ScheduledSequence(f"a/{i}", "a", i, 2, 4 + i, [], False, False, True, False, 4) for i in range(2)]
    log.begin(StepPlan(5, 0, [*group, entry("b/0", blocks=[])]), 2)
    log.complete(result(5, {"a/0": [1], "a/1": [2], "b/0": [3]}))
    [report] = StepReader(log.log, 0, tables=False).new()
    assert [(g.id, list(g.seqs), g.tokens, g.computed_before) for g in report.scheduled] == [
        ("a", ["a/0", "a/1"], 4, 4),
        ("b", ["b/0"], 1, 4),
    ]
    assert report.epoch == 2 and not report.tables


def test_steady_decode_costs_its_tokens() -> None:
    """256 sequences decoding: a held step takes no more than about 2 KB (10,000 steps: 20 MB), not a copy of the batch."""
    names = [f"request-{i}/0" for i in range(256)]
    log = Logged(10_000, "vllm-v1")

    def step(k: int) -> None:
        entries = [entry(name, blocks=[], computed=100 + k) for name in names]
        log.begin(StepPlan(k, 0, entries), 1)
        log.complete(result(k, {name: [k] for name in names}))

    for k in range(1, 50):
        step(k)
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    for k in range(50, 150):
        step(k)
    per_step = (tracemalloc.get_traced_memory()[0] - before) / 100
    tracemalloc.stop()
    assert per_step < 2_500


def test_a_step_whose_worker_was_lost_says_so() -> None:
    """Its result never comes: the record closes with the reason, and the tables of the next epoch start empty."""
    log = Logged(10, "any")
    log.begin(StepPlan(1, 0, [entry("a/0", blocks=[3], fresh=True)]), 1)
    log.lost_worker(["a/0"], [1])
    log.begin(StepPlan(2, 0, [entry("b/0", blocks=[4], fresh=True)]), 2)
    log.complete(result(2, {"b/0": [1]}))
    first, second = StepReader(log.log, 0, tables=True).new()
    assert first.error == "the worker was lost" and tables_of(first) == {"a/0": ["g3"]}
    assert tables_of(second) == {"b/0": ["g4"]}


def test_a_reader_slower_than_the_log_skips() -> None:
    """It misses what is no longer held and goes on with the right tables."""
    log = Logged(5, "any")
    log.begin(StepPlan(1, 0, [entry("a/0", blocks=[1], fresh=True)]), 1)
    log.complete(result(1, {"a/0": [1]}))
    reader = StepReader(log.log, 0, tables=True)
    for step in range(2, 20):
        log.begin(StepPlan(step, 0, [entry("a/0", blocks=[step])]), 1)
        log.complete(result(step, {"a/0": [1]}))
    reports = list(reader.new())
    assert [r.step for r in reports] == [15, 16, 17, 18, 19]
    assert [len(r.tables[0].blocks) for r in reports] == [15, 16, 17, 18, 19]
    assert list(reader.new()) == []


@run_async
async def test_watching_a_running_scheduler() -> None:
    """since, follow and tables through AdminService; GetBlocks agrees with the last step."""
    async with stack({"time_scale": 1.0, "step_base_s": 0.005}) as s:
        await s.gateway.end_of(await s.gateway.submit(PROMPT, max_tokens=5, request_id="a"))
        held = await s.admin.steps()
        assert [r.step for r in held] == list(range(1, 6))
        assert [r.scheduled[0].prefill for r in held] == [True, False, False, False, False]
        assert sum(len(x.tokens) for r in held for x in r.sampled) == 5
        assert held[0].policy == "quire" and held[0].epoch == 1 and held[0].duration_ns > 0
        assert [r.step for r in await s.admin.steps(since_step=4)] == [4, 5]
        call = s.admin.stub.WatchScheduler(admin_pb2.WatchSchedulerRequest(since_step=5, follow=True, tables=True))
        assert (await call.read()).step == 5
        handle = await s.gateway.submit(PROMPT, max_tokens=200, request_id="b")
        report = await call.read()
        assert report.scheduled[0].id == "b" and len(report.tables[0].blocks) == 3
        assert report.scheduled[0].computed_before == 32
        blocks = await s.admin.blocks()
        assert blocks.block_size == 16 and blocks.gpu.total == 511 and blocks.cpu.total == 1024
        [table] = blocks.tables
        assert table.sequence == "b/0" and blocks.refs == dict.fromkeys(table.blocks, 1)
        assert blocks.gpu.free == blocks.gpu.total - len(table.blocks)
        call.cancel()
        await s.gateway.send(cancels=[{"handle": handle}])
        await s.gateway.end_of(handle)
        await asyncio.sleep(0)
