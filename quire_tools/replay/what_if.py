"""What-if: replay a recording up to some step, then simulate the same requests under another policy or limits, in virtual time.

Step durations come from a model fitted to the recorded ones; requests arrive at the recorded times and get
the recorded tokens. Worker failures and policy changes after that step are ignored.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from quire_tools.replay.changing_core import ChangingCore
from quire_tools.replay.observed import Observed, RecordedRequest
from quire_tools.replay.recorded_tokens import RecordedTokens
from quire_tools.replay.request_steps import RequestSteps, RequestStepsObserver
from quire_tools.simulation import history as simulated
from quire_tools.simulation.arrivals import Arrival
from quire_tools.simulation.cost_model import CostModel, Fit
from quire_tools.simulation.simulation import Simulation
from scheduler_svc.core.composition import presets
from scheduler_svc.core.limits import CoreLimits
from scheduler_svc.core.request import Request
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.core.spec.policy_spec import PolicySpec, knob_names
from scheduler_svc.observe.recording import changes
from scheduler_svc.observe.recording.changes import Change
from scheduler_svc.observe.recording.events import Added, Event, PlanEvent
from scheduler_svc.observe.recording.replay import Replayer, ReplayReport
from scheduler_svc.observe.recording.segment_buffer import RecordingSegment
from scheduler_svc.policy.assembly import choose
from scheduler_svc.policy.keys import limit_names
from svc_common.errors import ConfigError, FailedPrecondition


@dataclass(frozen=True, slots=True)
class WhatIf:
    """`recorded` and `predicted` cover the `num_requests` requests with all of their output in the recording.

    `from_step`: the first step that may differ. `num_censored`: requests without a known end in the
    recording.
    """

    from_step: int
    steps: int
    fit: Fit
    num_requests: int
    num_censored: int
    num_refused: int
    recorded: simulated.SimulationHistory
    predicted: simulated.SimulationHistory
    requests: dict[str, RequestSteps]


def what_if(segments: Sequence[RecordingSegment], policy: str | None, wanted: Sequence[Change]) -> WhatIf:
    """The prediction for `policy` (None: the recorded one) with `wanted` changes.

    `segments`: of one core (`one_life`). Raises ConfigError for impossible policies or changes,
    FailedPrecondition if the recording does not replay identically, and InvalidArgument if no step took time,
    so that no model can be fitted.
    """
    life = Observed()
    whole = Replayer(*life.observers)
    whole.run(segments)
    life.close()
    _check_identical(whole.report)
    fit = CostModel.fit(life.samples, schedule_s=life.overhead_s)
    start = _Start(segments, policy, wanted)
    fit = _with_copies(fit, start.core)
    tokens = RecordedTokens(life)
    _bound(start.core.state.requests.values(), tokens)
    run = Simulation(
        ChangingCore(start.core, start.later, fit.model.costs),  # type: ignore[arg-type]
        _arrivals(start.rest, life.visits, tokens),
        tokens,
        fit.model,
        start_s=start.now,
        in_flight=start.in_flight,
        worker_per_lane=start.core.has_worker_per_lane,
        max_in_flight=segments[0].about.get("max_under_way"),
        observers=[start.request_steps],
    ).run()
    predicted = _joined(start.past, run)
    came = [name for name, visit in life.visits.items() if visit.is_whole]
    return WhatIf(
        from_step=start.from_step,
        steps=start.core.step - segments[0].first_step + 1,
        fit=fit,
        num_requests=len(came),
        num_censored=len(tokens.censored),
        num_refused=sum(r.end == "refused" for r in run.requests.values()),
        recorded=_only(life.history, came),
        predicted=_only(predicted, came),
        requests=start.request_steps.requests,
    )


def _with_copies(fit: Fit, core: Scheduler) -> Fit:
    """If the recording has no block copies, use known costs, else the cost of recomputing a block, so that
    unmeasured copying gains nothing."""
    if fit.model.moved_block_s > 0:
        return fit
    per_block_s = fit.model.prefill_token_s * core.limits.block_size / core.state.cache.ledger.num_groups
    return replace(fit, model=replace(fit.model, moved_block_s=core.state.costs.now.swap_block_s or per_block_s))


def _check_identical(report: ReplayReport) -> None:
    if (found := report.first_difference) is not None:
        raise FailedPrecondition(
            f"the recording does not replay as it was (step {found.step}: {found.field} differs), so that nothing can be said of "
            "what else might have been; replay it alone to see more",
            reason="NOT_IDENTICAL",
        )


def one_life(segments: Iterable[RecordingSegment]) -> list[RecordingSegment]:
    """The first segment, and those that continue its core."""
    life: list[RecordingSegment] = []
    for segment in segments:
        if life and not segment.goes_on:
            break
        life.append(segment)
    return life


class _Start:
    """The core at the step from which things may differ, and what is known of the time before and after."""

    def __init__(self, segments: Sequence[RecordingSegment], policy: str | None, wanted: Sequence[Change]) -> None:
        first = segments[0].first_step
        steps = [first if change.step is None or policy is not None else change.step for change in wanted]
        self.from_step = max(first, min([first] if policy is not None else steps, default=first))
        observed, self.request_steps = Observed(), RequestStepsObserver()
        replayer = Replayer(*observed.observers, self.request_steps)
        rest = list(replayer.run(segments, until_step=self.from_step))
        planned = next((event for event in rest if isinstance(event, PlanEvent)), None)
        if replayer.core is None or planned is None:
            last = first + sum(segment.num_steps for segment in segments) - 1
            raise ConfigError(
                f"step {self.from_step} is not in the recording, which has steps {first} to {last}",
                reason="NO_SUCH_STEP",
            )
        self.now = planned.at
        self.rest: list[Event] = rest
        self.past = observed.history
        self.in_flight = observed.in_flight
        at_once = _merged(change.values for change in wanted if change.step is None or change.step <= self.from_step)
        self.later = [change for change in wanted if change.step is not None and change.step > self.from_step]
        if policy is None:
            self.core = replayer.core
            changes.apply(self.core, at_once)
        else:
            self.core = _moved(replayer.core, policy, at_once)
            self.in_flight = []


def _merged(values: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    return {key: value for of_change in values for key, value in of_change.items()}


def _moved(old: Scheduler, policy: str, values: Mapping[str, Any]) -> Scheduler:
    """A core of that policy with the old one's requests, as if they arrived anew with their tokens."""
    knobs = {key: value for key, value in values.items() if key in knob_names()}
    spec = _on_the_model_of(old, choose(policy).spec.with_knobs(**knobs))
    limits = {key: value for key, value in values.items() if key in limit_names()}
    core = presets.build(spec, _limits_for(spec, replace(old.state.limits, **limits), limits))
    core.step = old.step
    for request in old.state.requests.values():
        core.add(_anew(request))
    return core


