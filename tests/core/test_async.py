"""Asynchronous scheduling: plan k+1 is made before result k is known."""

from collections.abc import Callable

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from scheduler_svc.core.plan import StepResult
from scheduler_svc.core.request import Request, SequenceStatus
from scheduler_svc.core.request_rules import StopRules
from scheduler_svc.core.scheduler import Scheduler
from tests.support.core.builders import EOS, hash_free, make_request, next_token, shares, waiting
from tests.support.core.pipelines import Loop, Worker, build

Record = Callable[[str, object], None]
FAST_AND_SLOW = pytest.mark.parametrize("fast_path", [True, False])


def placeholders(core: Scheduler) -> dict[str, int]:
    """Tokens in flight by request id."""
    return {name: request.sequences[0].num_placeholders for name, request in core.state.requests.items()}


@FAST_AND_SLOW
def test_a_token_in_flight_counts_as_known(fast_path: bool) -> None:
    """R149: a step that reaches the end promises a token, so the next one is scheduled at once; a chunk promises none."""
    core = build("vllm-v1-async", fast_path=fast_path, max_num_batched_tokens=8)
    core.add(make_request("a", 12, max_tokens=9))
    got = []
    loop = Loop(core)
    for _ in range(5):
        loop.step()
        got.append((shares(loop.plans[-1])["a"], placeholders(core)["a"]))
    assert got == [(8, 0), (4, 1), (1, 1), (1, 1), (1, 1)]
    [plan] = core.schedule(0.0)
    assert (plan.scheduled[0].computed_before, placeholders(core)["a"]) == (15, 2)


def test_the_input_of_a_decode_need_not_be_known_to_the_scheduler() -> None:
    """R157: a plan names no token of a running sequence, only offsets: the worker takes the token that it sampled itself."""
    core = build("vllm-v1-async")
    core.add(make_request("a", 6, max_tokens=9))
    [first] = core.schedule(0.0)
    [second] = core.schedule(0.0)
    [entry] = second.scheduled
    assert (first.scheduled[0].fresh, len(first.scheduled[0].token_ids)) == (True, 6)
    assert (entry.fresh, entry.token_ids, entry.computed_before, entry.num_tokens) == (False, None, 6, 1)
    assert core.request("a").sequences[0].num_tokens == 6


@FAST_AND_SLOW
def test_no_step_beyond_max_tokens(fast_path: bool) -> None:
    """R152: a request whose last token is surely in flight is skipped, and those behind it are not."""
    core = build("vllm-v1-async", fast_path=fast_path)
    core.add(make_request("a", 5, max_tokens=2))
    core.add(make_request("b", 5, max_tokens=4))
    loop = Loop(core)
    loop.run()
    assert [shares(p) for p in loop.plans[:5]] == [{"a": 5, "b": 5}, {"a": 1, "b": 1}, {"b": 1}, {"b": 1}, {}]


@FAST_AND_SLOW
def test_no_step_beyond_the_model_length(fast_path: bool) -> None:
    """R129, R152: nor is a position computed whose token the model's length forbids."""
    core = build("vllm-v1-async", fast_path=fast_path, max_model_len=8)
    core.add(make_request("a", 6, max_tokens=99))
    loop = Loop(core)
    assert [len(tokens) for tokens in loop.run().values()] == [2]
    assert [shares(p) for p in loop.plans] == [{"a": 6}, {"a": 1}, {}, {}]


def test_a_token_behind_eos_is_thrown_away() -> None:
    """R159: an EOS shows only when the next step is in flight already; what that gives is ignored, its blocks are free."""
    core = build("vllm-v1-async")
    core.add(make_request("a", 5, max_tokens=9))
    loop = Loop(core, Worker(lambda name, at: EOS if at == 6 else 9))
    assert loop.run() == {"a/0": [9, EOS]}
    assert sum(shares(p).get("a", 0) for p in loop.plans) == 5 + 1 + 1
    assert [e.status for o in loop.outcomes for e in o.ended] == [SequenceStatus.FINISHED_STOPPED]
    assert core.pool_report().gpu.free == core.pool_report().gpu.total


@FAST_AND_SLOW
@pytest.mark.parametrize(("max_tokens", "num_found"), [(5, 4), (6, 8), (7, 8), (10, 12)])
def test_blocks_are_found_as_soon_as_their_tokens_are_sure(max_tokens: int, num_found: int, fast_path: bool) -> None:
    """R151: when a result comes, blocks up to computed less placeholders can be found, though no later step registers them."""
    core = build("vllm-v1-async", fast_path=fast_path)
    core.add(make_request("a", [1, 2, 3], max_tokens=max_tokens))
    Loop(core, Worker(lambda name, at: at + 1)).run()
    core.add(make_request("b", list(range(1, 20))))
    assert core.state.cache.lookup(core.request("b").sequences[0]).num_tokens == num_found


