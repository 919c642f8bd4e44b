"""Newcomers go to the rank that knows how their prompt begins, as long as that is not too busy (R188, R190)."""

import random
from collections.abc import Callable

import pytest

from scheduler_svc.core.plan import StepPlan
from scheduler_svc.core.reasons import CoreEvent, Reason
from scheduler_svc.core.request import Request
from scheduler_svc.core.request_rules import StopRules
from tests.support.core.task_builders import Tasks

SIZE = 4
"""Tokens of a block."""


class Ranks(Tasks):
    """Ranks that remember prefixes; which rank owns which task, and the events."""

    def __init__(self, dp_size: int = 2, **knobs: object) -> None:
        given = {"max_reqs": 16 * dp_size, "max_num_seqs": 32, "prefix_caching": True, **knobs}
        super().__init__("chitu-dp", dp_size=dp_size, **given)
        self.owner: dict[str, int] = {}
        self.events: list[CoreEvent] = []

    def ask(self, name: str, prompt: list[int], max_tokens: int = 8, n: int = 1) -> None:
        """A task with that prompt."""
        self.core.add(Request(name, prompt, StopRules(max_tokens, ignore_eos=True), self.now, n=n))

    def go(self) -> None:
        """One step, with its results."""
        self.step()
        for plan in self.plans:
            self._note(plan)

    def _note(self, plan: StepPlan) -> None:
        self.events += plan.events
        for entry in plan.scheduled:
            assert self.owner.setdefault(entry.name, plan.lane) == plan.lane, "an owner for life"


def text(topic: int, num_blocks: int, own: int = 0) -> list[int]:
    """So many blocks about a topic, and four tokens of its own."""
    return [100 * topic + i for i in range(SIZE * num_blocks)] + [9_000 + 10 * own + i for i in range(SIZE)]


def one_by_one(tasks: Ranks, prompts: dict[str, list[int]], max_tokens: int = 8) -> list[int]:
    """The owners of tasks that come one after the other."""
    for name, prompt in prompts.items():
        tasks.ask(name, prompt, max_tokens)
        tasks.go()
    return [tasks.owner[f"{name}/0"] for name in prompts]


def test_the_rank_with_the_longest_prefix_gets_it() -> None:
    """R190: not the rank that is next in turn, nor the one that knows less; a task without known prefix takes the next turn."""
    tasks = Ranks(3)
    assert one_by_one(tasks, {"a": text(1, 1), "b": text(1, 4, own=1), "c": text(2, 2)}, max_tokens=40) == [0, 0, 1]
    assert one_by_one(tasks, {"d": text(2, 2, own=3), "e": text(1, 4, own=4), "f": text(3, 3)}) == [1, 0, 2]
    told = {event.request_id: dict(event.numbers) for event in tasks.events if event.reason is Reason.PREFIX_AFFINITY}
    assert told == {
        "b": {"rank": 0, "known": 4, "tasks": 1, "least": 0},
        "d": {"rank": 1, "known": 8, "tasks": 1, "least": 0},
        "e": {"rank": 0, "known": 16, "tasks": 2, "least": 0},
    }


def test_what_all_know_alike_goes_to_the_least_busy() -> None:
    """R190: a common beginning that every rank knows does not fill the first one."""
    tasks = Ranks(dp_prefix_affinity=0)
    owners = one_by_one(tasks, {f"t{i}": text(1, 2, own=i) for i in range(8)}, max_tokens=40)
    assert owners[:2] == [0, 1] and sorted(owners) == [0] * 4 + [1] * 4


def test_a_busy_rank_attracts_no_task() -> None:
    """R190: with more tasks than so many beyond the least busy one; that one gets it then, and no rank idles."""
    prompts = {f"t{i}": text(1, 4, own=i) for i in range(10)}
    for slack, num_drawn in ((0, 1), (2, 3), (100, 10)):
        owners = one_by_one(Ranks(num_blocks=256, dp_prefix_affinity=slack), prompts, max_tokens=40)
        assert owners[: num_drawn + 1] == [0] * num_drawn + [1] * (num_drawn < 10)


def test_without_it_ranks_take_turns() -> None:
    """R190: as recorded: null, and wherever no prefix is remembered."""
    prompts = {f"t{i}": text(1, 4, own=i) for i in range(6)}
    for knobs in ({"dp_prefix_affinity": None}, {"prefix_caching": False}):
        tasks = Ranks(**knobs)
        assert one_by_one(tasks, prompts) == [0, 1] * 3
        assert not [event for event in tasks.events if event.reason is Reason.PREFIX_AFFINITY]


def test_a_full_rank_is_not_waited_for() -> None:
    """R188, R190: a task whose rank has no place goes to another that has one."""
    tasks = Ranks(max_reqs=2)
    assert one_by_one(tasks, {"a": text(1, 4), "b": text(1, 4, own=1)}, max_tokens=30) == [0, 1]


@pytest.mark.parametrize("num_lives", [4, pytest.param(40, marks=pytest.mark.long)])
def test_no_task_starves_and_nothing_leaks(num_lives: int, record_property: Callable[[str, object], None]) -> None:
    """R188, R190, R200: random arrivals on few topics, scarce blocks: all end with all tokens at one owner, all ranks work, all
    blocks come back, and prefixes are found."""
    for seed in range(num_lives):
        rng = random.Random(seed)
        tasks = Ranks(3, num_blocks=40, max_reqs=12, dp_prefix_affinity=rng.choice([0, 1, 4, 100]))
        left = 60
        for _ in range(2_000):
            for _ in range(min(left, rng.choice([0, 0, 1, 3]))):
                left -= 1
                tasks.ask(
                    f"t{left}",
                    text(rng.randrange(4), rng.randint(1, 8), left),
                    rng.randint(1, 9),
                    rng.choice([1, 1, 2]),
                )
            tasks.go()
            assert not tasks.core.check_integrity()
            if not left and not tasks.core.has_unfinished:
                break
        assert not left and not tasks.core.has_unfinished, seed
        assert set(tasks.owner.values()) == {0, 1, 2}
        assert tasks.core.pool_report().gpu.free == 120
        lookups, hits = tasks.core.state.cache.hits
        assert hits > lookups / 4, (seed, hits, lookups)
    record_property("size", f"ranks with prefix affinity: {num_lives} lives of 60 tasks")
