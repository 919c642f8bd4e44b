"""The state of a replayed core right after each step, in the form of the lab's page."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby

from block_manager.ledger import Ledger
from gateway_svc.lab.source import (
    MAX_LISTED,
    NO_CHANGE,
    LabPool,
    LabShare,
    LabSnapshot,
    LabStepTimes,
    Listed,
    ReasonCount,
    Step,
)
from gateway_svc.lab.translation import DEVICE, HOST
from quire_tools.reasons_now import ReasonsNow
from scheduler_svc.core.plan import ScheduledSequence, StepOutcome, StepPlan
from scheduler_svc.core.request import Request
from scheduler_svc.core.scheduler import Scheduler

_MS_PER_S = 1e3
NO_RESULT = "the recording ends before its result"


def planned(plan: StepPlan, at_s: float, policy: str) -> Step:
    """A step right after schedule(), without tables and snapshot; NO_RESULT until `returned`."""
    at_ms = at_s * _MS_PER_S
    return Step(
        step=plan.step,
        lane=plan.lane,
        policy=policy,
        shares=shares(plan.scheduled),
        swap_in=list(plan.swap_in),
        swap_out=list(plan.swap_out),
        copy=list(plan.copy),
        preempted=list(plan.preempted),
        queues=(plan.num_waiting, plan.num_running, plan.num_swapped),
        free=(plan.free_gpu, plan.free_cpu),
        sampled={},
        computed_tokens=plan.num_tokens,
        error=NO_RESULT,
        times=LabStepTimes(planned_ms=at_ms, finished_ms=at_ms),
        tables=NO_CHANGE,
    )


def returned(step: Step, at_s: float, outcome: StepOutcome, duration_s: float, queued_s: float) -> Step:
    """The step with its result, received at `at_s`."""
    sampled: Counter[str] = Counter()
    for run in outcome.runs:
        sampled[run.name] += len(run.token_ids)
    times = replace(
        step.times,
        finished_ms=at_s * _MS_PER_S,
        duration_ms=duration_s * _MS_PER_S,
        queued_ms=queued_s * _MS_PER_S,
    )
    return replace(step, sampled=dict(sampled), error="", times=times)


def failed(step: Step, at_s: float, why: str) -> Step:
    """The step with the error that ended it, at `at_s`."""
    return replace(step, error=why, times=replace(step.times, finished_ms=at_s * _MS_PER_S))


def shares(entries: Sequence[ScheduledSequence]) -> list[LabShare]:
    """Shares of a step; adjacent sequences of one request form one share."""
    return [_share(request_id, list(own)) for request_id, own in groupby(entries, lambda entry: entry.request_id)]


def _share(request_id: str, entries: list[ScheduledSequence]) -> LabShare:
    return LabShare(
        id=request_id,
        sequences=[entry.name for entry in entries],
        tokens=sum(entry.num_tokens for entry in entries),
        computed_before=entries[0].computed_before,
        prefill=any(entry.is_prefill for entry in entries),
    )


# --- what is held --------------------------------------------------------------------------------------------------------


def snapshot(step: int, core: Scheduler, reasons: ReasonsNow) -> LabSnapshot:
    """The state right after the plan of `step`."""
    requests = sorted(core.state.requests.values(), key=lambda request: request.arrival_time)
    rows = [listed(request, reasons) for request in requests]
    counts = Counter((item.queue, item.reason) for item in rows)
    return LabSnapshot(
        step=step,
        block_size=core.state.limits.block_size,
        pools=_pools(core.state.cache.ledger),
        cached=core.cached_blocks(),
        requests=rows[:MAX_LISTED],
        reasons=[ReasonCount(queue, reason, count) for (queue, reason), count in sorted(counts.items())],
        num_left_out=max(0, len(rows) - MAX_LISTED),
    )


def _pools(ledger: Ledger) -> list[LabPool]:
    parts = ledger.parts()
    suffixes = [""] if len(parts) == 1 else [f"@{rank}" for rank in range(len(parts))]
    devices = [
        LabPool(DEVICE, suffix, len(part.gpu.reserved), part.gpu.counts().total)
        for suffix, part in zip(suffixes, parts, strict=True)
    ]
    hosts = [
        LabPool(HOST, suffix, 0, total)
        for suffix, part in zip(suffixes, parts, strict=True)
        if (total := part.cpu.counts().total)
    ]
    return [*devices, *hosts]


def listed(request: Request, reasons: ReasonsNow) -> Listed:
    """An unfinished request with its queue and reason."""
    queue, reason, numbers = reasons.of(request)
    started_s = request.first_scheduled_time
    return Listed(
        id=request.request_id,
        request_id=request.request_id,
        tenant=request.tenant,
        queue=queue,
        reason=reason,
        numbers=dict(numbers),
        priority=-request.priority,
        num_choices=request.n,
        prompt_tokens=len(request.prompt_token_ids),
        output_tokens=sum(sequence.num_output_tokens for sequence in request.sequences),
        cached_prompt_tokens=request.num_cached_tokens or 0,
        arrived_ms=request.arrival_time * _MS_PER_S,
        started_ms=None if started_s is None else started_s * _MS_PER_S,
        num_preemptions=sum(sequence.num_preemptions for sequence in request.sequences),
    )