def _on_the_model_of(old: Scheduler, spec: PolicySpec) -> PolicySpec:
    """The spec with the recorded model's sliding window, unless its cache rules cannot free blocks behind it."""
    frees = spec.frees_behind_window(prefix_caching=old.state.limits.prefix_caching)
    return replace(spec, sliding_window=old.spec.sliding_window) if frees else spec


def _limits_for(spec: PolicySpec, limits: CoreLimits, given: Mapping[str, Any]) -> CoreLimits:
    """The recorded limits; a token budget that the policy cannot work with is raised, unless it was given explicitly."""
    if "max_num_batched_tokens" in given:
        return limits
    budget = limits.max_num_batched_tokens
    if spec.runs_whole(chunked_prefill=limits.chunked_prefill):
        budget = max(budget, limits.max_model_len)
    if spec.has("chunks of whole blocks") and limits.prefix_caching:
        budget += -budget % limits.block_size
    return replace(limits, max_num_batched_tokens=budget)


def _anew(request: Request) -> Request:
    """A fresh copy of the request; one with several samples starts from its prompt."""
    outputs = request.sequences[0].token_ids[len(request.prompt_token_ids) :] if request.num_samples == 1 else []
    fresh = replace(
        request, committed=outputs, committed_counts=[], over=[], num_cached_tokens=None, first_scheduled_time=None
    )
    fresh.as_one_group()
    return fresh


def _bound(requests: Iterable[Request], tokens: RecordedTokens) -> None:
    for request in requests:
        if (last := tokens.last_token(request.request_id)) is not None:
            request.stop = replace(request.stop, max_tokens=last, min_tokens=min(request.stop.min_tokens, last))


def _arrivals(
    rest: Iterable[Event], visits: Mapping[str, RecordedRequest], tokens: RecordedTokens
) -> Iterator[Arrival]:
    """Requests that arrived after the start, and when their clients cancelled or a stop string ended them."""
    for event in rest:
        if isinstance(event, Added) and not event.refused:
            request = event.request.request()
            visit = visits[request.request_id]
            _bound([request], tokens)
            yield Arrival(event.at, request, leaves_at_s=visit.left_at, stop_string_at=visit.stop_string_at)


# --- histories --------------------------------------------------------------------------------------------------------


def _joined(past: simulated.SimulationHistory, run: simulated.SimulationHistory) -> simulated.SimulationHistory:
    """Both parts as one history. Requests that ended before the start keep their past."""
    requests = {name: r for name, r in past.requests.items()}
    for name, after in run.requests.items():
        before = requests.get(name)
        requests[name] = after if before is None or before.end is not None else _prolonged(before, after)
    return simulated.SimulationHistory(requests, run.steps, past.start_s, run.end_s, has_stalled=run.has_stalled)


def _prolonged(before: simulated.RequestHistory, after: simulated.RequestHistory) -> simulated.RequestHistory:
    def first(name: str) -> Any:
        value = getattr(before, name)
        return getattr(after, name) if value is None else value

    return replace(
        after,
        arrival_s=before.arrival_s,
        first_scheduled_s=first("first_scheduled_s"),
        first_token_s=first("first_token_s"),
        first_token_step=first("first_token_step"),
        num_preemptions=before.num_preemptions + after.num_preemptions,
        num_computed_tokens=before.num_computed_tokens + after.num_computed_tokens,
        num_lost_tokens=before.num_lost_tokens + after.num_lost_tokens,
        num_cached_tokens=before.num_cached_tokens + after.num_cached_tokens,
        token_times_s=before.token_times_s + after.token_times_s,
    )


def _only(history: simulated.SimulationHistory, names: Sequence[str]) -> simulated.SimulationHistory:
    """The history of these requests only; the beginning of the others is unknown."""
    return replace(history, requests={name: history.requests[name] for name in names if name in history.requests})
