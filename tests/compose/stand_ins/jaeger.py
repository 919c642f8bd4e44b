"""STAND-IN for Jaeger (test): takes spans by OTLP, answers a part of Jaeger's query API. Nothing of Jaeger is in it.

GET /api/services, /api/traces?service=NAME[&limit=N], /api/traces/ID, as Jaeger answers them; a page that says what this is.
"""

from typing import Any

import otlp
import pages
import settings

from quire.local_stack.otlp_receiver import OtlpReceiver, ReceivedSpan, ReceivedTrace

TITLE = "STAND-IN for Jaeger (test)"
_DEFAULT_LIMIT = 20


class Query:
    """Jaeger's answers, over what a receiver has received."""

    def __init__(self, receiver: OtlpReceiver) -> None:
        self._receiver = receiver

    def answer(self, path: str, query: dict[str, str]) -> pages.Answer | None:
        """To GET `path`?`query`."""
        traces = self._receiver.traces()
        if path == "/api/services":
            names = sorted({name for trace in traces.values() for name in trace.services})
            return pages.as_json({"data": names, "total": len(names), "errors": None})
        if path == "/api/traces":
            found = [trace for trace in traces.values() if query.get("service", "") in trace.services]
            newest = found[::-1][: int(query.get("limit", _DEFAULT_LIMIT))]
            return pages.as_json({"data": [_trace(trace) for trace in newest], "errors": None})
        if path.startswith("/api/traces/"):
            trace = traces.get(path.rpartition("/")[2])
            found = [trace] if trace else []
            return pages.as_json({"data": [_trace(trace) for trace in found]}, 200 if trace else 404)
        if path == "/":
            return pages.page(TITLE, [f"{len(traces)} traces", "its API: /api/services, /api/traces"])
        return None


def _trace(trace: ReceivedTrace) -> dict[str, Any]:
    names = {service: f"p{number}" for number, service in enumerate(trace.services, start=1)}
    return {
        "traceID": trace.trace_id,
        "spans": [_span(span, names[span.service]) for span in trace.spans],
        "processes": {process: {"serviceName": service, "tags": []} for service, process in names.items()},
    }


def _span(span: ReceivedSpan, process: str) -> dict[str, Any]:
    parent = {"refType": "CHILD_OF", "traceID": span.trace_id, "spanID": span.parent_id}
    return {
        "traceID": span.trace_id,
        "spanID": span.span_id,
        "operationName": span.name,
        "references": [parent] if span.parent_id else [],
        "startTime": span.start_ns // 1000,
        "duration": (span.end_ns - span.start_ns) // 1000,
        "tags": [{"key": key, "value": value} for key, value in span.attributes.items()],
        "logs": [
            {"timestamp": event.time_ns // 1000, "fields": [{"key": "event", "value": event.name}]}
            for event in span.events
        ],
        "processID": process,
    }


def main() -> None:
    """Runs with Jaeger's own configuration file."""
    config = settings.read()
    receiver = OtlpReceiver()
    query = Query(receiver)
    pages.serve(settings.address(config, "extensions", "jaeger_query", "http", "endpoint"), query.answer)
    health = settings.address(config, "extensions", "healthcheckv2", "http", "endpoint")
    pages.serve(health, lambda path, _: pages.as_json({"status": TITLE}) if path == "/status" else None)
    print(TITLE, flush=True)
    otlp.serve_until_stopped(receiver, settings.address(config, "receivers", "otlp", "protocols", "grpc", "endpoint"))


if __name__ == "__main__":
    main()
