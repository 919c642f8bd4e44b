"""Corner cases of vLLM V1: which request is skipped, what counts as cached, which end wins."""

import pytest

from scheduler_svc.core.composition import presets
from scheduler_svc.core.limits import CoreLimits
from scheduler_svc.core.plan import StepResult
from scheduler_svc.core.request import Request, SequenceStatus
from scheduler_svc.core.request_rules import StopRules
from tests.support.core.builders import make_core, make_request, one_step, shares, waiting

EOS, STOP, PLAIN = 90, 91, 92


def test_skipped_requests_return_to_the_head_in_order() -> None:
    """R133: those whose adapter has no slot now are passed over and wait in front again, in their order."""
    limits = CoreLimits(4, 65, 64, max_num_seqs=8, max_num_batched_tokens=32)
    core = presets.build("vllm-v1", limits, max_loras=1)
    for name, lora_id in (("a", 1), ("b", 2), ("c", 3), ("d", 0), ("e", 1), ("f", 2)):
        request = Request(name, [1, 2, 3], StopRules(max_tokens=2), 0.0, lora_id=lora_id)
        core.add(request)
    assert shares(one_step(core)[0]) == {"a": 3, "d": 3, "e": 3}
    assert waiting(core) == ["b", "c", "f"]


def test_cached_tokens_are_counted_when_a_request_first_starts() -> None:
    """R134: what it finds again after a preemption are its own blocks, no saving of the client's."""
    core = make_core(num_gpu_blocks=6, max_model_len=20)
    core.add(make_request("a", 7, max_tokens=9))
    core.add(make_request("b", 7, max_tokens=9))
    b, plan = core.request("b"), None
    while plan is None or not any(e.resumed for e in plan.scheduled):
        plan, _ = one_step(core)
    assert plan.lookups == [("b", 4)]
    assert b.num_cached_tokens == 0


@pytest.mark.parametrize(
    ("token", "rules", "num_tokens", "status"),
    [
        (EOS, {"min_tokens": 2}, 1, None),
        (STOP, {"min_tokens": 2}, 1, None),
        (PLAIN, {"min_tokens": 2, "max_tokens": 1}, 1, None),
        (EOS, {"max_tokens": 1}, 1, SequenceStatus.FINISHED_STOPPED),
        (EOS, {"ignore_eos": True}, 1, None),
        (STOP, {"max_tokens": 1, "ignore_eos": True}, 1, SequenceStatus.FINISHED_STOPPED),
        (PLAIN, {"max_tokens": 1}, 1, SequenceStatus.FINISHED_LENGTH_CAPPED),
        (PLAIN, {}, 1, None),
        (PLAIN, {}, 3, SequenceStatus.FINISHED_LENGTH_CAPPED),
        (EOS, {}, 3, SequenceStatus.FINISHED_STOPPED),
    ],
)
def test_the_first_rule_that_applies_ends_a_sequence(token, rules, num_tokens, status) -> None:
    """R140: below min_tokens nothing ends it; then EOS, stop ids, model length (8 here) or max_tokens, in this order."""
    given = {"max_tokens": 9, "eos_token_ids": frozenset([EOS]), "stop_token_ids": frozenset([STOP]), **rules}
    core = make_core(max_model_len=8)
    core.add(Request("a", [1, 2, 3, 4, 5], StopRules(**given), 0.0))
    [plan] = core.schedule(0.0)
    outcome = core.update(StepResult(plan.step, {"a/0": [PLAIN] * (num_tokens - 1) + [token]}))
    assert [e.status for e in outcome.ended] == ([] if status is None else [status])


def test_aborting_twice_or_after_the_end_changes_nothing() -> None:
    """R141: finished and unknown ids are ignored, in one call with living ones too."""
    core = make_core()
    core.add(make_request("a", 5, max_tokens=1))
    core.add(make_request("b", 5, max_tokens=9))
    one_step(core)
    assert [e.request_id for e in core.abort(["a", "nobody", "b", "b"])] == ["b"]
    assert core.abort(["a", "b"]) == []
    assert core.pool_report().gpu.free == core.pool_report().gpu.total
    assert core.schedule(0.0)[0].finished == ["a", "b"]
