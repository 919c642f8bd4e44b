"""Groups that an empty cache could not hold, under mixed phases: they end at once and block none behind them."""

from typing import Any

import pytest

from scheduler_svc.core.composition import presets
from scheduler_svc.core.limits import CoreLimits
from scheduler_svc.core.plan import EndedSequence, StepPlan, StepResult
from scheduler_svc.core.request import SequenceStatus
from scheduler_svc.core.scheduler import Scheduler
from tests.support.core.quire_builders import request, waiting

MIXED = pytest.mark.parametrize("policy", ["vllm-v1", "vllm-v1-async", "quire"])
BEAMS = 3
FEW_BLOCKS = 19


def make(policy: str, num_tokens: int, **knobs: Any) -> Scheduler:
    """19 blocks of 4 tokens, steps of `num_tokens`, one plan in flight at a time."""
    limits = CoreLimits(4, FEW_BLOCKS + 1, 64, max_num_seqs=8, max_num_batched_tokens=num_tokens, prefix_caching=False)
    return presets.build(policy, limits, **({} if policy == "vllm-v1" else {"batch_queue": 1}), **knobs)


def step(core: Scheduler) -> tuple[StepPlan, list[EndedSequence]]:
    """One step, in which all best beams are children of the first one; 7 for other sequences."""
    [plan] = core.schedule(float(core.step))
    result = StepResult(plan.step)
    for entry in plan.scheduled:
        sampled = core.request(entry.request_id)
        if not entry.samples or sampled is None:
            continue
        if sampled.beam is None:
            result.tokens[entry.name] = [7]
        else:
            likely = -0.1 if sampled.unfinished[0].name == entry.name else -9.0
            result.candidates[entry.name] = [(5 + i, likely) for i in range(2 * BEAMS)]
    return plan, [*plan.ended, *core.update(result).ended]


def add_grown_beams(core: Scheduler) -> None:
    """Beams with a prompt of 8 tokens that have grown to 29. Computed again they need 2 + 3 * 6 = 20 blocks."""
    core.add(request("beams", 8, max_tokens=25, at=1.0, beams=BEAMS))
    while core.request("beams").unfinished[0].num_tokens < 29:
        step(core)


@MIXED
def test_beams_that_no_longer_fit_end_at_once(policy: str) -> None:
    """R197: while they ran, they shared all but their ends; computed again they share only their prompt. They end in the plan
    that comes to them, with the numbers, though another request runs, and the request behind them starts in that plan."""
    core = make(policy, 64)
    core.add(request("first", 3, max_tokens=50))
    add_grown_beams(core)
    core.add(request("last", 3, max_tokens=4, at=2.0))
    core.reset_sequences_of_lost_worker()
    assert waiting(core) == ["first", "beams", "last"]
    plan, ended = step(core)
    assert [(e.request_id, e.status) for e in ended] == [("beams", SequenceStatus.FINISHED_IGNORED)] * BEAMS
    assert {e.error for e in ended} == {
        "its 3 sequences of up to 29 tokens together need 20 cache blocks, and there are 19; ask for fewer or shorter outputs"
    }
    assert [e.request_id for e in plan.scheduled] == ["first", "last"]


@MIXED
def test_beams_that_fit_behind_a_window_are_served(policy: str) -> None:
    """R105, R197: the first beam frees blocks while it is computed again, so that all three fit after all."""
    core = make(policy, 8, sliding_window=8)
    add_grown_beams(core)
    core.reset_sequences_of_lost_worker()
    ended: list[EndedSequence] = []
    for _ in range(60):
        ended += step(core)[1] if core.has_unfinished else []
    assert {e.status for e in ended} == {SequenceStatus.FINISHED_LENGTH_CAPPED}
    assert not core.has_unfinished
