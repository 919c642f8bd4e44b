"""Dashboard of the gateways: calls, errors, and latencies seen by clients."""

from deploy.dashboards.grafana import Dashboard, Panel, Query
from deploy.dashboards.queries import distribution, processes, quantiles, rate

_TOKENS = "suffix: tokens/s"

GATEWAY = Dashboard(
    "gateway",
    "gateways",
    "Calls, errors, and the latencies that clients see.",
    (
        Panel(
            title="Connected",
            text="Gateways with an open stream to the scheduler.",
            unit="none",
            kind="stat",
            width=6,
            queries=(Query("sum(quire_gateway_scheduler_attached)"),),
            yellow=1,
            low_is_bad=True,
        ),
        Panel(
            title="In flight",
            text="Requests that have not ended.",
            unit="none",
            kind="stat",
            width=6,
            queries=(Query("sum(quire_gateway_requests_in_flight)"),),
        ),
        Panel(
            title="Streams",
            text="Requests in flight that are streamed.",
            unit="none",
            kind="stat",
            width=6,
            queries=(Query("sum(quire_gateway_open_streams)"),),
        ),
        Panel(
            title="Tokens held for slow readers",
            text="Generated tokens that clients have not read yet. High: clients read more slowly than the model generates.",
            unit="none",
            kind="stat",
            width=6,
            queries=(Query("sum(quire_gateway_unread_tokens)"),),
            yellow=100_000,
            red=1_000_000,
        ),
        Panel(
            title="Calls",
            text="Calls per second that ended, by protocol (gRPC or HTTP) and method.",
            unit="reqps",
            width=12,
            stacked=True,
            queries=(rate("quire_gateway_calls_total", "door", "method"),),
        ),
        Panel(
            title="Errors",
            text="Calls per second that ended with an error, by reason (docs/errors.md). CLIENT_GONE: the client disconnected.",
            unit="reqps",
            width=12,
            stacked=True,
            may_be_empty=True,
            queries=(rate("quire_gateway_errors_total", "reason"),),
        ),
        distribution(
            "Times to first token",
            "gen_ai_server_time_to_first_token_seconds",
            "Distribution of the time to first token over requests.",
        ),
        Panel(
            title="Time to first token",
            text="From arrival at the gateway to the first output. Values above ten minutes show as ten minutes.",
            unit="s",
            width=12,
            queries=quantiles("gen_ai_server_time_to_first_token_seconds"),
        ),
        Panel(
            title="Time per output token",
            text="After the first token, measured at the scheduler: slow clients do not affect it.",
            unit="s",
            queries=quantiles("gen_ai_server_time_per_output_token_seconds"),
        ),
        Panel(
            title="Time of a request",
            text="From arrival to end, of successful requests. Depends mostly on the requested number of tokens.",
            unit="s",
            queries=quantiles("gen_ai_server_request_duration_seconds", where='{error_type=""}'),
        ),
        Panel(
            title="Tokens of requests",
            text="Tokens per second of requests that ended: input and output.",
            unit=_TOKENS,
            queries=(rate("gen_ai_client_token_usage_sum", "gen_ai_token_type"),),
        ),
        Panel(
            title="In flight, by operation",
            text="Requests that have not ended, by operation.",
            unit="short",
            stacked=True,
            queries=(Query("sum by (operation) (quire_gateway_requests_in_flight)", "{{operation}}"),),
        ),
        *processes("gateway"),
    ),
)
