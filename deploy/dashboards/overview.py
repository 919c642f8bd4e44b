"""Overview dashboard: health and throughput."""

from deploy.dashboards.grafana import Dashboard, Panel, Query
from deploy.dashboards.queries import RATE, quantiles, rate

_TOKENS = "suffix: tokens/s"
_ERRORS = 'sum(rate(quire_gateway_calls_total{status!~"OK|CANCELLED"}[$__rate_interval])) or vector(0)'

OVERVIEW = Dashboard(
    "overview",
    "overview",
    "Health, throughput and latency of the service.",
    (
        Panel(
            title="State",
            text="Whether the scheduler accepts requests and steps can complete. If not, `quire workers` shows the reason.",
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
            text="Workers with an open stream of steps to the scheduler.",
            unit="none",
            kind="stat",
            width=4,
            queries=(Query("sum(quire_worker_up)"),),
            yellow=1,
            low_is_bad=True,
        ),
        Panel(
            title="Running",
            text="Groups of sequences that have blocks and are scheduled: requests, or samples of one.",
            unit="none",
            kind="stat",
            width=4,
            queries=(Query('sum(quire_scheduler_requests{queue="running"})'),),
        ),
        Panel(
            title="Waiting",
            text="Requests that wait for their first step, or again after preemption. Reasons: scheduler dashboard.",
            unit="none",
            kind="stat",
            width=4,
            queries=(Query('sum(quire_scheduler_requests{queue="waiting"})'),),
            yellow=10,
            red=100,
        ),
        Panel(
            title="Device blocks in use",
            text="Share of KV blocks that sequences use. Near 100 % requests wait for blocks or are preempted.",
            unit="percentunit",
            kind="stat",
            width=4,
            queries=(Query('sum(quire_kv_blocks{tier="gpu",state="used"}) / sum(quire_kv_blocks{tier="gpu"})'),),
            yellow=0.9,
            red=0.98,
        ),
        Panel(
            title="Errors",
            text="Calls per second that ended with an error. Cancelled calls do not count.",
            unit="reqps",
            kind="stat",
            width=4,
            queries=(Query(_ERRORS),),
            yellow=0.001,
            red=1,
        ),
        Panel(
            title="Requests",
            text="Queue lengths. If waiting grows while running is constant, the load exceeds the capacity.",
            unit="short",
            stacked=True,
            queries=(Query("sum by (queue) (quire_scheduler_requests)", "{{queue}}"),),
        ),
        Panel(
            title="Tokens",
            text="Tokens per second: output of steps, and prompt tokens computed (also recomputed after preemption).",
            unit=_TOKENS,
            queries=(
                Query(f"sum(rate(quire_output_tokens_total[{RATE}]))", "output"),
                Query(f'sum(rate(quire_step_tokens_total{{phase="prefill"}}[{RATE}]))', "prompt"),
            ),
        ),
        Panel(
            title="Requests that ended",
            text="Requests per second that ended, by reason. CANCELLED: cancelled by their clients.",
            unit="reqps",
            stacked=True,
            queries=(rate("quire_requests_ended_total", "reason"),),
        ),
        Panel(
            title="Time to first token",
            text="From a request's arrival at the gateway to its first output. Includes the queue time. Values above ten minutes "
            "show as ten minutes.",
            unit="s",
            queries=quantiles("gen_ai_server_time_to_first_token_seconds"),
        ),
        Panel(
            title="Queue time",
            text="From arrival to the first step. If it is close to the time to first token, requests wait for capacity, not for "
            "the model.",
            unit="s",
            queries=quantiles("quire_queue_time_seconds"),
        ),
        Panel(
            title="Time per output token",
            text="After the first token. Grows with the batch size and with prompts in the same steps.",
            unit="s",
            queries=quantiles("gen_ai_server_time_per_output_token_seconds"),
        ),
    ),
)
