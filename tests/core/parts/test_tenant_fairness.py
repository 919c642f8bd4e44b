"""Fairness between tenants (`tenant_fairness`): turns by tokens served; nothing else changes."""

import random
from dataclasses import replace
from typing import Any

import pytest

from scheduler_svc.core.composition.live_change import reconfigure
from scheduler_svc.core.parts.fair_queue import BURST_TOKENS, CLASS_TOKENS, FairQueue
from scheduler_svc.core.parts.tenant_accounts import OUTPUT_WEIGHT
from scheduler_svc.core.reasons import Reason
from scheduler_svc.core.request import MOST_CLASSES, Request
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.observe.recording import snapshot
from tests.support.core.builders import answer
from tests.support.core.quire_builders import quire_core, request, running, serve, waiting
from tests.support.seeds import seeds

LONG = {"max_num_seqs": 1, "max_model_len": 3_000, "num_gpu_blocks": 2_000, "max_num_batched_tokens": 4_000}
ROOMY = {"num_gpu_blocks": 400, "max_num_batched_tokens": 64}


def _of(tenant: str, name: str, prompt: int = 8, max_tokens: int = 4, **fields: Any) -> Request:
    made = request(f"{tenant}{name}", prompt, max_tokens, **fields)
    made.tenant = tenant
    return made


def _shares(core: Scheduler) -> FairQueue:
    assert isinstance(core.state.waiting, FairQueue)
    return core.state.waiting


def _starts(core: Scheduler) -> list[str]:
    """Request ids in the order in which they started, until all is over."""
    found: list[str] = []
    serve(core, look=lambda plan: found.extend(s.request_id for s in plan.scheduled if s.request_id not in found))
    return found


def test_a_flood_does_not_keep_another_waiting() -> None:
    """Forty of `b` wait when one of `a` comes: it is next."""
    core = quire_core({"max_num_seqs": 1, **ROOMY})
    for i in range(40):
        core.add(_of("b", str(i), at=0.0))
    core.schedule(0.0)
    core.add(_of("a", "late", at=1.0))
    assert waiting(core)[0] == "alate"


def test_tenants_take_turns() -> None:
    """Requests of one size each: one of each tenant after the other, whatever their number."""
    core = quire_core({"max_num_seqs": 1, **ROOMY})
    for tenant, count in (("a", 4), ("b", 12), ("c", 4)):
        for i in range(count):
            core.add(_of(tenant, str(i), at=0.0))
    turns = [name[0] for name in _starts(core)]
    assert [sorted(turns[i : i + 3]) for i in range(0, 12, 3)] == [["a", "b", "c"]] * 4
    assert turns[12:] == ["b"] * 8


def test_tokens_count_and_not_requests() -> None:
    """Of requests four times as long a tenant gets a quarter as many."""
    core = quire_core({"max_num_seqs": 1, **ROOMY})
    for i in range(40):
        core.add(_of("long", str(i), 40, 4, at=0.0))
        core.add(_of("short", str(i), 6, 3, at=0.0))
    first = _starts(core)[:25]
    assert 3 <= sum(name.startswith("long") for name in first) <= 7


def test_a_returning_tenant_has_little_saved_up() -> None:
    """VTC with a burst: lifted to so many tokens below the least served that waits; its pause earns no more than that."""
    core = quire_core(LONG)
    for i in range(20):
        core.add(_of("busy", str(i), 2_000, 2, at=0.0))
    for step in range(30):
        for plan in core.schedule(float(step)):
            core.update(answer(plan), float(step))
    for i in range(12):
        core.add(_of("new", str(i), 2_000, 2, at=30.0))
    turns = [name[0] for name in _starts(core)]
    lead = turns.index("b", 1)
    assert 3 <= lead <= BURST_TOKENS // 2_000 + 2
    assert 3 <= turns[lead : lead + 8].count("n") <= 5, "then they take turns"


