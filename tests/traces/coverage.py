"""How much of a request's time its trace explains, by the rules of docs/tracing.md."""

from collections.abc import Iterable, Iterator, Sequence

from quire.local_stack.otlp_receiver import ReceivedSpan, ReceivedTrace
from svc_common.observability import trace_names as names

STAGES = (names.RECEIVED, names.PARSED, names.TEMPLATED, names.TOKENIZED, names.SUBMITTED)
"""Events of the gateway which end a stage: it began with the event, the child's end or the span's begin before."""
Interval = tuple[int, int]


def unexplained_share(trace: ReceivedTrace) -> float:
    """The part of the root's time in which neither a span without children was open nor a stage went on."""
    [root] = trace.roots
    return sum(end - start for start, end in gaps(trace)) / (root.end_ns - root.start_ns)


def gaps(trace: ReceivedTrace) -> list[Interval]:
    """The times that nothing explains, in order."""
    [root] = trace.roots
    found, reached = list[Interval](), root.start_ns
    for start, end in sorted(_explained(trace)):
        if start > reached:
            found.append((reached, min(start, root.end_ns)))
        reached = max(reached, end)
    if reached < root.end_ns:
        found.append((reached, root.end_ns))
    return found


def _explained(trace: ReceivedTrace) -> Iterator[Interval]:
    for span in trace.spans:
        children = trace.children(span.span_id)
        if not children:
            yield span.start_ns, span.end_ns
        elif span.service == "quire-gateway":
            yield from _stages(span, children)


def _stages(span: ReceivedSpan, children: Sequence[ReceivedSpan]) -> Iterator[Interval]:
    ends = [span.start_ns, *(child.end_ns for child in children), *_times(span, STAGES)]
    for time_ns in _times(span, STAGES):
        yield max(end for end in ends if end < time_ns or end == span.start_ns), time_ns
    for time_ns in _times(span, [names.COMPLETED]):
        yield time_ns, span.end_ns


def _times(span: ReceivedSpan, wanted: Iterable[str]) -> list[int]:
    return [event.time_ns for event in span.events if event.name in wanted]
