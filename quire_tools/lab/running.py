"""A replay in progress in the form of the lab's page: the one source of the lab and of `quire top` for recordings."""

from collections import Counter
from collections.abc import Callable

from block_manager.ledger import Ledger
from gateway_svc.lab import translation
from gateway_svc.lab.source import MAX_LISTED, NO_CHANGE, LabPool, LabSnapshot, Listed, ReasonCount, Step
from gateway_svc.lab.translation import DEVICE, HOST
from quire_tools.reasons_now import ReasonsNow
from scheduler_svc.core.plan import StepPlan
from scheduler_svc.core.request import Request
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.observe.recording.replay import Replayer
from scheduler_svc.observe.run_observer import RunObserver
from scheduler_svc.observe.step_record import StepOrigin, StepRecord

_MS_PER_S = 1e3


class RunningReplay(RunObserver):
    """Observer of its `replayer`. `core`: the one that runs, None before the first segment; `reasons`: of its requests."""

    def __init__(self, reasons: ReasonsNow | None = None) -> None:
        self.core: Scheduler | None = None
        self.reasons = reasons or ReasonsNow()
        self.replayer = Replayer(self)

    def on_start(self, core: Scheduler, clock: Callable[[], float]) -> None:
        """Read this core from now on."""
        self.core = core

    def on_plan(self, plan: StepPlan, origin: StepOrigin) -> None:
        """Keep the reasons."""
        self.reasons.observe(plan)

    def requests(self) -> list[Listed]:
        """The unfinished requests, in order of arrival, with their queues and reasons."""
        assert self.core is not None
        requests = sorted(self.core.state.requests.values(), key=lambda request: request.arrival_time)
        return [_listed(request, self.reasons) for request in requests]

    def snapshot(self, step: int) -> LabSnapshot:
        """The current state, right after the plan of `step`."""
        assert self.core is not None
        rows = self.requests()
        counts = Counter((item.queue, item.reason) for item in rows)
        return LabSnapshot(
            step=step,
            block_size=self.core.limits.block_size,
            pools=_pools(self.core.ledger),
            cached=self.core.cached_blocks(),
            requests=rows[:MAX_LISTED],
            reasons=[ReasonCount(queue, reason, count) for (queue, reason), count in sorted(counts.items())],
            num_left_out=max(0, len(rows) - MAX_LISTED),
        )


def lab_step(record: StepRecord) -> Step:
    """The step without tables and snapshot, at the recorded times."""
    return translation.step(record.report(None, wall_ns=int), NO_CHANGE, None)


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


def _listed(request: Request, reasons: ReasonsNow) -> Listed:
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
