"""Builders for core tests, and a worker that is a function of the plan."""

from scheduler_svc.core.composition import presets
from scheduler_svc.core.limits import CoreLimits
from scheduler_svc.core.plan import StepOutcome, StepPlan, StepResult
from scheduler_svc.core.request import Request
from scheduler_svc.core.request_rules import StopRules
from scheduler_svc.core.scheduler import Scheduler

EOS = 0


def make_core(order: str = "fcfs", **limits: int | bool) -> Scheduler:
    """A `vllm-v1` core with small numbers."""
    given = {
        "block_size": 4,
        "num_gpu_blocks": 65,
        "max_model_len": 64,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 32,
    }
    return presets.build("vllm-v1", CoreLimits(**{**given, **limits}), policy=order)


def make_request(
    name: str, prompt: int | list[int], max_tokens: int = 4, *, arrival: float = 0.0, priority: int = 0, salt: str = ""
) -> Request:
    """A request with `prompt` tokens (a number: that many, unlike any other request's)."""
    tokens = prompt if isinstance(prompt, list) else [1 + hash_free(name, i) for i in range(prompt)]
    stop = StopRules(max_tokens=max_tokens, eos_token_ids=frozenset([EOS]))
    return Request(name, tokens, stop, arrival, priority=priority, cache_salt=salt)


def hash_free(name: str, i: int) -> int:
    """A number below 1,000 that depends on both, the same in every process."""
    return (sum(ord(c) * 31**k for k, c in enumerate(name)) * 7919 + i * 104729) % 997


def next_token(entry_name: str, num_known: int) -> int:
    """The model of these tests: a token (never EOS) that depends on the sequence and its length alone."""
    return 1 + hash_free(entry_name, num_known)


def answer(plan: StepPlan) -> StepResult:
    """What a worker would return."""
    sampled = [e for e in plan.scheduled if e.samples]
    return StepResult(plan.step, {e.name: [next_token(e.name, e.computed_before + e.num_tokens)] for e in sampled})


def one_step(core: Scheduler, now: float = 0.0) -> tuple[StepPlan, StepOutcome]:
    """Plans, runs and applies one step."""
    [plan] = core.schedule(now)
    return plan, core.update(answer(plan))


def shares(plan: StepPlan) -> dict[str, int]:
    """Tokens by request id."""
    return {e.request_id: e.num_tokens for e in plan.scheduled}


def waiting(core: Scheduler) -> list[str]:
    """Request ids in the order of the waiting queue."""
    return [group.request.request_id for group in core.state.waiting]
