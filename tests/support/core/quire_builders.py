"""Small cores of the preset `quire`, and the loop that serves them."""

from collections.abc import Callable, Iterable
from typing import Any

from scheduler_svc.core.composition import presets
from scheduler_svc.core.limits import CoreLimits
from scheduler_svc.core.plan import StepPlan
from scheduler_svc.core.request import Request
from scheduler_svc.core.request_rules import BeamRules, StopRules
from scheduler_svc.core.scheduler import Scheduler
from tests.support.core.builders import answer, hash_free

CHEAP_SWAP = {"compute_token_s": 0.1, "swap_block_s": 0.01}
DEAR_SWAP = {"compute_token_s": 0.1, "swap_block_s": 10.0}


def quire_core(limits: dict[str, Any] | None = None, **knobs: Any) -> Scheduler:
    """One plan in flight at a time, blocks of 4 tokens, no watermark, chunks as long as fit; `limits` and `knobs` over that."""
    given = {
        "block_size": 4,
        "num_gpu_blocks": 65,
        "num_cpu_blocks": 64,
        "max_model_len": 64,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 32,
        "prefix_caching": False,
    }
    spec = {"watermark_blocks": 0, "batch_queue": 1, "restraint": None, "chunk_s": 0.0, **knobs}
    return presets.build("quire", CoreLimits(**{**given, **(limits or {})}), **spec)


def request(
    name: str,
    prompt: int,
    max_tokens: int = 4,
    *,
    at: float = 0.0,
    priority: int = 0,
    deadline: float | None = None,
    min_tokens: int = 0,
    beams: int = 0,
) -> Request:
    """A request with that many prompt tokens of its own; `beams`: how many, 0 = it samples."""
    return Request(
        name,
        [1 + hash_free(name, i) for i in range(prompt)],
        StopRules(max_tokens, min_tokens),
        at,
        priority=priority,
        deadline=deadline,
        n=max(1, beams),
        beam=BeamRules() if beams else None,
    )


def serve(
    core: Scheduler, *, start: float = 0.0, most: int = 2_000, look: Callable[[StepPlan], None] | None = None
) -> float:
    """Steps of a second each until all is over; when that is. `look`: at every plan."""
    now = start
    while core.has_unfinished:
        assert now < start + most, "livelock"
        for plan in core.schedule(now):
            if look is not None:
                look(plan)
            if not plan.is_empty:
                core.update(answer(plan), now + 0.5)
        now += 1.0
    return now


def names(groups: Iterable[Any]) -> list[str]:
    """Request ids of groups."""
    return [group.request.request_id for group in groups]


def running(core: Scheduler) -> list[str]:
    """Running requests, in order."""
    return names(core.state.running)


def waiting(core: Scheduler) -> list[str]:
    """Waiting requests, in order."""
    return names(core.state.waiting)


def swapped(core: Scheduler) -> list[str]:
    """Swapped requests."""
    return names(core.state.swapped)
