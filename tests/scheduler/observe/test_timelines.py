"""Timelines: every moment of a request has its reason, and it is where the timeline says."""

import itertools
import random
from collections import Counter
from collections.abc import Iterator

import pytest

from scheduler_svc.core.composition import presets
from scheduler_svc.core.limits import CoreLimits
from scheduler_svc.core.plan import StepPlan, StepResult
from scheduler_svc.core.reasons import CoreEvent, Reason
from scheduler_svc.core.request import QueueKind, Request
from scheduler_svc.core.request_rules import StopRules
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.observe.timelines import Timelines, WaitEpisode
from tests.support.core.lives import Life
from tests.support.core.preset_lives import POLICIES, happen
from tests.support.core.random_policies import Setting, random_setting

FEW_OR_MANY = pytest.mark.parametrize("num_lives", [3, pytest.param(30, marks=pytest.mark.long)])
Places = dict[tuple[str, int], list[tuple[int, str]]]


class WatchedLife(Life):
    """A random life whose events are observed, beside where each group really stood after each plan."""

    def __init__(self, setting: Setting, num_logged: int | None = None) -> None:
        super().__init__(setting)
        self.short = None if num_logged is None else Timelines(self.lives, num_logged=num_logged, num_events=10_000)
        self.num_compared = 0
        self.timelines = Timelines(self.lives)
        self.places: Places = {}
        self.heads: dict[int, set[str]] = {}
        self.shortages: list[CoreEvent] = []

    def lives(self, request_id: str) -> bool:
        return request_id in self.core.state.requests

    def _check_plan(self, plan: StepPlan) -> None:
        super()._check_plan(plan)
        self.timelines.observe(plan.events)
        self.shortages += [event for event in plan.events if event.reason is Reason.NEED_BLOCKS]
        if self.short is not None:
            self.short.observe(plan.events)
            for name in self.core.state.requests:
                if name in self.timelines:
                    assert self.short.episodes(name) == self.timelines.episodes(name)
                    self.num_compared += 1
        if plan.lane < len(self._workers) - 1:
            return  # the plans of all ranks are made at once
        for request in self.core.state.requests.values():
            for sample, group in enumerate(request.groups):
                if group.place is not QueueKind.NOWHERE:
                    key = (request.request_id, sample)
                    self.places.setdefault(key, []).append((plan.step, group.place.value))


def lives(policy: str, seeds: range, num_logged: int | None = None) -> Iterator[WatchedLife]:
    for seed in seeds:
        rng = random.Random(f"explained {policy} {seed}")
        life = WatchedLife(random_setting(policy, rng), num_logged)
        for _ in range(rng.randint(20, 100)):
            happen(life, rng.choice([0.2, 0.6, 1.5]), rng)
        life.drain()
        yield life


def queue_at(episodes: list[WaitEpisode], step: int) -> list[str]:
    return [e.queue for e in episodes if e.from_step <= step and (e.to_step is None or step < e.to_step)]


@pytest.mark.parametrize("policy", POLICIES)
@FEW_OR_MANY
def test_a_timeline_says_where_its_request_stood_at_every_step(policy: str, num_lives: int) -> None:
    """No step of a request is unexplained or explained twice, whatever happens to it."""
    num_checked = 0
    for life in lives(policy, range(num_lives)):
        for (request_id, sample), stood in life.places.items():
            episodes = [e for e in life.timelines.episodes(request_id) if e.sample == sample]
            for step, place in stood:
                assert queue_at(episodes, step) == [place], (request_id, sample, step)
                num_checked += 1
    assert num_checked > 40 * num_lives


@pytest.mark.parametrize("policy", POLICIES)
@FEW_OR_MANY
def test_episodes_follow_each_other_without_gaps(policy: str, num_lives: int) -> None:
    """The end of one reason is the beginning of the next, in steps and in time."""
    for life in lives(policy, range(100, 100 + num_lives)):
        for request_id, sample in life.places:
            episodes = [e for e in life.timelines.episodes(request_id) if e.sample == sample]
            for one, next_one in itertools.pairwise(episodes):
                assert one.to_step == next_one.from_step
                assert one.to_time == next_one.from_time
                assert one.to_time >= one.from_time
            assert all(e.reason is not Reason.ENDED for e in episodes)


