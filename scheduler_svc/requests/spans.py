"""Spans of requests in the scheduler: queue, prefill, decode, one after the other, children of the gateway's span (design.md 9).

Only for requests whose context is sampled, and only with telemetry on; otherwise every call returns at once. No span per token.
"""

from collections.abc import Mapping

from opentelemetry import trace
from opentelemetry.trace import Status, StatusCode

from scheduler_svc.core.reasons import WAITING_QUEUES, Event
from scheduler_svc.requests.live_request import LiveRequest
from svc_common.errors import QuireError
from svc_common.telemetry import Telemetry, context_of

Value = str | int | float | bool


class RequestSpans:
    """Owner of the open span of each traced request (`LiveRequest.span`)."""

    def __init__(self, telemetry: Telemetry) -> None:
        self._telemetry = telemetry

    def accepted(self, live: LiveRequest) -> None:
        """It waits."""
        if self._telemetry.enabled and _is_sampled(live):
            self._open(live, "scheduler.queue", 0)

    def scheduled(self, live: LiveRequest, step: int) -> None:
        """It is in the plan of `step` as a newcomer, or again after it had left."""
        if live.span is None:
            return
        if live.first_step:
            self.event(live, "resumed", {"quire.step": step})
            return
        live.span.set_attribute("quire.cached_prompt_tokens", live.cached_prompt_tokens)
        self._close(live, step)
        self._open(live, "scheduler.prefill", step)

    def first_token(self, live: LiveRequest, step: int) -> None:
        """Its prompt is computed."""
        if live.span is not None:
            self._close(live, step)
            self._open(live, "scheduler.decode", step)

    def event(self, live: LiveRequest, name: str, attributes: Mapping[str, Value]) -> None:
        """Something happened to it in its present phase."""
        if live.span is not None:
            live.span.add_event(name, dict(attributes))

    def waits(self, live: LiveRequest, event: Event) -> None:
        """A reason to wait, with the numbers that decided (design.md 4, Explain)."""
        if live.span is not None and event.queue in WAITING_QUEUES:
            numbers = {f"quire.{name}": value for name, value in event.numbers.items()}
            self.event(live, event.reason.value, {"quire.step": event.step, "quire.queue": event.queue, **numbers})

    def ended(self, live: LiveRequest, error: QuireError | None) -> None:
        """It is over."""
        if live.span is None:
            return
        live.span.set_attribute("gen_ai.usage.output_tokens", live.output.num_tokens)
        live.span.set_attribute("quire.num_preemptions", live.time.num_preemptions)
        if error is not None:
            live.span.set_attribute("error.type", error.reason)
            live.span.set_status(Status(StatusCode.ERROR, error.status))
        self._close(live, live.last_step or None)

    def _open(self, live: LiveRequest, name: str, step: int) -> None:
        attributes: dict[str, Value] = {
            "quire.request_id": live.submission.request_id,
            "gen_ai.usage.input_tokens": len(live.submission.prompt),
        }
        if step:
            live.first_step = live.first_step or step
            attributes["quire.first_step"] = step
        assert live.submission.sampling.trace is not None
        parent = context_of(live.submission.sampling.trace)
        live.span = self._telemetry.span(name, parent=parent, attributes=attributes)

    @staticmethod
    def _close(live: LiveRequest, step: int | None) -> None:
        assert live.span is not None
        if step is not None:
            live.span.set_attribute("quire.last_step", step)
        live.span.end()
        live.span = None


def _is_sampled(live: LiveRequest) -> bool:
    if live.submission.sampling.trace is None:
        return False
    context = context_of(live.submission.sampling.trace)
    return context is not None and trace.get_current_span(context).get_span_context().trace_flags.sampled
