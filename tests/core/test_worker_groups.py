"""Several worker groups of one core: random lives under every preset, and where a waiting group starts."""

import random
from collections.abc import Callable
from dataclasses import replace

import pytest

from scheduler_svc.core.composition import presets
from scheduler_svc.core.composition.live_change import put_worker
from scheduler_svc.core.limits import CoreLimits, PoolSize
from scheduler_svc.core.parts.costs import Costs
from scheduler_svc.core.plan import StepPlan
from scheduler_svc.core.reasons import Reason
from scheduler_svc.core.scheduler import Scheduler
from tests.support.core.builders import answer, make_request
from tests.support.core.preset_lives import POLICIES, live

Record = Callable[[str, object], None]
LIMITS = CoreLimits(block_size=4, num_gpu_blocks=41, max_model_len=128, max_num_seqs=4, max_num_batched_tokens=64)
POOL = PoolSize(41)
GROUPED = tuple(policy for policy in POLICIES if policy != "chitu-dp")
"""Presets that drive worker groups; `chitu-dp` has ranks."""


def live_for(policy: str, num_steps: int, first_seed: int) -> str:
    """Lives of one to four worker groups until so many steps were planned; what was done."""
    done, seed = 0, first_seed
    while done < num_steps:
        try:
            done += live(policy, seed, several=True).num_steps
        except Exception as error:
            error.add_note(f"live({policy!r}, {seed}, several=True)")
            raise
        seed += 1
    return f"core under {policy}: {done} random steps of 1 to 4 worker groups in {seed - first_seed} lives"


@pytest.mark.parametrize("policy", GROUPED)
def test_random_lives(policy: str, record_property: Record) -> None:
    """R2, R3, R28, R200: equal and unequal pools, every placement; workers die and come back."""
    record_property("size", live_for(policy, 400, 0))


@pytest.mark.long
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("policy", GROUPED)
def test_many_random_lives(policy: str, record_property: Record) -> None:
    """The same in many more lives."""
    record_property("size", live_for(policy, 50_000, 500_000))


def several(policy: str = "vllm-v1", count: int = 2, pools: list[PoolSize] | None = None, **knobs: object) -> Scheduler:
    """A core of so many worker groups."""
    return presets.build(policy, LIMITS, pools=pools or [POOL] * count, **knobs)


def topic(first: int) -> list[int]:
    """A prompt of eight full blocks and a token."""
    return [first + i for i in range(33)]


def started(plan: StepPlan) -> list[str]:
    """Requests in a plan."""
    return [entry.request_id for entry in plan.scheduled]


def finish(core: Scheduler, plans: list[StepPlan]) -> None:
    for plan in plans:
        if not plan.is_empty:
            core.update(answer(plan))


def test_a_waiting_request_starts_where_there_is_room() -> None:
    """Late binding: what waits for a full worker starts on another one as soon as that has room."""
    core = several(count=2)
    for name in "abcdefghi":
        core.add(make_request(name, 8, 20))
    first, second = core.schedule(0.0)
    assert sorted(started(first) + started(second)) == list("abcdefgh")
    assert {len(started(plan)) for plan in (first, second)} == {4}
    core.abort([started(second)[0]])
    finish(core, [first, second])
    [plan] = core.schedule(1.0, 1)
    assert "i" in started(plan)


def test_a_request_starts_where_its_prompt_is_cached() -> None:
    """Exact tables are compared: the second request of each topic starts on the worker that computed the first."""
    core = several(count=2)
    for name, first_token in (("a", 1), ("b", 50)):
        core.add(make_request(name, topic(first_token), 1))
    plans = core.schedule(0.0)
    assert [len(started(plan)) for plan in plans] == [1, 1]
    where = {started(plan)[0]: core.worker_of(plan.lane) for plan in plans}
    finish(core, plans)
    for name, first_token in (("b2", 50), ("a2", 1)):
        core.add(make_request(name, topic(first_token), 1))
    found = {name: core.worker_of(plan.lane) for plan in core.schedule(1.0) for name in started(plan)}
    assert found == {"a2": where["a"], "b2": where["b"]}


def test_a_warm_worker_is_waited_for_within_a_limit() -> None:
    """While the warm worker is full the request waits, with the reason and its numbers; after a while another one takes it."""
    core = several(count=2)
    core.observe_costs(Costs(step_s=0.01, compute_token_s=0.01))
    core.add(make_request("a", topic(1), 40))
    plans = core.schedule(0.0)
    [warm] = [core.worker_of(plan.lane) for plan in plans if started(plan)]
    finish(core, plans)
    core.drain_worker(1 - warm)
    for name in "xyz":
        core.add(make_request(name, 4, 60))
    finish(core, core.schedule(0.1, warm))
    core.take_worker_back(1 - warm)
    core.add(make_request("a2", topic(1), 4, arrival=0.2))
    [cold_plan] = core.schedule(0.21, 1 - warm)
    told = [event for event in cold_plan.events if event.reason is Reason.PREFIX_AFFINITY]
    assert not started(cold_plan) and [(e.request_id, e.numbers["worker"], e.numbers["known"]) for e in told] == [
        ("a2", warm, 32)
    ]
    [later] = core.schedule(3.0, 1 - warm)
    assert started(later) == ["a2"], "it has waited for longer than its prefix takes to compute"


