"""Builders for the rules of v0: a small core of any v0 preset, and a worker whose prompts branch into n samples."""

from typing import Any

from scheduler_svc.core.composition import presets
from scheduler_svc.core.limits import CoreLimits
from scheduler_svc.core.plan import StepOutcome, StepPlan, StepResult
from scheduler_svc.core.request import Group, QueueKind, Request, SequenceStatus
from scheduler_svc.core.request_rules import StopRules
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.core.spec.policy_spec import knob_names
from tests.support.core.builders import EOS, hash_free, next_token

_SMALL: dict[str, Any] = {
    "block_size": 4,
    "num_gpu_blocks": 20,
    "num_cpu_blocks": 20,
    "max_model_len": 64,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 64,
    "prefix_caching": False,
}


def make_v0(preset: str = "vllm-v0", **given: Any) -> Scheduler:
    """A core of a preset with small numbers; `given` are limits or knobs of the policy."""
    knobs = {name: value for name, value in given.items() if name in knob_names()}
    limits = {name: value for name, value in given.items() if name not in knobs}
    return presets.build(preset, CoreLimits(**{**_SMALL, **limits}), **knobs)


def make_chunked(**given: Any) -> Scheduler:
    """A chunked one, with a budget of 8 tokens."""
    return make_v0("vllm-v0-chunked", **{"max_num_batched_tokens": 8, **given})


def make_request(
    name: str, prompt: int | list[int], max_tokens: int = 20, *, arrival: float = 0.0, **given: Any
) -> Request:
    """A request with `prompt` tokens (a number: that many of its own); `given` are fields of `Request`."""
    tokens = prompt if isinstance(prompt, list) else [1 + hash_free(name, i) for i in range(prompt)]
    return Request(name, tokens, StopRules(max_tokens, eos_token_ids=frozenset([EOS])), arrival, **given)


def add(core: Scheduler, name: str, prompt: int | list[int], max_tokens: int = 20, **given: Any) -> Request:
    """Makes a request and adds it."""
    request = make_request(name, prompt, max_tokens, **given)
    core.add(request)
    return request


def answer(core: Scheduler, plan: StepPlan) -> StepResult:
    """What a worker returns: a token for all that sample, n at the end of a prompt of n samples."""
    result = StepResult(plan.step)
    for entry in plan.scheduled:
        group = group_of(core, entry.request_id)
        if not entry.samples or group is None:
            continue
        first = entry.computed_before + entry.num_tokens
        if group.width > len(group.sequences) and first == entry.num_prompt_tokens:
            result.children[entry.name] = [next_token(f"{entry.request_id}/{i}", first) for i in range(group.width)]
        else:
            result.tokens[entry.name] = [next_token(entry.name, first)]
    return result


def one_step(core: Scheduler, now: float = 0.0) -> tuple[StepPlan, StepOutcome]:
    """Plans, runs and applies one step."""
    [plan] = core.schedule(now)
    return plan, core.update(answer(core, plan), now)


def steps(core: Scheduler, num: int) -> list[StepPlan]:
    """The plans of so many steps."""
    return [one_step(core)[0] for _ in range(num)]


def until(core: Scheduler, what: str, at_most: int = 60) -> StepPlan:
    """Steps until a plan has something in that field; that plan, already applied."""
    for _ in range(at_most):
        plan, _ = one_step(core)
        if getattr(plan, what):
            return plan
    raise AssertionError(f"no plan with {what} in {at_most} steps")


def finish(core: Scheduler, at_most: int = 300) -> dict[str, list[int]]:
    """Runs to the end and gives the tokens of each sequence; everything is free then (R200)."""
    tokens: dict[str, list[int]] = {}
    for _ in range(at_most):
        if not core.has_unfinished:
            break
        for run in one_step(core)[1].runs:
            tokens.setdefault(run.name, [])[run.offset :] = run.token_ids
        assert core.check_integrity() == []
    assert not core.has_unfinished
    pools = core.pool_report()
    assert (pools.gpu.free, pools.cpu.free) == (pools.gpu.total, pools.cpu.total)
    return tokens


def move_to_host(core: Scheduler, request_id: str) -> None:
    """Swaps a running group out as a preemption would, without a reason for it."""
    [group] = [g for g in core.state.running if g.request.request_id == request_id]
    core.state.cache.swap_out(group.live)
    core.state.take_out(group)
    for sequence in group.live:
        sequence.status = SequenceStatus.SWAPPED
    group.place = QueueKind.SWAPPED
    core.state.swapped.append(group)


def group_of(core: Scheduler, request_id: str) -> Group | None:
    """The only group of a live request."""
    request = core.request(request_id)
    return request.groups[0] if request else None


def names(plan: StepPlan) -> list[str]:
    """Sequences in scheduled order."""
    return [entry.name for entry in plan.scheduled]


def chunks(plan: StepPlan) -> list[tuple[str, int]]:
    """(request id, tokens) in scheduled order."""
    return [(entry.request_id, entry.num_tokens) for entry in plan.scheduled]


def queues(core: Scheduler) -> dict[str, list[str]]:
    """Request ids by queue, front first."""
    state = core.state
    found = {"waiting": list(state.waiting), "running": state.running, "swapped": state.swapped}
    return {name: [group.request.request_id for group in groups] for name, groups in found.items()}
