"""Which traces are recorded: OpenTelemetry's variables, and how much callers can force."""

import secrets
from collections.abc import Iterator

import pytest
from opentelemetry.trace import Span

from quire.local_stack.otlp_receiver import OtlpReceiver
from svc_common.observability import telemetry
from svc_common.observability.telemetry import Telemetry
from tests.traces.serving import exporting


@pytest.fixture
def receiver() -> Iterator[OtlpReceiver]:
    with OtlpReceiver() as running:
        yield running


def gateway(
    receiver: OtlpReceiver, monkeypatch: pytest.MonkeyPatch, sampler: str, ratio: str = "", forced: float = 3.0
) -> Telemetry:
    """One with these variables."""
    with exporting(receiver, monkeypatch, OTEL_TRACES_SAMPLER=sampler, OTEL_TRACES_SAMPLER_ARG=ratio):
        return telemetry.setup("gateway", max_forced_per_s=forced)


def asked_to(service: Telemetry, flags: str, count: int) -> list[Span]:
    """Spans of calls with a `traceparent` of those flags."""
    parents = [f"00-{secrets.token_hex(16)}-{secrets.token_hex(8)}-{flags}" for _ in range(count)]
    spans = [service.span("call", parent=telemetry.context_of({"traceparent": parent})) for parent in parents]
    for span in spans:
        span.end()
    return spans


def recorded(spans: list[Span]) -> int:
    return sum(span.get_span_context().trace_flags.sampled for span in spans)


@pytest.mark.parametrize(
    ("sampler", "ratio", "expected"),
    [
        ("parentbased_always_on", "", 20),
        ("parentbased_traceidratio", "0", 3),
        ("parentbased_always_off", "", 3),
        ("parentbased_traceidratio", "1.0", 20),
        ("always_off", "", 0),
        ("always_on", "", 20),
    ],
)
def test_callers_force_a_few_traces_a_second(
    receiver: OtlpReceiver, monkeypatch: pytest.MonkeyPatch, sampler: str, ratio: str, expected: int
) -> None:
    """What our own sampler would take is taken; of the others, three a second here, where callers are listened to at all."""
    service = gateway(receiver, monkeypatch, sampler, ratio)
    assert recorded(asked_to(service, "01", 20)) == expected
    service.shutdown()


def test_callers_are_not_asked_where_none_may_be_forced(
    receiver: OtlpReceiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`--max-forced-traces 0`."""
    service = gateway(receiver, monkeypatch, "parentbased_always_off", forced=0.0)
    assert recorded(asked_to(service, "01", 5)) == 0
    service.shutdown()


def test_an_unsampled_caller_is_not_traced(receiver: OtlpReceiver, monkeypatch: pytest.MonkeyPatch) -> None:
    """A caller whose own trace is not recorded; and children follow their parents."""
    service = gateway(receiver, monkeypatch, "parentbased_always_on")
    assert recorded(asked_to(service, "00", 5)) == 0
    [forced] = asked_to(service, "01", 1)
    child = service.span("chat", parent=telemetry.child_of(forced))
    assert recorded([child]) == 1
    service.shutdown()


@pytest.mark.parametrize(("sampler", "expected"), [("parentbased_traceidratio", 20), ("parentbased_always_off", 0)])
def test_a_worker_chooses_among_its_steps_itself(
    receiver: OtlpReceiver, monkeypatch: pytest.MonkeyPatch, sampler: str, expected: int
) -> None:
    """One step in a hundred, all slow and all failed ones: no ratio is applied to these again."""
    with exporting(receiver, monkeypatch, OTEL_TRACES_SAMPLER=sampler, OTEL_TRACES_SAMPLER_ARG="0.0"):
        service = telemetry.setup("worker", samples_own_roots=True)
    spans = [service.span("worker.step") for _ in range(20)]
    assert recorded(spans) == expected
    service.shutdown()


def test_a_ratio_that_is_none_takes_all(receiver: OtlpReceiver, monkeypatch: pytest.MonkeyPatch) -> None:
    """As OpenTelemetry has it."""
    service = gateway(receiver, monkeypatch, "parentbased_traceidratio", "much")
    assert recorded([service.span("call") for _ in range(5)]) == 5
    service.shutdown()
