"""Recompute of groups with several live sequences, when it takes more tokens than a step has."""

import pytest

from scheduler_svc.core.composition import presets
from scheduler_svc.core.limits import CoreLimits
from scheduler_svc.core.plan import StepPlan, StepResult
from scheduler_svc.core.request import Request, SequenceStatus
from scheduler_svc.core.request_rules import StopRules
from scheduler_svc.core.scheduler import Scheduler

PROMPT, OUTPUT, SAMPLES = 10, 24, 4


def make(policy: str, cache: str | None) -> Scheduler:
    limits = CoreLimits(4, 200, 40, max_num_seqs=8, max_num_batched_tokens=40, prefix_caching=False)
    return presets.build(policy, limits, **({"cache": cache} if cache else {}))


def answer(plan: StepPlan) -> StepResult:
    """Samples fork at the prompt's end; later each gets its number as token."""
    result = StepResult(plan.step)
    for entry in plan.scheduled:
        if entry.samples and entry.computed_before + entry.num_tokens == PROMPT:
            result.children[entry.name] = list(range(SAMPLES))
        elif entry.samples:
            result.tokens[entry.name] = [entry.index]
    return result


@pytest.mark.parametrize(
    ("policy", "cache"),
    [
        ("vllm-v0", None),
        ("vllm-2023", None),
        ("vllm-v0-chunked", None),
        ("vllm-v0", "quire"),
        ("vllm-v0-chunked", "quire"),
    ],
)
def test_samples_too_many_for_one_step_catch_up(policy: str, cache: str | None) -> None:
    """R28, R77: four samples of 30 tokens take 96 to compute again, a step has 40: one after the other catches up, then all
    sample together; the full blocks of the prompt are shared again, and every sample ends with all its tokens."""
    core = make(policy, cache)
    core.add(Request("a", list(range(PROMPT)), StopRules(max_tokens=OUTPUT), 0.0, n=SAMPLES))
    request = core.request("a")
    for _ in range(20):
        [plan] = core.schedule(0.0)
        core.update(answer(plan))
    assert request is not None
    assert [s.num_tokens for s in request.sequences] == [30] * SAMPLES
    core.schedule(0.0)
    core.reset_sequences_of_lost_worker()
    plans = []
    while core.has_unfinished:
        [plan] = core.schedule(0.0)
        assert 0 < plan.num_tokens <= 40
        plans.append(plan)
        core.update(answer(plan))
        assert core.check_integrity() == []
    first_to_sample = next(plan for plan in plans if any(e.samples for e in plan.scheduled))
    assert [e.name for e in first_to_sample.scheduled] == [f"a/{i}" for i in range(SAMPLES)]
    computed = sum(plan.num_tokens for plan in plans[: plans.index(first_to_sample) + 1])
    assert computed == 30 + 3 * (30 - 8)
    assert {s.status for s in request.sequences} == {SequenceStatus.FINISHED_LENGTH_CAPPED}
    assert [s.token_ids[PROMPT + 1 :] for s in request.sequences] == [[i] * (OUTPUT - 1) for i in range(SAMPLES)]
