"""A recording as a source for `quire top`: replays it and shows it at regular intervals of recorded time."""

import time
from collections import Counter
from collections.abc import Iterator

from block_manager.pool import PoolCounts
from gateway_svc.lab.source import Listed
from quire_tools.lab.moments import listed
from quire_tools.reasons_now import ReasonsNow
from quire_tools.replay.quiet_watcher import QuietWatcher
from quire_tools.top.numbers import PoolNumbers, Prefixes, RequestRow, TopNumbers, waits_of
from quire_tools.top.states import TopState
from quire_tools.top.steps import StepSample, StepWindow
from scheduler_svc.core.plan import StepOutcome, StepPlan
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.observe.recording.events import Event, Failed, Returned
from scheduler_svc.observe.recording.file_format import Recording
from scheduler_svc.observe.recording.replay import Replayer

_NS_PER_S, _MS_PER_S = 1_000_000_000, 1e3
_NOT_KNOWN_PARTS = 4


class RecordedTopSource:
    """Reads a recording in steps of `interval_s` recorded seconds, starting at its first plan."""

    def __init__(self, recording: Recording, interval_s: float) -> None:
        self.title, self.is_live = f"{recording.path.name} (recording)", False
        self._watcher = _Watcher()
        self._replayer = Replayer(self._watcher)
        self._events = _Events(self._replayer.run(recording.segments(), until_step=0))
        self._began_s = self._until_s = self._events.next_s
        self._interval_s = interval_s

    def read(self) -> TopState:
        """The next state; at the end of the recording, its last state again."""
        self._replayer.go_on(self._events.until(self._until_s))
        at_s = min(self._until_s, max(self._replayer.now, self._began_s))
        self._until_s += self._interval_s
        core = self._watcher.core
        numbers = None if core is None else self._watcher.numbers(core, at_s)
        found = self._replayer.report.first_difference
        problem = "" if found is None else f"step {found.step} cannot be replayed as recorded; `quire replay` says more"
        is_over = found is not None or self._events.are_over
        return TopState(numbers, f"+{at_s - self._began_s:.1f} s", problem, time.monotonic(), is_over)

    def last(self) -> TopState:
        """The state at the end of the recording."""
        self._until_s = float("inf")
        return self.read()


class _Events:
    """Events up to a given time. `next_s`: recorded time of the next event."""

    def __init__(self, events: Iterator[Event]) -> None:
        self._events = events
        self._next = next(events, None)

    @property
    def next_s(self) -> float:
        """0 if there are no further events."""
        return self._next.at if self._next is not None else 0.0

    @property
    def are_over(self) -> bool:
        """True if there are no further events."""
        return self._next is None

    def until(self, at_s: float) -> Iterator[Event]:
        """The events up to `at_s`, in order."""
        while self._next is not None and self._next.at <= at_s:
            event = self._next
            yield event
            self._next = next(self._events, None)


class _Watcher(QuietWatcher):
    """A replay `Watcher` that keeps the window of steps and the reasons, and reads the core when numbers are requested."""

    def __init__(self) -> None:
        self.core: Scheduler | None = None
        self._window = StepWindow()
        self._plans: dict[int, StepPlan] = {}
        self._reasons = ReasonsNow()

    def began(self, core: Scheduler) -> None:
        """See `Watcher`."""
        self.core = core
        self._plans.clear()

    def planned(self, plan: StepPlan, at: float) -> None:
        """See `Watcher`."""
        self._reasons.observe(plan)
        if not plan.is_empty:
            self._plans[plan.step] = plan

    def returned(self, event: Returned | Failed, outcome: StepOutcome) -> None:
        """See `Watcher`."""
        step = event.result.step if isinstance(event, Returned) else event.step
        plan = self._plans.pop(step, None)
        if plan is not None and self.core is not None:
            self._window.add(_sample(plan, event, outcome), self.core.policy)

    # --- looking -----------------------------------------------------------------------------------------------------

    def numbers(self, core: Scheduler, at_s: float) -> TopNumbers:
        """The numbers at recorded time `at_s`."""
        at_ns = int(at_s * _NS_PER_S)
        requests = [listed(request, self._reasons) for request in core.state.requests.values()]
        rows = tuple(_row(request, at_s * _MS_PER_S) for request in requests)
        counts = Counter((row.queue, row.reason) for row in rows)
        figures = self._window.figures(at_ns)
        waiting, running, swapped = core.queue_lengths
        gpu, cpu = core.pool_counts
        fresh = [request for request in requests if request.started_ms is None]
        started = [request for request in requests if request.started_ms is not None]
        return TopNumbers(
            at_ns=at_ns,
            serving=True,
            draining=False,
            policy=core.policy,
            step=core.step,
            waiting=waiting,
            running=running,
            swapped=swapped,
            never_scheduled=len(fresh),
            max_waiting=None,
            waiting_tokens=sum(row.prompt_tokens for row in fresh),
            output_tokens_per_s=figures.output_tokens_per_s,
            starts_per_s=None,
            waits=waits_of(((queue, reason, count) for (queue, reason), count in counts.items()), rows),
            pools=tuple(_pool(tier, pool) for tier, pool in (("device", gpu), ("host", cpu)) if pool.total),
            prefixes=Prefixes(
                len(started), sum(r.prompt_tokens for r in started), sum(r.cached_prompt_tokens for r in started)
            ),
            steps=figures,
            workers=(),
            tenants=(),
            requests=rows,
            num_left_out=0,
        )


def _row(request: Listed, at_ms: float) -> RequestRow:
    return RequestRow(
        id=request.id,
        request_id=request.request_id,
        tenant=request.tenant,
        queue=request.queue,
        reason=request.reason,
        numbers=request.numbers,
        priority=request.priority,
        prompt_tokens=request.prompt_tokens,
        output_tokens=request.output_tokens,
        cached_prompt_tokens=request.cached_prompt_tokens,
        num_choices=request.num_choices,
        num_preemptions=request.num_preemptions,
        age_s=_seconds(request.arrived_ms, at_ms),
        waited_s=_seconds(request.arrived_ms, at_ms if request.started_ms is None else request.started_ms),
    )


def _pool(tier: str, counts: PoolCounts) -> PoolNumbers:
    return PoolNumbers(tier, counts.total, counts.total - counts.free, counts.cached, counts.free - counts.cached)


def _sample(plan: StepPlan, event: Returned | Failed, outcome: StepOutcome) -> StepSample:
    """Sample of a recorded step; recordings contain only the worker's time and the time queued at the worker."""
    result = event.result if isinstance(event, Returned) else None
    duration_ns, queued_ns = (int(s * _NS_PER_S) for s in (result.duration_s, result.queued_s)) if result else (0, 0)
    entries = plan.scheduled
    return StepSample(
        step=plan.step,
        finished_ns=int(event.at * _NS_PER_S),
        duration_ns=duration_ns,
        parts_ns=(0, queued_ns, *[0] * _NOT_KNOWN_PARTS, duration_ns),
        num_requests=len({entry.request_id for entry in entries}),
        prompt_tokens=sum(entry.num_tokens for entry in entries if entry.is_prefill),
        output_tokens=sum(len(run.token_ids) for run in outcome.runs),
        num_preempted=len(plan.preempted),
        num_moved=len(plan.swap_in) + len(plan.swap_out) + len(plan.copy),
        failed=result is None,
    )


def _seconds(from_ms: float, to_ms: float) -> float:
    return round(max(0.0, to_ms - from_ms) / _MS_PER_S, 3)