def test_a_class_of_priority_is_worth_so_many_tokens_between_tenants() -> None:
    """It lets a tenant go first; it lets no tenant starve."""
    core = quire_core(LONG)
    for i in range(8):
        core.add(_of("vip", str(i), 2_000, 2, priority=-1, at=0.0))
        core.add(_of("any", str(i), 2_000, 2, at=0.0))
    turns = [name[0] for name in _starts(core)]
    lead = next(i for i, tenant in enumerate(turns) if tenant == "a")
    assert turns[0] == "v" and 2 <= lead <= CLASS_TOKENS // 2_000 + 2 and turns[-1] == "a"


def test_within_a_tenant_the_policy_orders() -> None:
    """R24, R81: priority and age of its own requests, as ever."""
    core = quire_core({"max_num_seqs": 1, **ROOMY}, patience_s=5.0)
    core.add(_of("b", "first", max_tokens=30))
    core.schedule(0.0)
    for name, at, priority in (("low", 0.0, 1), ("new", 4.0, 0), ("urgent", 9.0, -2)):
        core.add(_of("b", name, at=at, priority=priority))
    assert running(core) == ["bfirst"] and waiting(core) == ["burgent", "bnew", "blow"]


@pytest.mark.parametrize("seed", seeds(4, 12))
def test_random_floods(seed: int) -> None:
    """Work-conserving, no tenant starves, and two that wait all the time are served alike but for a bound that no load moves."""
    rng = random.Random(seed)
    most, seqs = 24, rng.randint(1, 4)
    core = quire_core({"max_num_seqs": seqs, **ROOMY})
    sent = {"a": 0, "b": 0, "c": 0}
    requests: dict[str, Request] = {}
    at_begin: dict[str, int] = {}
    for step in range(160):
        for tenant, least in (("a", 3), ("b", rng.choice([3, 30]))):  # these two always wait
            while sum(r.request_id[0] == tenant and r.first_scheduled_time is None for r in requests.values()) < least:
                sent[tenant] += 1
                new = _of(tenant, str(sent[tenant]), rng.randint(1, most), rng.randint(1, 8), at=float(step))
                requests[new.request_id] = new
                core.add(new)
        if rng.random() < 0.1:
            sent["c"] += 1
            new = _of(
                "c",
                str(sent["c"]),
                rng.randint(1, most),
                rng.randint(1, 8),
                at=float(step),
                priority=rng.randint(-2, 2),
            )
            requests[new.request_id] = new
            core.add(new)
        for plan in core.schedule(float(step)):
            assert len(core.state.running) == seqs, "a slot is empty while a request waits"
            core.update(answer(plan), float(step))
        if step == 20:
            at_begin = _served(requests)
    a, b = (now - at_begin[tenant] for tenant, now in list(_served(requests).items())[:2])
    one = most + OUTPUT_WEIGHT * 8
    assert abs(a - b) <= 2 * one * (1 + seqs) + one
    serve(core, start=200.0)
    assert all(r.first_scheduled_time is not None for r in requests.values())


def _served(requests: dict[str, Request]) -> dict[str, int]:
    """Weighted tokens by tenant, counted from outside."""
    found = {"a": 0, "b": 0, "c": 0}
    for r in requests.values():
        if r.first_scheduled_time is not None:
            num_outputs = sum(s.num_output_tokens for s in r.sequences)
            found[r.request_id[0]] += len(r.prompt_token_ids) + OUTPUT_WEIGHT * num_outputs
    return found


@pytest.mark.parametrize("seed", seeds(2, 6))
def test_one_tenant_alone_is_served_as_without(seed: int) -> None:
    """Plans and events are equal, whatever its name: with on and off, through preemptions, aborts and priorities."""
    lives = [_life(seed, on=on, tenant=tenant) for on, tenant in ((False, ""), (True, ""), (True, "acme"))]
    assert lives[0] == lives[1] == lives[2]


