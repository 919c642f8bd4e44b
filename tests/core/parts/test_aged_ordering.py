"""Quire's ordering: priority, age and deadlines on one axis; waiting is bounded and sorted queues stay sorted."""

import random

import pytest

from scheduler_svc.core.parts.costs import CostBook, Costs
from scheduler_svc.core.parts.ordering import AgingPriority
from scheduler_svc.core.parts.queues import SortedQueue
from scheduler_svc.core.request import MOST_CLASSES, Group
from tests.support.core.builders import answer
from tests.support.core.quire_builders import quire_core, request, running, serve, waiting


def group_of(name: str, **fields: object) -> Group:
    return request(name, 4, **fields).groups[0]  # type: ignore[arg-type]


def test_a_class_of_priority_is_worth_patience() -> None:
    """R24, R81: lower numbers start sooner, each class `patience_s` earlier; far-out classes count as the outermost."""
    aged = AgingPriority(5.0, CostBook())
    assert [aged.key(group_of("a", at=100.0, priority=p))[0] for p in (-1, 0, 2)] == [100.0, 105.0, 115.0]
    assert request("a", 4, priority=-700).priority_class == -MOST_CLASSES
    assert aged.key(group_of("a", at=100.0, priority=700))[0] == 100.0 + 5.0 * (1 + MOST_CLASSES)


def test_a_deadline_brings_forward_by_what_is_left_until_it_must_start() -> None:
    """Least slack first where a deadline is set, never further forward than the most important class."""
    aged = AgingPriority(5.0, CostBook(Costs(step_s=0.5, compute_token_s=0.25)))
    slack = group_of("a", at=100.0, deadline=103.0, min_tokens=3)
    assert aged.key(slack)[0] == 103.0 - (0.25 * (4 + 2) + 0.5 * 3)
    assert aged.key(group_of("a", at=100.0, deadline=900.0))[0] == 105.0
    assert aged.key(group_of("a", at=100.0, deadline=1.0))[0] == 100.0 - 5.0 * (MOST_CLASSES - 1)


def test_the_queue_is_in_that_order() -> None:
    """R81: a request that waited longer than patience goes before a newcomer of the next class."""
    core = quire_core({"max_num_seqs": 1}, patience_s=5.0)
    core.add(request("runs", 4, max_tokens=30, priority=-10))
    core.schedule(0.0)
    for name, at, priority in (("low", 0.0, 1), ("new", 4.0, 0), ("newer", 6.0, 0), ("urgent", 9.0, -2)):
        core.add(request(name, 4, at=at, priority=priority))
    assert running(core) == ["runs"]
    assert waiting(core) == ["urgent", "new", "low", "newer"]


@pytest.mark.parametrize("seed", range(20))
def test_waiting_is_bounded_under_overload(seed: int) -> None:
    """R81, R202: none starts before a request that arrived so much earlier that no class makes up for it."""
    rng = random.Random(seed)
    patience_s = rng.choice([0.0, 1.0, 4.0])
    core = quire_core(
        {"max_num_seqs": rng.randint(1, 3), "num_gpu_blocks": rng.choice([18, 40])}, patience_s=patience_s
    )
    requests, now = [], 0.0
    for number in range(120):
        now += rng.expovariate(1.5)
        deadline = now + rng.uniform(0.5, 60.0) if rng.random() < 0.2 else None
        arrived = request(
            f"r{number}",
            rng.randint(1, 20),
            rng.randint(1, 4),
            at=now,
            priority=rng.randint(-12, 12),
            deadline=deadline,
        )
        requests.append(arrived)
        core.add(arrived)
        if rng.random() < 0.5:
            for plan in core.schedule(now):
                core.update(answer(plan), now)
    serve(core, start=now)
    started = [r for r in requests if r.first_scheduled_time is not None]
    assert len(started) > 60
    for r in started:
        for later in started:
            if later.arrival_time > r.arrival_time + patience_s * (r.priority_class + MOST_CLASSES):
                assert later.first_scheduled_time >= r.first_scheduled_time


def test_a_request_that_needs_an_adapter_slot_is_passed_over_but_not_for_ever() -> None:
    """R53, R202: others pass until it is `patience_s` late; then none starts before it, and its adapter gets the slot."""
    core = quire_core({"max_num_seqs": 2}, patience_s=5.0, max_loras=1)
    other = request("other", 4, max_tokens=2, at=0.0)
    other.lora_id = 2
    passed, now = 0, 0.0
    for number in range(200):
        if number == 1:
            core.add(other)
        newcomer = request(f"r{number}", 4, max_tokens=3, at=now)
        newcomer.lora_id = 1
        core.add(newcomer)
        for plan in core.schedule(now):
            core.update(answer(plan))
        if other.first_scheduled_time is not None:
            break
        passed += newcomer.first_scheduled_time is not None
        now += 1.0
    assert 10.0 < now < 10.0 + 5.0
    assert passed > 1


def test_sorted_queue_is_a_sorted_list() -> None:
    """R30, R81: pushing, popping and taking out of the middle keep the order; an absent one cannot be taken out."""
    rng, queue, expected = random.Random(5), SortedQueue(AgingPriority(3.0, CostBook())), []
    for number in range(3_000):
        act = rng.random()
        if act < 0.5 or not expected:
            group = group_of(f"r{number:04}", at=float(rng.randint(0, 50)), priority=rng.randint(-2, 2))
            queue.push(group)
            expected.append(group)
            expected.sort(key=lambda g: (AgingPriority(3.0, CostBook()).key(g), g.request.request_id))
        elif act < 0.75:
            assert queue.peek() is expected[0]
            assert queue.pop() is expected.pop(0)
        else:
            group = expected.pop(rng.randrange(len(expected)))
            queue.remove(group)
            with pytest.raises(ValueError, match="not in this queue"):
                queue.remove(group)
    assert list(queue) == expected
    assert len(queue) == len(expected)
