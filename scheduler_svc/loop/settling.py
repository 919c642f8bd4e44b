"""The order in which a plan and its result reach core, observers and requests, in the service's loop and in `quire.LLM`.

    plan      observers, requests (preempted, scheduled, ended), observers once more; then it is sent
    result    core, observers, requests (tokens, then ends)

So the step log has a step before a reader can see its tokens, and tokens of a step are delivered only when
the core has processed it.
"""

from collections.abc import Iterable
from typing import Protocol

from scheduler_svc.core.plan import EndedSequence, StepPlan
from scheduler_svc.loop.publishing import TokenReaders, count_drafts, publish
from scheduler_svc.observe.recording.recorder import AnyCore
from scheduler_svc.observe.step_notifier import StepNotifier
from scheduler_svc.observe.step_record import StepOrigin
from scheduler_svc.worker_values import WorkerResult
from svc_common.clock import NS_PER_S, monotonic_ns


class StepRequests(TokenReaders, Protocol):
    """The requests, by id in the core, as far as steps change them."""

    def preempted(self, core_id: str, step: int, mode: str) -> None:
        """A plan preempted the request, by "recompute" or "swap"."""

    def scheduled(self, core_id: str, step: int, cached_prompt_tokens: int, worker_id: str) -> None:
        """A plan schedules the request for the first time, or again after a preemption or loss."""

    def sequence_ended(self, ended: EndedSequence) -> None:
        """A sequence ended; an error ends the whole request."""


class StepSettling:
    """Passes plans and results on to `steps` (the observers) and `requests`."""

    def __init__(self, requests: StepRequests, steps: StepNotifier) -> None:
        self._requests = requests
        self._steps = steps

    def announce(self, core: AnyCore, plan: StepPlan, origin: StepOrigin) -> None:
        """Announce a plan that the core just made, before it is sent."""
        moves = plan.swap_in or plan.swap_out or plan.copy
        self._steps.planned(plan, origin, core.block_tables() if moves else None)
        for request_id, mode in plan.preempted:
            self._requests.preempted(request_id, plan.step, mode)
        for entry in plan.entries:
            if entry.fresh:
                request = core.request(entry.request_id)
                num_cached = (request and request.num_cached_tokens) or 0
                self._requests.scheduled(entry.request_id, plan.step, num_cached, origin.worker_id)
        if plan.ended:
            self._end_all(core, plan.ended)
        self._steps.announced(plan)

    def settle(self, core: AnyCore, plan: StepPlan, result: WorkerResult) -> None:
        """Apply a plan's result to the core, and deliver it. A failed step fails its requests."""
        if plan.is_empty:
            return
        if result.error is not None:
            outcome = core.fail_step(plan.step, result.error.message)
            self._steps.returned(plan, result, outcome)
        else:
            outcome = core.update(result.result, monotonic_ns() / NS_PER_S)
            self._steps.returned(plan, result, outcome)
            publish(outcome, result, self._requests)
            if plan.entries:
                count_drafts(plan, result.result, self._requests.drafts_verified)
        if outcome.ended:
            self._end_all(core, outcome.ended)

    def _end_all(self, core: AnyCore, ended: Iterable[EndedSequence]) -> None:
        for sequence in ended:
            self._requests.sequence_ended(sequence)
            if sequence.error is not None and not sequence.request_done:
                core.abort([sequence.request_id])
