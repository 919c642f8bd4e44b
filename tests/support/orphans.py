"""Spans that belong to no span which arrived."""

from collections.abc import Collection

from quire.local_stack.otlp_receiver import OtlpReceiver, ReceivedSpan


def orphans(received: OtlpReceiver, known_parents: Collection[str] = ()) -> list[ReceivedSpan]:
    """Spans with a parent that never arrived and is not among `known_parents` (a client's own span ids)."""
    roots = (span for trace in received.traces().values() for span in trace.roots)
    return [span for span in roots if span.parent_id and span.parent_id not in known_parents]
