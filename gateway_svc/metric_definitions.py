"""Definitions of all gateway metrics (see svc_common.observability.metrics).

The `gen_ai_*` names are OpenTelemetry's, with underscores and units as in Prometheus. Their buckets are also
OpenTelemetry's, except that those of times extend to minutes, since requests wait that long under load.
Labels have few values each (served models, kinds of operations, statuses, documented reasons) and never text
from a client.
"""

from svc_common.observability.metrics import DROPPED_SPANS, Kind, MetricSpec

_DURATION_S = tuple(0.01 * 2**i for i in range(18))
_TTFT_S = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0),
    *(15.0, 20.0, 30.0, 60.0, 120.0, 300.0, 600.0),
)
# Steps on a GPU take less than 10 ms, the convention's first bucket.
_TPOT_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5)
_TOKENS = tuple(4**i for i in range(14))

PROVIDER = "quire"
"""`gen_ai.provider.name`, on spans too."""
_OPERATIONS = "`chat`, `text_completion`, `resume`, `embeddings`"
_OPERATION = {
    "gen_ai_operation_name": _OPERATIONS,
    "gen_ai_provider_name": f"`{PROVIDER}`",
    "gen_ai_request_model": "the served models and adapters; empty where the request failed before one was found",
}
_REASON = "one of [errors](errors.md)"

DURATION = MetricSpec(
    name="gen_ai_server_request_duration_seconds",
    kind=Kind.HISTOGRAM,
    unit="seconds",
    text="Time from a request's arrival to its end, by error type.",
    formula="From the arrival of its call at this gateway to its last event; one observation per request, whatever its end.",
    labels={**_OPERATION, "error_type": f"empty = success; else {_REASON}"},
    buckets=_DURATION_S,
    serves="OpenTelemetry's GenAI conventions",
    query="histogram_quantile(0.95, sum by (le) (rate(gen_ai_server_request_duration_seconds_bucket[5m])))",
)
TTFT = MetricSpec(
    name="gen_ai_server_time_to_first_token_seconds",
    kind=Kind.HISTOGRAM,
    unit="seconds",
    text="Time from a request's arrival to its first output.",
    formula="From the arrival of its call at this gateway to its first tokens from the scheduler; only requests with output.",
    labels=_OPERATION,
    buckets=_TTFT_S,
    serves="OpenTelemetry's GenAI conventions",
    query="histogram_quantile(0.95, sum by (le) (rate(gen_ai_server_time_to_first_token_seconds_bucket[5m])))",
)
TPOT = MetricSpec(
    name="gen_ai_server_time_per_output_token_seconds",
    kind=Kind.HISTOGRAM,
    unit="seconds",
    text="Time per output token after the first of a choice, measured at the scheduler.",
    formula="`decode_ms` of the request's usage / (completion tokens / choices - 1); only with two or more tokens per choice.",
    labels=_OPERATION,
    buckets=_TPOT_S,
    serves="OpenTelemetry's GenAI conventions",
    query="histogram_quantile(0.5, sum by (le) (rate(gen_ai_server_time_per_output_token_seconds_bucket[5m])))",
)
TOKENS = MetricSpec(
    name="gen_ai_client_token_usage",
    kind=Kind.HISTOGRAM,
    unit="tokens",
    text="Tokens of a request.",
    formula="`prompt_tokens` (input) and `completion_tokens` (output) of its usage, at its end.",
    labels={**_OPERATION, "gen_ai_token_type": "`input`, `output`"},
    buckets=_TOKENS,
    serves="OpenTelemetry's GenAI conventions",
    query="sum by (gen_ai_token_type) (rate(gen_ai_client_token_usage_sum[5m]))",
)
IN_FLIGHT = MetricSpec(
    name="quire_gateway_requests_in_flight",
    kind=Kind.GAUGE,
    unit="requests",
    text="Requests that have not ended.",
    formula="Generation and embedding requests between arrival and end.",
    labels={"operation": _OPERATIONS},
    serves="load and outcomes, as users see them",
    query="sum by (operation) (quire_gateway_requests_in_flight)",
)
STREAMS = MetricSpec(
    name="quire_gateway_open_streams",
    kind=Kind.GAUGE,
    unit="requests",
    text="Streaming requests among the requests in flight.",
    formula="Requests with `stream: true` (HTTP) or GenerateStream (gRPC) that have not ended.",
    serves="load and outcomes, as users see them",
    query="sum(quire_gateway_open_streams)",
)
CALLS = MetricSpec(
    name="quire_gateway_calls_total",
    kind=Kind.COUNTER,
    unit="calls",
    text="Ended calls, by door, method and status.",
    formula="One per call of any kind at either door. A client that disconnects early counts as `CANCELLED`.",
    labels={
        "door": "`grpc`, `http`",
        "method": "gRPC: the service's methods; HTTP: verb and route",
        "status": "`OK` or another gRPC status name",
    },
    serves="load and outcomes, as users see them",
    query="sum by (method, status) (rate(quire_gateway_calls_total[5m]))",
)
ERRORS = MetricSpec(
    name="quire_gateway_errors_total",
    kind=Kind.COUNTER,
    unit="calls",
    text="Calls that ended with an error, by reason.",
    formula="Those of `quire_gateway_calls_total` that are not `OK`.",
    labels={"status": "gRPC's status names", "reason": f"{_REASON}; `CLIENT_GONE`; `OTHER`"},
    serves="faults: unreachable services, errors",
    query="topk(5, sum by (reason) (rate(quire_gateway_errors_total[5m])))",
)
UNREAD = MetricSpec(
    name="quire_gateway_unread_tokens",
    kind=Kind.GAUGE,
    unit="tokens",
    text="Tokens buffered for clients that read more slowly than their requests generate.",
    formula="Tokens received from the scheduler and not yet written to the client, over all requests.",
    serves="[overload](overload.md): slow readers",
    query="max_over_time(quire_gateway_unread_tokens[5m])",
)
AT_SCHEDULER = MetricSpec(
    name="quire_gateway_scheduler_requests",
    kind=Kind.GAUGE,
    unit="requests",
    text="Requests of this gateway at its scheduler.",
    formula="Submitted and not ended, including those that wait for an unreachable scheduler.",
    serves="load of this gateway",
    query="sum(quire_gateway_scheduler_requests)",
)
ATTACHED = MetricSpec(
    name="quire_gateway_scheduler_attached",
    kind=Kind.GAUGE,
    unit="1",
    text="1: the streams to all schedulers are open.",
    formula="1 while Attach is open, else 0.",
    serves="faults: unreachable services, errors",
    query="quire_gateway_scheduler_attached == 0",
)
SERVING = MetricSpec(
    name="quire_gateway_scheduler_serving",
    kind=Kind.GAUGE,
    unit="1",
    text="1: all schedulers accept and serve requests.",
    formula="The last health status from the scheduler; 0 while it is unreachable.",
    serves="faults: unreachable services, errors",
    query="quire_gateway_scheduler_serving == 0",
)

METRICS = (
    *(DURATION, TTFT, TPOT, TOKENS, IN_FLIGHT, STREAMS, CALLS, ERRORS, UNREAD, AT_SCHEDULER, ATTACHED, SERVING),
    DROPPED_SPANS,
)