# --- single reasons ------------------------------------------------------------------------------------------------------


def core_with(policy: str = "vllm-v1", **limits: object) -> Scheduler:
    values = {
        "block_size": 4,
        "num_gpu_blocks": 9,
        "max_model_len": 64,
        "max_num_seqs": 4,
        "max_num_batched_tokens": 64,
    }
    own = {name: limits.pop(name) for name in list(limits) if name not in CoreLimits.__dataclass_fields__}
    return presets.build(policy, CoreLimits(**(values | limits)), **own)


def request(name: str, num_tokens: int, max_tokens: int = 8, **values: object) -> Request:
    first = sum(name.encode()) * 100
    return Request(name, list(range(first, first + num_tokens)), StopRules(max_tokens, ignore_eos=True), 0.0, **values)


class Run:
    """A core with its worker; one step at a time."""

    def __init__(self, core: Scheduler, requests: list[Request]) -> None:
        self.core, self.timelines = core, Timelines(core.state.requests.__contains__)
        for r in requests:
            core.add(r)

    def step(self) -> StepPlan:
        [plan] = self.core.schedule(float(self.core.step))
        self.timelines.observe(plan.events)
        self.core.update(StepResult(plan.step, {e.name: [7] for e in plan.scheduled if e.samples}))
        return plan

    def waits(self, request_id: str) -> list[tuple[Reason, dict[str, object]]]:
        return [
            (e.reason, e.numbers) for e in self.timelines.episodes(request_id) if e.is_wait and e.from_step != e.to_step
        ]


@pytest.mark.parametrize(
    ("policy", "limits", "reason", "numbers"),
    [
        ("vllm-v1", {}, Reason.NEED_BLOCKS, {"need": 5, "free": 3, "watermark": 0}),
        ("vllm-v1", {"max_num_seqs": 1}, Reason.MAX_SEQS, {"running": 1, "limit": 1}),
        ("vllm-v1", {"max_num_batched_tokens": 20}, Reason.TOKEN_BUDGET, {"need": 1, "left": 0, "budget": 20}),
        ("static", {"num_gpu_blocks": 99}, None, {}),
        (
            "vllm-v0",
            {"num_gpu_blocks": 8, "watermark_blocks": 1},
            Reason.NEED_BLOCKS,
            {"need": 5, "free": 3, "watermark": 1},
        ),
        ("vllm-v0", {"max_num_seqs": 1, "num_gpu_blocks": 99}, Reason.MAX_SEQS, {"need": 1, "running": 1, "limit": 1}),
        (
            "vllm-v0-chunked",
            {"max_num_batched_tokens": 20, "num_gpu_blocks": 99},
            Reason.TOKEN_BUDGET,
            {"need": 4, "left": 0, "budget": 20},
        ),
    ],
)
def test_the_head_says_what_it_lacks_and_those_behind_it_that_they_are_behind(
    policy: str, limits: dict[str, int], reason: Reason | None, numbers: dict[str, int]
) -> None:
    """Reason code and numbers for the head, one event for all behind it."""
    run = Run(core_with(policy, **limits), [request("a", 20), request("b", 20), request("c", 20)])
    run.step()
    if reason is None:
        assert run.waits("b") == []
        return
    assert run.waits("b")[0] == (reason, numbers)
    assert run.waits("c")[0] == (Reason.BEHIND, {"head": "b", "head_reason": reason.value, **numbers})


def test_no_request_joins_a_static_batch() -> None:
    """R1: static batching is what all others wait for."""
    run = Run(core_with("static", num_gpu_blocks=99), [request("a", 4)])
    run.step()
    run.step()
    run.core.add(request("b", 4))
    run.step()
    assert run.waits("b")[0] == (Reason.BATCH_UNDER_WAY, {"running": 1})


def test_a_victim_names_its_beneficiary_and_what_it_lost() -> None:
    """R130: PREEMPTED by=… mode=recompute lost_tokens=…."""
    run = Run(core_with(num_gpu_blocks=7), [request("a", 11), request("b", 11)])
    for _ in range(5):
        run.step()
    lost = [numbers for reason, numbers in run.waits("b") if reason is Reason.PREEMPTED]
    assert lost[0]["by"] == "a"
    assert lost[0]["mode"] == "recompute"
    assert lost[0]["lost_tokens"] >= 11


