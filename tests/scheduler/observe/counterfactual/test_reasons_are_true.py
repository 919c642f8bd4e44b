"""Reasons are true: replayed with just enough of what a wait names, the request is let in at that step; with one unit less not."""

import functools
import random
from collections import Counter
from collections.abc import Callable

import pytest

from quire_tools.replay.what_if import Change, what_if
from scheduler_svc.core.composition import presets
from scheduler_svc.core.plan import StepPlan
from scheduler_svc.core.reasons import KEYS, Reason
from scheduler_svc.observe.counterfactual import wait_questions
from scheduler_svc.observe.counterfactual.past_step import PastStep
from scheduler_svc.observe.counterfactual.search import Value
from scheduler_svc.observe.counterfactual.wait_questions import WaitQuestion
from scheduler_svc.observe.timelines import Timelines, WaitEpisode
from svc_common.errors import ConfigError
from tests.support.core.preset_lives import happen
from tests.support.core.random_policies import random_setting
from tests.support.core.recorded_lives import KEY, RecordedLife, TokenAlias

POLICIES = presets.policy_names()
Record = Callable[[str, object], None]
LEAVING = (Reason.STEP_PREEMPTS,)


class ExplainedLife(RecordedLife):
    """A recorded life whose timelines are kept."""

    timelines: Timelines

    def _check_plan(self, plan: StepPlan) -> None:
        super()._check_plan(plan)
        self.timelines.observe(plan.events)


@functools.lru_cache(maxsize=16)
def explained(policy: str, seed: int) -> ExplainedLife:
    """A life of that policy, from its first request to its last."""
    rng = random.Random(f"true {policy} {seed}")
    life = ExplainedLife(random_setting(policy, rng), alias=TokenAlias(KEY), segment_steps=40)
    life.timelines = Timelines(lambda name: name in life.core.state.requests)
    for _ in range(rng.randint(40, 120)):
        happen(life, rng.choice([0.6, 1.5]), rng)
    life.drain()
    return life


def waits(life: ExplainedLife) -> list[tuple[str, WaitEpisode]]:
    """Waits of at least one step, of requests that had arrived before."""
    found = [(name, e) for name in life.requests for e in life.timelines.episodes(name) if e.is_wait]
    return [(name, e) for name, e in found if e.to_step is None or e.to_step > e.from_step]


def question(name: str, episode: WaitEpisode) -> WaitQuestion:
    head = str(episode.numbers.get("head_reason", ""))
    return WaitQuestion(name, episode.sample, episode.from_step, episode.reason.value, head)


def lets_in(past: PastStep, name: str, sample: int, values: dict[str, Value]) -> bool:
    """It starts, or comes back, in a plan of that step."""
    try:
        plans = past(values)
    except ConfigError:
        return False
    events = [e for plan in plans for e in plan.events if (e.request_id, e.sample) == (name, sample)]
    return any(e.reason is Reason.RUNNING for e in events) and events[-1].queue == "running"


def check(policy: str, num_lives: int, num_waits: int) -> Counter[str]:
    """Asks about waits picked at random; how many named something, and how many nothing, by reason."""
    told: Counter[str] = Counter()
    for seed in range(num_lives):
        life, rng = explained(policy, seed), random.Random(seed)
        segments = life.segments()
        all_waits = waits(life)
        picked = rng.sample(all_waits, min(num_waits, len(all_waits)))
        questions = [question(name, episode) for name, episode in picked]
        steps = dict(PastStep.at_each(segments, [asked.step for asked in questions]))
        answers = wait_questions.answer(segments, questions)
        for (name, episode), asked, needs in zip(picked, questions, answers, strict=True):
            past = steps[asked.step]
            assert isinstance(past, PastStep), past
            reason = Reason(asked.head_reason or asked.reason)
            told[f"{reason.value}{'' if needs else ' -'}"] += 1
            for key, value in needs.items():
                assert lets_in(past, name, episode.sample, needs), (seed, asked, needs)
                if isinstance(value, int):
                    less = value + 1 if key == "watermark_blocks" else value - 1
                    assert not lets_in(past, name, episode.sample, {**needs, key: less}), (seed, asked, needs)
    return told


def num_named(told: Counter[str]) -> int:
    """Waits that named a value."""
    return sum(count for reason, count in told.items() if not reason.endswith("-"))


@pytest.mark.parametrize("policy", POLICIES)
def test_just_enough_lets_it_in_and_one_less_does_not(policy: str) -> None:
    """Waits picked at random under every preset; those that hang on a number name one."""
    told = check(policy, 1, 5)
    assert num_named(told) >= 1 or presets.preset(policy).schedules_tasks, told


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("policy", POLICIES)
def test_just_enough_lets_it_in_many(policy: str, record_property: Record) -> None:
    """The same for many."""
    told = check(policy, 20, 10)
    hanging = {r: c for r, c in told.items() if Reason(r.removesuffix(" -")) in KEYS}
    named = sum(count for reason, count in hanging.items() if not reason.endswith("-"))
    record_property(
        "size", f"reasons under {policy}: {sum(told.values())} waits, {named} with a value; {dict(hanging)}"
    )
    # Chitu's waits hang on sizes of batches, slots and ranks as well, which are fixed at start.
    # A request preempted in the step that its reason names cannot be admitted anew there.
    bar = 0.1 if presets.preset(policy).schedules_tasks else 0.75
    assert named >= bar * sum(
        count for reason, count in hanging.items() if Reason(reason.removesuffix(" -")) not in LEAVING
    )


@pytest.mark.parametrize("num", [1, pytest.param(15, marks=pytest.mark.long)])
def test_the_same_is_seen_by_a_whole_what_if(num: int, record_property: Record) -> None:
    """`quire replay --set KEY=VALUE@STEP`: the request is among those admitted at that step, with one less it is not."""
    checked = 0
    for seed in range(20):
        life = explained("vllm-v1", seed)
        segments = life.segments()
        for name, episode in waits(life)[:4]:
            if checked == num:
                break
            [needs] = wait_questions.answer(segments, [question(name, episode)])
            if len(needs) != 1 or episode.reason is Reason.PREEMPTED or life.requests[name].num_samples > 1:
                continue
            [(key, value)] = needs.items()
            step = episode.from_step
            enough = what_if(segments, None, [Change(step, {key: value})])
            assert step in enough.requests[name].admitted_steps
            less = what_if(segments, None, [Change(step, {key: value - 1})])
            assert step not in less.requests[name].admitted_steps
            checked += 1
    assert checked == num
    record_property("size", f"reasons seen by a whole what-if: {num} waits")


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("num_lives", [1, pytest.param(10, marks=pytest.mark.long)])
def test_reasons_account_for_the_whole_of_waiting(policy: str, num_lives: int) -> None:
    """All steps in which a request waited have a reason beyond having come, and all time; the bar is 99 %."""
    waited = unexplained = 0
    for seed in range(num_lives):
        life = explained(policy, seed)
        for _, episode in waits(life):
            steps = (episode.to_step or life.core.step) - episode.from_step
            waited += steps
            unexplained += steps * (episode.reason is Reason.ARRIVED)
    assert waited > 15 * num_lives
    assert unexplained <= 0.01 * waited