def test_requests_left_to_another_worker_end_none() -> None:
    """A plan that leaves the only request to another worker is no sign that nothing can go on, however often that comes."""
    core = several(count=2)
    core.observe_costs(Costs(step_s=0.01, compute_token_s=0.01))
    core.add(make_request("first", topic(1), 1))
    plans = core.schedule(0.0)
    [warm] = [core.worker_of(plan.lane) for plan in plans if started(plan)]
    finish(core, plans)
    for number in range(12):
        core.add(make_request(f"{number}", topic(1), 1, arrival=float(number)))
        [left] = core.schedule(number + 0.01, 1 - warm)
        assert not started(left) and not left.ended
        [plan] = core.schedule(number + 0.02, warm)
        assert started(plan) == [f"{number}"]
        finish(core, [plan])
        finish(core, core.schedule(number + 0.03, warm))


@pytest.mark.parametrize("placement", ["prefix_affinity", "least_work", "round_robin"])
def test_equal_requests_are_spread(placement: str) -> None:
    """Nine groups of equal work: three workers have three each."""
    core = several(count=3, placement=placement)
    for i in range(9):
        core.add(make_request(f"r{i}", 8, 20))
    counts = [len(started(plan)) for plan in core.schedule(0.0)]
    assert counts == [3, 3, 3]


def test_a_long_request_starts_only_where_it_fits() -> None:
    """Of unequal workers the small one leaves a request to the large one, even while that is away."""
    core = several(pools=[PoolSize(9), PoolSize(41)])
    core.reset_sequences_of_lost_worker(1)
    core.add(make_request("long", 60, 20))
    [plan] = core.schedule(0.0, 0)
    assert not started(plan) and [event.reason for event in plan.events][-1] is Reason.GROUP_TOO_SMALL
    for now in range(1, 9):
        assert core.schedule(float(now), 0)[0].is_empty
    assert core.request("long") is not None, "it waits for the large worker"
    put_worker(core, 1, POOL, LIMITS)
    [plan] = core.schedule(9.0, 1)
    assert started(plan) == ["long"]


def test_a_drained_worker_starts_nothing_and_its_requests_move() -> None:
    """What runs ends there, or continues elsewhere with its tokens; then it serves again."""
    core = several(count=2)
    for name in "ab":
        core.add(make_request(name, 8, 6))
    plans = core.schedule(0.0)
    finish(core, plans)
    drained = core.request("a").groups[0].worker
    core.drain_worker(drained)
    core.add(make_request("c", 8, 6))
    [last] = core.schedule(1.0, drained)
    assert started(last) == ["a"]
    core.send_back(drained)
    [plan] = core.schedule(2.0, 1 - drained)
    assert {"a", "c"} <= set(started(plan))
    [entry] = [entry for entry in plan.scheduled if entry.request_id == "a"]
    assert entry.fresh and entry.num_tokens == 9, "its token so far is kept"
    assert not core.update(answer(last)).runs, "what its last step yields is computed again elsewhere"
    core.take_worker_back(drained)
    core.add(make_request("d", 8, 6))
    assert started(core.schedule(3.0, drained)[0]) == ["d"]


def test_a_worker_joins_with_another_pool() -> None:
    """A third worker takes requests from the next plan on; block names have its number."""
    core = several(count=2)
    put_worker(core, 2, PoolSize(21), LIMITS)
    for i in range(6):
        core.add(make_request(f"r{i}", 8, 20))
    assert [len(started(plan)) for plan in core.schedule(0.0)] == [2, 2, 2]
    tables = core.block_tables()
    assert {name.partition("@")[2] for table in tables.values() for name in table} == {"0", "1", "2"}
    assert core.pool_report().gpu.total == 40 + 40 + 20


def test_one_worker_of_several_gives_the_plans_of_one() -> None:
    """While all others are drained, a core of several worker groups plans as one of one does."""
    rng = random.Random(4)
    alone, of_many = presets.build("quire", LIMITS), several("quire", count=3)
    for number in (0, 2):
        of_many.drain_worker(number)
    for step in range(200):
        if rng.random() < 0.4:
            shape = (f"r{step}", rng.randint(1, 60), rng.randint(1, 20))
            for core in (alone, of_many):
                core.add(make_request(*shape, arrival=float(step)))
        [one], [other] = alone.schedule(float(step), 0), of_many.schedule(float(step), 1)
        assert one.scheduled == other.scheduled and one.preempted == other.preempted
        finish(alone, [one])
        finish(of_many, [other])


def test_a_request_that_sat_out_steps_goes_on_at_a_new_worker() -> None:
    """A group that is paused for its slow grammar masks is not paused for ever where its worker is replaced."""
    core = presets.build("vllm-v1", LIMITS)
    for name in "ab":
        core.add(make_request(name, 8, 20))
    [plan] = core.schedule(0.0)
    core.update(replace(answer(plan), duration_s=0.1, mask_s={"a/0": 5.0}))
    [plan] = core.schedule(1.0)
    assert started(plan) == ["b"]
    core.reset_sequences_of_lost_worker()
    put_worker(core, 0, POOL, LIMITS)
    [plan] = core.schedule(2.0)
    assert sorted(started(plan)) == ["a", "b"]
    finish(core, [plan])
    [plan] = core.schedule(3.0)
    assert sorted(started(plan)) == ["a", "b"]