@FAST_AND_SLOW
def test_tokens_in_flight_are_not_sure(fast_path: bool) -> None:
    """R151: a block that the step in flight fills can be found only when the tokens in it are known."""
    core = build("vllm-v1-async", fast_path=fast_path)
    core.add(make_request("a", [1, 2, 3], max_tokens=9))
    loop = Loop(core, Worker(lambda name, at: at + 1))
    found = []
    core.add(make_request("b", list(range(1, 20))))
    core.state.waiting.remove(core.request("b").groups[0])
    for _ in range(3):
        loop.step()
        found.append(core.state.cache.lookup(core.request("b").sequences[0]).num_tokens)
    assert found == [0, 0, 4]


def under_pressure(order: str = "fcfs") -> tuple[Scheduler, Loop]:
    """Two requests that do not fit together: the younger leaves with a token in flight."""
    core = build("vllm-v1-async", order=order, num_gpu_blocks=5, max_model_len=16, prefix_caching=False)
    core.add(make_request("a", 7, max_tokens=6))
    core.add(make_request("b", 7, max_tokens=6, arrival=1.0))
    loop = Loop(core)
    loop.step()
    loop.step()
    assert loop.send_off().preempted == [("b", "recompute")]
    return core, loop


def test_a_preempted_request_keeps_its_token_in_flight() -> None:
    """R131, R154: the placeholder stays until the token comes, which is appended where it waits; then it is computed again."""
    core, loop = under_pressure()
    b = core.request("b").sequences[0]
    assert (b.status, b.num_computed_tokens, b.num_placeholders, b.num_output_tokens) == (
        SequenceStatus.PREEMPTED,
        0,
        1,
        1,
    )
    outcome = loop.take()
    assert [(r.request_id, r.token_ids) for r in outcome.runs if r.request_id == "b"] == [("b", [next_token("b/0", 8)])]
    assert (waiting(core), b.num_placeholders, b.num_output_tokens, core.block_tables().keys()) == (
        ["b"],
        0,
        2,
        {"a/0"},
    )
    tokens = loop.run()
    [resumed] = [e for p in loop.plans for e in p.scheduled if e.resumed]
    assert (resumed.num_tokens, resumed.token_ids[7:]) == (9, tokens["b/0"][:2])


def test_a_late_token_may_end_a_request_that_waits() -> None:
    """R139, R154: finished while preempted: it leaves the waiting queue and never runs again."""
    core, loop = under_pressure()
    due = loop.queue.due.step
    loop.results[due] = StepResult(due, {**loop.results[due].tokens, "b/0": [EOS]})
    outcome = loop.take()
    assert [(e.request_id, e.status) for e in outcome.ended] == [("b", SequenceStatus.FINISHED_STOPPED)]
    assert (waiting(core), core.request("b")) == ([], None)
    loop.run()
    assert not any("b" in shares(p) for p in loop.plans[2:])


def test_blocks_of_a_preempted_request_are_not_registered_late() -> None:
    """R151: a token that arrives after preemption fills no block that a lookup could find."""
    core = build("vllm-v1-async", num_gpu_blocks=5, max_model_len=16)
    for name in "ab":
        core.add(make_request(name, 7, max_tokens=6))
    loop = Loop(core)
    for _ in range(3):
        loop.step()
    b = core.request("b").sequences[0]
    assert (b.status, b.num_output_tokens) == (SequenceStatus.PREEMPTED, 2)
    probe = Request("probe", [*b.token_ids[:8], 1], StopRules(1), 0.0)
    core.add(probe)
    assert core.state.cache.lookup(probe.sequences[0]).num_tokens == 4
    assert core.check_integrity() == []


@pytest.mark.parametrize("preset", ["vllm-v1", "vllm-v1-async"])
def test_the_prefix_cache_is_reset_only_when_no_block_is_in_use(preset: str) -> None:
    """R142: refused while something runs; afterwards the same prompt is no hit any more."""
    core = build(preset)
    prompt = list(range(1, 14))
    core.add(make_request("a", prompt, max_tokens=2))
    loop = Loop(core)
    loop.step()
    assert not core.reset_prefix_cache()
    loop.run()
    for fate, hits in ((False, 12), (True, 0)):
        if fate:
            assert core.reset_prefix_cache()
        core.add(make_request(f"b{fate}", prompt, max_tokens=1))
        loop.run()
        assert [p.lookups for p in loop.plans if p.lookups][-1] == [(f"b{fate}", hits)]