def _life(seed: int, *, on: bool, tenant: str) -> list[Any]:
    rng = random.Random(seed)
    limits = {"max_num_seqs": 3, "num_gpu_blocks": rng.choice([18, 30])}
    core = quire_core(limits, tenant_fairness=on, patience_s=2.0, restraint="expected_peak")
    seen: list[Any] = []
    for step in range(80):
        if rng.random() < 0.5:
            made = request(
                f"r{step}", rng.randint(1, 20), rng.randint(1, 12), at=float(step), priority=rng.randint(-3, 3)
            )
            made.tenant = tenant
            core.add(made)
        if rng.random() < 0.05:
            core.abort([f"r{rng.randint(0, step)}"])
        for plan in core.schedule(float(step)):
            seen += [(e.request_id, e.num_tokens) for e in plan.scheduled] + plan.preempted + list(plan.events)
            core.update(answer(plan), step + 0.5)
    return seen


def test_accounts_are_set_right_at_the_end_and_survive_a_snapshot() -> None:
    """What was foretold of outputs is replaced by what came; a restored core has the same counters and decides the same."""
    core = quire_core({"max_num_seqs": 2, **ROOMY})
    for i in range(6):
        core.add(_of("a", str(i), 8, 4))
        core.add(_of("b", str(i), 12, 2))
    for step in range(4):
        for plan in core.schedule(float(step)):
            core.update(answer(plan), float(step))
    twin = snapshot.restore(snapshot.take(core, {}))
    assert [(s.num_served, s.num_open) for s in map(_shares(twin).shares.of, "ab")] == [
        (s.num_served, s.num_open) for s in map(_shares(core).shares.of, "ab")
    ]
    assert _starts(core) == _starts(twin)
    for lived in (core, twin):
        assert [_shares(lived).shares.of(t).num_open for t in "ab"] == [0, 0]
        assert _shares(lived).shares.of("a").num_served >= 6 * (8 + OUTPUT_WEIGHT * 4)


def test_why_names_the_tenant_that_was_passed_over() -> None:
    """The first of the flooding tenant hears once that others have their turn, and by how much it is ahead."""
    core = quire_core({"max_num_seqs": 1, **ROOMY})
    for i in range(3):
        core.add(_of("b", str(i), at=0.0))
    events = []
    for step in range(12):
        if step == 1:
            core.add(_of("a", "0", at=1.0))
        for plan in core.schedule(float(step)):
            events += [e for e in plan.events if e.reason is Reason.TENANT_SHARE]
            core.update(answer(plan), float(step))
    [event] = events
    assert event.request_id == "b1" and event.numbers["tokens_ahead"] >= 0 and not event.of_queue


def test_it_can_be_switched_while_it_runs() -> None:
    """No request is lost; accounts begin anew."""
    core = quire_core({"max_num_seqs": 1, **ROOMY}, tenant_fairness=False)
    for i in range(3):
        core.add(_of("b", str(i), at=0.0))
    [plan] = core.schedule(0.0)
    core.update(answer(plan), 0.0)
    core.add(_of("a", "0", at=1.0))
    assert waiting(core) == ["b1", "b2", "a0"]
    reconfigure(core, replace(core.spec, tenant_fairness=True), core.state.limits)
    assert sorted(waiting(core)) == ["a0", "b1", "b2"] and isinstance(core.state.waiting, FairQueue)
    before = _shares(core).shares
    reconfigure(core, replace(core.spec, patience_s=1.0), core.state.limits)
    assert _shares(core).shares is before, "counters outlive another change"
    reconfigure(core, replace(core.spec, tenant_fairness=False), core.state.limits)
    assert waiting(core) == ["b1", "b2", "a0"]
    serve(core)


def test_idle_tenants_are_forgotten_in_the_end() -> None:
    """Names cost nothing for ever."""
    core = quire_core({"max_num_seqs": 4, **ROOMY})
    for i in range(3_000):
        core.add(_of(f"t{i}-", "r", 1, 1, at=float(i)))
        for plan in core.schedule(float(i)):
            core.update(answer(plan), float(i))
    assert len(_shares(core).shares._shares) <= 2_200
    assert MOST_CLASSES * CLASS_TOKENS < 100_000, "a lead by priority ends"


