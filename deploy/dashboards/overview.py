"""Overview dashboard: health and throughput."""

from deploy.dashboards.grafana import Dashboard, Panel, Query
from deploy.dashboards.queries import RATE, quantiles, rate

_TOKENS = "suffix: tokens/s"
_ERRORS = 'sum(rate(quire_gateway_calls_total{status!~"OK|CANCELLED"}[$__rate_interval])) or vector(0)'

OVERVIEW = Dashboard(
    "overview",
    "overview",
    "Whether the service is well, how much it does, how long people wait.",
    (
        Panel(
            title="State",
            text="Whether the scheduler takes requests and steps can complete. `quire workers` says why not.",
            unit="none",
            kind="stat",
            width=4,
            queries=(Query("min(quire_scheduler_serving)"),),
            yellow=1,
            low_is_bad=True,
            words=((0, "NOT SERVING"), (1, "serving")),
        ),
        Panel(
            title="Workers",
            text="Workers to which the stream of steps is open.",
            unit="none",
            kind="stat",
            width=4,
            queries=(Query("sum(quire_worker_up)"),),
            yellow=1,
            low_is_bad=True,
        ),
        Panel(
            title="Running",
            text="Groups of sequences that have blocks and take part in steps: a request, or one of its samples.",
            unit="none",
            kind="stat",
            width=4,
            queries=(Query('sum(quire_scheduler_requests{queue="running"})'),),
        ),
        Panel(
            title="Waiting",
            text="Requests that wait for their first step, or again. Why: the dashboard of the scheduler.",
            unit="none",
            kind="stat",
            width=4,
            queries=(Query('sum(quire_scheduler_requests{queue="waiting"})'),),
            yellow=10,
            red=100,
        ),
        Panel(
            title="Device blocks in use",
            text="Share of the KV blocks that sequences hold. Near 100 % requests wait for blocks or are preempted.",
            unit="percentunit",
            kind="stat",
            width=4,
            queries=(Query('sum(quire_kv_blocks{tier="gpu",state="used"}) / sum(quire_kv_blocks{tier="gpu"})'),),
            yellow=0.9,
            red=0.98,
        ),
        Panel(
            title="Errors",
            text="Calls a second that ended by an error. Clients that left do not count.",
            unit="reqps",
            kind="stat",
            width=4,
            queries=(Query(_ERRORS),),
            yellow=0.001,
            red=1,
        ),
        Panel(
            title="Requests",
            text="Lengths of the queues. Waiting that grows while running stays is more load than this can take.",
            unit="short",
            stacked=True,
            queries=(Query("sum by (queue) (quire_scheduler_requests)", "{{queue}}"),),
        ),
        Panel(
            title="Tokens",
            text="Tokens a second: output that came out of steps, and prompt tokens computed for it (again after preemptions).",
            unit=_TOKENS,
            queries=(
                Query(f"sum(rate(quire_output_tokens_total[{RATE}]))", "output"),
                Query(f'sum(rate(quire_step_tokens_total{{phase="prefill"}}[{RATE}]))', "prompt"),
            ),
        ),
        Panel(
            title="Requests that ended",
            text="A second, by how they ended. CANCELLED: their clients left.",
            unit="reqps",
            stacked=True,
            queries=(rate("quire_requests_ended_total", "reason"),),
        ),
        Panel(
            title="Time to first token",
            text="From a request's arrival at the gateway to its first output. It grows with the queue: see beside it. "
            "Buckets end at ten minutes.",
            unit="s",
            queries=quantiles("gen_ai_server_time_to_first_token_seconds"),
        ),
        Panel(
            title="Queue time",
            text="Of that, the wait for the first step. Near the time to first token: the wait is for room, not for the model.",
            unit="s",
            queries=quantiles("quire_queue_time_seconds"),
        ),
        Panel(
            title="Time per output token",
            text="After the first one. Grows with the batch and with prompts that run beside it.",
            unit="s",
            queries=quantiles("gen_ai_server_time_per_output_token_seconds"),
        ),
    ),
)