@pytest.mark.parametrize("preset", ["vllm-v1", "vllm-v1-async"])
@pytest.mark.parametrize("num_steps", [1, 2, 4])
def test_a_forced_reset_restarts_all_and_loses_no_token(preset: str, num_steps: int) -> None:
    """R142, R154: all running are preempted in reverse order, what is in flight for them is discarded and made again once."""
    undisturbed = build(preset)
    core = build(preset)
    for some in (undisturbed, core):
        for name in "abc":
            some.add(make_request(name, 6, max_tokens=5))
    loop = Loop(core)
    for _ in range(num_steps):
        loop.step()
    if preset == "vllm-v1-async":
        assert len(loop.queue) == 1
    assert core.reset_prefix_cache(preempt_running=True)
    assert waiting(core) == ["a", "b", "c"]
    assert placeholders(core) == dict.fromkeys("abc", 0)
    assert core.block_tables() == {}
    loop.worker = Worker()
    for name in "abc":
        loop.worker.learn(f"{name}/0", core.request(name).sequences[0].num_tokens)
    first = len(loop.plans)
    assert loop.run() == Loop(undisturbed).run()
    assert sorted(loop.plans[first].left) == ["a/0", "b/0", "c/0"]
    assert all(e.fresh and e.resumed for e in loop.plans[first].scheduled)
    assert core.check_integrity() == []


def test_a_lost_worker_leaves_nothing_in_flight() -> None:
    """R154: placeholders and plans in flight are gone; tokens that had come stay."""
    core = build("vllm-v1-async")
    core.add(make_request("a", 6, max_tokens=5))
    loop = Loop(core)
    loop.step()
    loop.step()
    core.reset_sequences_of_lost_worker()
    assert (placeholders(core), core.request("a").sequences[0].num_output_tokens) == ({"a": 0}, 1)
    assert shares(core.schedule(0.0)[0]) == {"a": 7}


# --- equal tokens -------------------------------------------------------------------------------------------------------

CLIENTS = st.lists(
    st.tuples(
        st.integers(1, 12),  # prompt tokens
        st.integers(1, 8),  # max_tokens
        st.integers(0, 2),  # priority
        st.integers(0, 6),  # arrival step
        st.sampled_from([None, None, 1, 2, 4]),  # aborted after so many tokens
    ),
    min_size=1,
    max_size=6,
)


def model_with_eos(name: str, at: int) -> int:
    """Every seventh token or so is EOS."""
    return EOS if hash_free(name, 3 * at) % 7 == 0 else next_token(name, at)


def serve(
    core: Scheduler, clients: list[tuple[int, int, int, int, int | None]]
) -> tuple[dict[str, list[int]], dict[str, SequenceStatus]]:
    """(tokens, statuses) of all clients, aborts by what the client has seen while plans execute."""
    loop = Loop(core, Worker(model_with_eos))
    step = 0
    ends: dict[str, SequenceStatus] = {}
    while step <= 6 or not loop.queue.is_idle:
        for i, (length, max_tokens, priority, arrival, _) in enumerate(clients):
            if arrival == step:
                core.add(make_request(f"r{i}", length, max_tokens, arrival=float(step), priority=priority))
        seen = loop.tokens()
        outcome = loop.step(
            tuple(f"r{i}" for i, c in enumerate(clients) if c[4] and len(seen.get(f"r{i}/0", ())) >= c[4])
        )
        ends.update({e.name: e.status for e in outcome.ended} if outcome else {})
        assert core.check_integrity() == []
        step += 1
        assert step < 500, "livelock"
    pool = core.pool_report()
    assert (pool.gpu.free, pool.refs) == (pool.gpu.total, {})
    return loop.tokens(), ends


SCENARIOS = given(
    clients=CLIENTS,
    order=st.sampled_from(["fcfs", "priority"]),
    blocks=st.integers(6, 14),
    budget=st.integers(6, 20),
    caching=st.booleans(),
    drafts=st.sampled_from([0, 0, 1, 3]),
    depth=st.sampled_from([1, 2, 2]),
    fast_path=st.booleans(),
)


def test_tokens_are_the_same_with_and_without(record_property: Record) -> None:
    """R159: asynchronous or not, with drafts or not: equal tokens and ends, also with EOS, aborts and preemption."""
    record_property("size", equal_in(30))


@pytest.mark.long
def test_tokens_are_the_same_in_many_scenarios(record_property: Record) -> None:
    """R159: the same in many times as many."""
    record_property("size", equal_in(1_500))


def equal_in(num: int) -> str:
    """Compares in so many scenarios; what was done, for the report of sizes."""
    settings(max_examples=num, deadline=None)(SCENARIOS(compare))()
    return f"core, asynchronous and not: {num} scenarios"


def compare(clients, order, blocks, budget, caching, drafts, depth, fast_path) -> None:
    """One scenario with and without."""
    sizes = {"num_gpu_blocks": blocks, "max_num_batched_tokens": budget, "max_num_seqs": 4, "max_model_len": 20}
    sizes["prefix_caching"] = caching
    plain, plain_ends = serve(build("vllm-v1", order=order, **sizes), clients)
    ahead, ahead_ends = serve(
        build("vllm-v1-async", order=order, drafts=drafts, depth=depth, fast_path=fast_path, **sizes), clients
    )
    for i, (*_, abort_after) in enumerate(clients):
        name = f"r{i}/0"
        if abort_after is None:
            assert ahead.get(name) == plain.get(name)
            assert ahead_ends[name] is plain_ends[name]
        else:
            assert ahead.get(name, [])[:abort_after] == plain.get(name, [])[:abort_after]
