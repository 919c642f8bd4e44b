"""Trace sampling: OpenTelemetry's variables, and how far a caller's `sampled` flag is trusted.

Configured by OTEL_TRACES_SAMPLER and OTEL_TRACES_SAMPLER_ARG as usual; the default is parentbased_always_on.
"""

import logging
import time
from collections.abc import Mapping, Sequence

from opentelemetry.context import Context
from opentelemetry.sdk.trace.sampling import (
    ALWAYS_OFF,
    ALWAYS_ON,
    Decision,
    ParentBased,
    Sampler,
    SamplingResult,
    TraceIdRatioBased,
)
from opentelemetry.trace import Link, SpanKind, TraceState
from opentelemetry.util.types import Attributes

from svc_common.token_bucket import TokenBucket

log = logging.getLogger(__name__)

_PARENT_BASED = "parentbased_"


class ForcedTraces(Sampler):
    """Sampler for calls with the "sampled" flag: our own sampler, plus so many per second of those that it skips."""

    def __init__(self, own: Sampler, bucket: TokenBucket) -> None:
        self._own = own
        self._bucket = bucket

    def should_sample(
        self,
        parent_context: Context | None,
        trace_id: int,
        name: str,
        kind: SpanKind | None = None,
        attributes: Attributes = None,
        links: Sequence[Link] | None = None,
        trace_state: TraceState | None = None,
    ) -> SamplingResult:
        """Decide on one span."""
        result = self._own.should_sample(parent_context, trace_id, name, kind, attributes, links, trace_state)
        if result.decision is Decision.RECORD_AND_SAMPLE or self._bucket.wait_s(1) > 0:
            return result
        self._bucket.take(1)
        return SamplingResult(Decision.RECORD_AND_SAMPLE, attributes, result.trace_state)

    def get_description(self) -> str:
        """Description for the SDK."""
        return f"ForcedTraces({self._own.get_description()})"


def front_door(environ: Mapping[str, str], max_forced_per_s: float) -> Sampler | None:
    """Sampler of a service open to clients.

    None = the SDK's own from the variables, which then ignores callers' flags.
    """
    own = _own(environ)
    if own is None:
        return None
    bucket = TokenBucket(max_forced_per_s, max(1.0, max_forced_per_s), time.monotonic) if max_forced_per_s else None
    return ParentBased(own, remote_parent_sampled=own if bucket is None else ForcedTraces(own, bucket))


def own_roots(environ: Mapping[str, str]) -> Sampler | None:
    """Sampler of a service that itself chooses its root traces, so that no ratio is applied to them again."""
    own = _own(environ)
    return None if own is None else ParentBased(own if own is ALWAYS_OFF else ALWAYS_ON)


def _own(environ: Mapping[str, str]) -> Sampler | None:
    """Sampler for traces without a parent's decision; None if parents' decisions are ignored."""
    name = environ.get("OTEL_TRACES_SAMPLER", "parentbased_always_on").lower()
    if not name.startswith(_PARENT_BASED):
        return None
    if name == "parentbased_traceidratio":
        return TraceIdRatioBased(_ratio(environ))
    return ALWAYS_OFF if name == "parentbased_always_off" else ALWAYS_ON


def _ratio(environ: Mapping[str, str]) -> float:
    text = environ.get("OTEL_TRACES_SAMPLER_ARG", "")
    try:
        ratio = float(text)
    except ValueError:
        ratio = -1.0
    if not 0 <= ratio <= 1:
        log.warning("OTEL_TRACES_SAMPLER_ARG=%s is no number from 0 to 1: every trace is recorded", text)
        return 1.0
    return ratio
