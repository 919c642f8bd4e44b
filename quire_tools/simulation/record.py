"""Recorder of a simulation's `SimulationHistory`."""

from collections.abc import Callable, Iterable

from quire_tools.simulation.cost_model import first_computed
from quire_tools.simulation.history import RequestHistory, SimulationHistory
from quire_tools.simulation.link import SimulatedAnswer
from scheduler_svc.core.plan import EndedSequence, ScheduledSequence, StepOutcome, StepPlan
from scheduler_svc.core.request import Request
from scheduler_svc.observe.recording.history import end_of

OnToken = Callable[[str, int], None]


class Recorder:
    """Owner of the history. `_reached`: how far each sequence was ever computed, to count recomputed tokens."""

    def __init__(self, requests: Iterable[Request], start_s: float, block_size: int) -> None:
        """`requests`: those already in the core."""
        self._block_size = block_size
        self.history = SimulationHistory(start_s=start_s)
        self._reached: dict[str, int] = {}
        self._watched: dict[str, tuple[int, OnToken]] = {}
        for request in requests:
            self.history.requests[request.request_id] = RequestHistory(
                request,
                request.arrival_time,
                first_scheduled_s=request.first_scheduled_time,
                first_token_s=request.first_token_time,
            )
            for sequence in request.sequences:
                self._reached[sequence.name] = sequence.num_computed_tokens

    def watch_for(self, name: str, num_output_tokens: int, act: OnToken) -> None:
        """Call `act(name, num_output_tokens)` once the sequence has that many output tokens."""
        self._watched[name] = (num_output_tokens, act)

    def arrived(self, now: float, request: Request, *, is_refused: bool) -> None:
        """Record an arrival."""
        key = request.request_id
        record = RequestHistory(request, now)
        if is_refused:
            record.end, record.end_s = "refused", now
            key = key if key not in self.history.requests else f"{key} at {now}"
        self.history.requests[key] = record

    def planned(self, now: float, plan: StepPlan) -> None:
        """Record a plan."""
        requests = self.history.requests
        for request_id, _ in plan.preempted:
            requests[request_id].num_preemptions += 1
        for request_id, num_cached in plan.lookups:
            requests[request_id].num_cached_tokens += num_cached
        for entry in plan.entries:
            record = requests[entry.request_id]
            if record.first_scheduled_s is None:
                record.first_scheduled_s = now
            if entry.fresh and record.admitted_steps[-1:] != [plan.step]:
                record.admitted_steps.append(plan.step)
            self._count(entry, record)
        if plan.fast is not None:
            members, reached = plan.fast.members, self._reached
            for row, before in zip(plan.fast.rows.tolist(), plan.fast.computed_before.tolist(), strict=True):
                group = members[row]
                requests[group.request.request_id].num_computed_tokens += 1
                reached[group.sequences[0].name] = before + 1

    def _count(self, entry: ScheduledSequence, record: RequestHistory) -> None:
        """Count computed tokens, and the recomputed ones among them."""
        end = entry.computed_before + entry.num_tokens
        start = first_computed(entry, self._block_size)
        record.num_computed_tokens += end - start
        end -= entry.num_drafts
        reached = self._reached.get(entry.name, 0)
        record.num_lost_tokens += max(0, min(reached, end) - start)
        self._reached[entry.name] = max(reached, end)

    def answered(self, now: float, answer: SimulatedAnswer, outcome: StepOutcome) -> None:
        """Record a result that was applied."""
        requests, step = self.history.requests, answer.plan.step
        self.history.steps.add(answer.plan, answer.shape, answer.started_s, answer.duration_s)
        if outcome.fast is not None:
            members = outcome.fast.members
            for row in outcome.fast.rows.tolist():
                requests[members[row].request.request_id].token_times_s.append(now)
        for run in outcome.entries:
            record = requests[run.request_id]
            if record.first_token_s is None:
                record.first_token_s, record.first_token_step = now, step
            record.token_times_s.extend([now] * len(run.token_ids))
        if self._watched:
            self._look(outcome)
        self.ended(now, outcome.ended, step=step)

    def _look(self, outcome: StepOutcome) -> None:
        for run in outcome.runs:
            watched = self._watched.get(run.name)
            if watched is not None and run.offset + len(run.token_ids) >= watched[0]:
                del self._watched[run.name]
                watched[1](run.name, watched[0])

    def ended(
        self, now: float, ended: Iterable[EndedSequence], why: str | None = None, *, step: int | None = None
    ) -> None:
        """Record ended sequences; `why` replaces "abort"."""
        for e in ended:
            record = self.history.requests[e.request_id]
            if record.end is None and e.request_done:
                record.end, record.end_s, record.end_step = why or end_of(e), now, step
