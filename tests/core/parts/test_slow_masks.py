"""Groups with costly grammars sit out steps: others keep their speed, and no tokens change."""

from dataclasses import dataclass, field, replace

import pytest

from scheduler_svc.core.composition import presets
from scheduler_svc.core.limits import CoreLimits
from scheduler_svc.core.parts.costs import Costs
from scheduler_svc.core.parts.slow_masks import MASK_SHARE
from scheduler_svc.core.plan import StepPlan
from scheduler_svc.core.request import Request
from scheduler_svc.core.request_rules import StopRules
from scheduler_svc.core.scheduler import Scheduler
from tests.support.core.builders import answer, next_token

STEP_S, MASK_S = 0.004, 0.02
LIMITS = CoreLimits(
    block_size=16, num_gpu_blocks=256, max_model_len=512, max_num_seqs=16, max_num_batched_tokens=512, num_cpu_blocks=16
)
PRESETS = ("quire", "vllm-v1", "vllm-v1-async", "vllm-v0", "vllm-v0-chunked", "chitu", "chitu-skew")
COSTLY = "costly"


def _request(name: str, num_tokens: int) -> Request:
    return Request(name, [1, 2, 3], StopRules(max_tokens=num_tokens), 0.0)


@dataclass
class Course:
    """A core's steps. `num_together`: costly sequences of each; `made`: tokens by sequence; `ended`: requests."""

    core: Scheduler
    total_s: float = 0.0
    masks_s: float = 0.0
    num_together: list[int] = field(default_factory=list)
    made: dict[str, list[int]] = field(default_factory=dict)
    ended: set[str] = field(default_factory=set)

    def until(self, request_id: str) -> None:
        """Steps until a request has ended; each mask of a costly one takes 20 ms."""
        while request_id not in self.ended:
            plans = self.core.schedule(self.total_s)
            assert not all(plan.is_empty for plan in plans) or any(plan.ended for plan in plans), "nothing is scheduled"
            for plan in plans:
                self._run(plan)
            assert self.core.check_integrity() == []

    def _run(self, plan: StepPlan) -> None:
        self.ended |= {end.request_id for end in plan.ended}
        if plan.is_empty:
            return
        costly = [e.name for e in plan.scheduled if e.samples and e.request_id.startswith(COSTLY)]
        step_s = STEP_S + MASK_S * len(costly)
        outcome = self.core.update(replace(answer(plan), mask_s=dict.fromkeys(costly, MASK_S), duration_s=step_s))
        self.num_together.append(len(costly))
        self.total_s, self.masks_s = self.total_s + step_s, self.masks_s + MASK_S * len(costly)
        for run in outcome.runs:
            self.made.setdefault(run.name, []).extend(run.token_ids)
        self.ended |= {end.request_id for end in outcome.ended}


@pytest.mark.parametrize("name", PRESETS)
@pytest.mark.parametrize("n", [1, 4])
def test_beside_costly_grammars_others_keep_their_speed(name: str, n: int) -> None:
    """Masks take about MASK_SHARE of the time until the plain request ends; then the costly go on, with their own tokens."""
    course = Course(presets.build(name, LIMITS))
    course.core.add(_request("plain", 300))
    for i in range(n):
        course.core.add(_request(f"{COSTLY}{i}", 20))
    course.until("plain")
    # The first masks of all are taken before it is known what they cost.
    assert course.masks_s <= MASK_SHARE * course.total_s + 2 * n * MASK_S
    for i in range(n):
        course.until(f"{COSTLY}{i}")
    assert {name: len(ids) for name, ids in course.made.items()} == {"plain/0": 300} | {
        f"{COSTLY}{i}/0": 20 for i in range(n)
    }
    assert all(ids == [next_token(name, 3 + i) for i in range(len(ids))] for name, ids in course.made.items())


@pytest.mark.parametrize("name", PRESETS)
def test_alone_they_run_together(name: str) -> None:
    """Those that cost the same do not wait for each other."""
    course = Course(presets.build(name, LIMITS))
    for i in range(4):
        course.core.add(_request(f"{COSTLY}{i}", 20))
    for i in range(4):
        course.until(f"{COSTLY}{i}")
    assert [count for count in course.num_together if count] == [4] * 20


def test_the_tenant_pays_for_its_masks() -> None:
    """As for the tokens of a prompt that could have been computed meanwhile."""
    core = presets.build("quire", LIMITS)
    core.observe_costs(Costs(step_s=0.004, compute_token_s=0.001))
    core.add(replace(_request("a", 20), tenant="acme"))
    [plan] = core.schedule(0.0)
    account = core.state.account
    before = account.shares.of("acme").num_served  # type: ignore[attr-defined]
    core.update(replace(answer(plan), mask_s={"a/0": 0.05}, duration_s=0.054))
    assert account.shares.of("acme").num_served - before == 50  # type: ignore[attr-defined]
