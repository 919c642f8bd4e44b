"""When the progress guard acts (decision 0007): not while a request gains tokens, or still can."""

from collections import Counter

from scheduler_svc.core.parts.progress_guard import MAX_FRUITLESS, ProgressGuard
from tests.support.core.builders import make_request
from tests.support.core.pipelines import Loop, build


def test_preemptions_count_until_a_token_is_gained() -> None:
    """R66, R208: a group is stuck after so many in the same situation with no token in between, whosever."""
    guard = ProgressGuard()
    [group], [other] = make_request("a", 3).groups, make_request("b", 3).groups
    for _ in range(MAX_FRUITLESS - 1):
        guard.on_preempted(group, [other])
    guard.on_tokens()
    guard.on_preempted(group, [other])
    assert guard.favourite is None
    for _ in range(MAX_FRUITLESS - 1):
        guard.on_preempted(group, [other])
    assert guard.favourite is group
    guard.on_tokens()
    assert guard.favourite is None


def test_preemptions_count_in_the_same_situation_alone() -> None:
    """R208: while the others get on in their prompts, a chase may take as long as it likes."""
    guard = ProgressGuard()
    [group], [other] = make_request("a", 3).groups, make_request("b", 30).groups
    for num_computed in range(2 * MAX_FRUITLESS):
        other.sequences[0].num_computed_tokens = num_computed
        guard.on_preempted(group, [other])
    assert guard.favourite is None


def test_a_long_chase_that_ends_by_itself_is_left_alone() -> None:
    """R130, R147: with two plans in flight three prompts displace each other many times, as the reference has it."""
    core = build("vllm-v1", depth=2, num_gpu_blocks=9, max_num_batched_tokens=8, prefix_caching=False)
    for name, length in {"a": 13, "b": 17, "c": 17}.items():
        core.add(make_request(name, length, max_tokens=12, arrival=float(ord(name))))
    loop = Loop(core)
    chased: Counter[str] = Counter()
    longest = 0
    while not loop.queue.is_idle:
        plan, outcome = loop.send_off(), loop.take()
        chased.update(name for name, _ in (plan.preempted if plan else ()))
        longest = max(longest, *chased.values(), 0)
        for run in outcome.runs if outcome else ():
            chased[run.request_id] = 0
        assert core.state.guard.favourite is None
        assert len(loop.plans) < 300
    assert longest > MAX_FRUITLESS
    assert {name: len(tokens) for name, tokens in loop.tokens().items()} == {"a/0": 12, "b/0": 12, "c/0": 12}