def test_a_place_is_made_for_a_tenant_below_its_share() -> None:
    """Four of `b` run with long outputs: one leaves for that of `a` at once, and none is pushed out in return."""
    core = quire_core({"max_num_seqs": 4, **ROOMY}, margin_s=1.0)
    for i in range(6):
        core.add(_of("b", str(i), 8, 40, at=0.0))
    for step in range(6):
        for plan in core.schedule(float(step)):
            core.update(answer(plan), float(step))
    core.add(_of("a", "0", 8, 20, at=6.0))
    [plan] = core.schedule(6.0)
    assert "a0" in running(core) and len(plan.preempted) == 1
    core.update(answer(plan), 6.0)
    for i in range(1, 4):
        core.add(_of("a", str(i), 8, 20, at=7.0))
    preempted = []
    serve(core, start=7.0, look=lambda plan: preempted.extend(name for name, _ in plan.preempted))
    assert all(name.startswith("b") for name in preempted) and len(preempted) <= 3


@pytest.mark.parametrize("swap", [False, True])
@pytest.mark.parametrize("seed", seeds(2, 6))
def test_floods_with_few_blocks(seed: int, swap: bool) -> None:
    """R200, R202: preemptions by share among those for blocks, on the host too: all end, no block is lost, none is stuck."""
    rng = random.Random(seed)
    knobs = {"preemption_mode": "swap" if swap else None, "compute_token_s": 0.1, "swap_block_s": 0.01}
    core = quire_core({"max_num_seqs": 3, "num_gpu_blocks": 20}, patience_s=2.0, **knobs)
    requests = []
    for step in range(120):
        if rng.random() < 0.5:
            tenant = rng.choice(["a", "b", "b", "b", "c"])
            made = _of(
                tenant, str(step), rng.randint(1, 20), rng.randint(1, 16), at=float(step), priority=rng.randint(-2, 2)
            )
            requests.append(made)
            core.add(made)
        for plan in core.schedule(float(step)):
            if not plan.is_empty:
                core.update(answer(plan), step + 0.5)
        assert core.check_integrity() == []
    serve(core, start=120.0)
    assert all(r.is_finished for r in requests) and not core.pool_report().refs


def test_a_flood_moves_first_tokens_by_little() -> None:
    """In virtual time, with one step planned ahead: p99 of the quiet tenant's first tokens beside a flood, to that alone."""
    alone, beside, without = (_p99(flood=n, fair=fair) for n, fair in ((0, True), (100, True), (100, False)))
    assert beside <= 2 * alone, (beside, alone)
    assert without > 4 * alone, "else this shows nothing"


def _p99(*, flood: int, fair: bool) -> float:
    """Requests of `a` come at 10 per second; `flood` of `b` always wait or run. Steps take 20 ms and 50 us for each sequence."""
    rng = random.Random(1)
    limits = {"max_num_seqs": 32, "num_gpu_blocks": 2_000, "max_num_batched_tokens": 2_048, "num_cpu_blocks": 0}
    core = quire_core(limits, batch_queue=2, tenant_fairness=fair, margin_s=1.0)
    now, due, number, quiet, live = 0.0, 0.0, 0, [], 0
    flights: list[Any] = []
    while now < 5.0:
        while due <= now:
            quiet.append(_of("a", str(len(quiet)), 32, 16, at=due))
            core.add(quiet[-1])
            due += rng.expovariate(10.0)
        while live < flood:
            number, live = number + 1, live + 1
            core.add(_of("b", str(number), 32, 16, at=now))
        flights += [plan for plan in core.schedule(now) if not plan.is_empty]
        if not flights:
            now = due
            continue
        plan = flights.pop(0)
        now += 0.02 + 50e-6 * plan.num_scheduled
        ended = core.update(answer(plan), now).ended
        live -= sum(end.request_id.startswith("b") for end in ended)
    times = sorted(r.first_token_time - r.arrival_time for r in quiet if r.first_token_time is not None)
    assert len(times) > 30
    return times[int(0.99 * len(times))]