def test_an_adapter_too_many_is_passed_over() -> None:
    """R53: LORA_SLOTS for the one, none for those that pass it."""
    requests = [request("a", 4, lora_id=1), request("b", 4, lora_id=2), request("c", 4, lora_id=1)]
    run = Run(core_with(num_gpu_blocks=99, max_loras=1), requests)
    run.step()
    assert run.waits("b")[0] == (Reason.LORA_SLOTS, {"adapter": 2, "limit": 1})
    assert run.waits("c") == []


def test_what_leaves_the_log_is_kept_of_those_that_live() -> None:
    """A live request's timeline goes back to its arrival, however much happened to others since."""
    num_checked = 0
    for life in lives("vllm-v1", range(200, 202), num_logged=20):
        num_checked += life.num_compared
    assert num_checked > 100


def test_memory_is_bounded() -> None:
    """Events of requests that ended are forgotten with the log, and an id that comes again is another request."""
    core = core_with(num_gpu_blocks=99)
    timelines = Timelines(core.state.requests.__contains__, num_logged=8)
    for i in range(3000):
        one = request(f"r{i % 2000}", 4)
        core.add(one)
        [plan] = core.schedule(float(i))
        core.update(StepResult(plan.step))
        core.abort([one.request_id])
        timelines.observe(plan.events)
    assert ("r998" in timelines, "r999" in timelines, "r1999" in timelines) == (True, True, False)
    with pytest.raises(KeyError):
        timelines.episodes("r1")
    assert len(timelines._old) <= 1024
    assert timelines.episodes("r999")[0].from_step == 3000


def test_a_long_timeline_keeps_its_beginning_and_its_end() -> None:
    """At most so many events of a request beyond the log: the first, and the last."""
    timelines = Timelines(lambda _: True, num_logged=2, num_events=8)
    for step in range(100):
        reason = Reason.NEED_BLOCKS if step % 2 else Reason.TOKEN_BUDGET
        timelines.observe([CoreEvent(step, float(step), "waiting", reason if step else Reason.ARRIVED, "a")])
    steps = [e.from_step for e in timelines.episodes("a")]
    assert len(steps) <= 10
    assert (steps[0], steps[-3:]) == (0, [97, 98, 99])


@pytest.mark.parametrize("policy", POLICIES)
@FEW_OR_MANY
def test_numbers_of_a_shortage_of_blocks_are_those_that_decided(policy: str, num_lives: int) -> None:
    """A request that waits for blocks is told a need that the free blocks do not cover with the watermark on top."""
    for life in lives(policy, range(num_lives)):
        for event in life.shortages:
            n = event.numbers
            assert n["free"] - n["need"] < n.get("watermark", 0), event


NUMBERS = {
    Reason.TOKEN_BUDGET: {"need", "left", "budget"},
    Reason.NEED_BLOCKS: {"need", "free"},
    Reason.MAX_SEQS: {"running", "limit"},
    Reason.STEP_PREEMPTS: {"preempted"},
    Reason.LORA_SLOTS: {"adapter", "limit"},
    Reason.RESERVED: {"need"},
    Reason.SWAPPED_FIRST: {"swapped"},
}


@pytest.mark.parametrize("policy", POLICIES)
@FEW_OR_MANY
def test_reasons_that_hang_on_numbers_tell_them(policy: str, num_lives: int) -> None:
    """No TOKEN_BUDGET of 0 tokens, no STEP_PREEMPTS without how many; what is needed is more than what is left."""
    seen = Counter[Reason]()
    for life in lives(policy, range(200, 200 + num_lives)):
        episodes = [e for request_id, _ in life.places for e in life.timelines.episodes(request_id)]
        for episode in episodes:
            numbers = episode.numbers
            reason = Reason(str(numbers.get("head_reason", episode.reason)))
            if reason not in NUMBERS:
                continue
            seen[reason] += 1
            assert NUMBERS[reason] <= numbers.keys(), (reason, numbers)
            if reason is Reason.TOKEN_BUDGET:
                assert 0 <= int(numbers["left"]) < int(numbers["need"]), numbers
            if reason is Reason.STEP_PREEMPTS:
                assert int(numbers["preempted"]) >= 1, numbers
    assert seen
