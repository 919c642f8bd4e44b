"""Dashboard of the scheduler: waiting requests with their reasons, and steps."""

from deploy.dashboards.grafana import Dashboard, Panel, Query
from deploy.dashboards.queries import RATE, distribution, processes, quantiles, rate

_TOKENS = "suffix: tokens/s"
_FILL = 'sum(quire_scheduler_{what}) / sum(quire_scheduler_waiting_limit{{of="{of}"}})'

SCHEDULER = Dashboard(
    "scheduler",
    "scheduler",
    "Wait reasons, composition and duration of steps, preemptions.",
    (
        Panel(
            title="Why requests wait",
            text="Waiting requests by reason. BEHIND: behind a request that could not start; the reason of that one is among the "
            "others. Meaning of each reason: docs/explaining.md; of one request: `quire why ID`.",
            unit="short",
            width=12,
            stacked=True,
            may_be_empty=True,
            queries=(Query("sum by (reason) (quire_scheduler_waiting_by_reason) > 0", "{{reason}}"),),
        ),
        Panel(
            title="Queue time",
            text="From arrival to the first step, of requests when first scheduled.",
            unit="s",
            width=12,
            queries=quantiles("quire_queue_time_seconds"),
        ),
        Panel(
            title="Queued work",
            text="Estimated time for which all workers compute what waits, by the measured costs of steps.",
            unit="s",
            may_be_empty=True,
            queries=(Query("max(quire_queued_work_seconds)", "queued work"),),
        ),
        Panel(
            title="Queue fill",
            text="Waiting requests and prompt tokens as a share of their limits. At 100 % requests are refused with QUEUE_FULL.",
            unit="percentunit",
            most=1,
            yellow=0.8,
            red=1,
            queries=(
                Query(_FILL.format(what='requests{queue="waiting"}', of="requests"), "requests"),
                Query(_FILL.format(what="waiting_tokens", of="tokens"), "prompt tokens"),
            ),
        ),
        Panel(
            title="Refused",
            text="Requests per second refused by the scheduler, by reason. Gateways also refuse: see their dashboard.",
            unit="reqps",
            may_be_empty=True,
            queries=(rate("quire_requests_refused_total", "reason"),),
        ),
        Panel(
            title="Preemptions",
            text="Preemptions per second, by mode. Each discards computed KV (recompute) or moves it to the host (swap). Remedies: "
            "more blocks, fewer concurrent sequences, shorter outputs.",
            unit="suffix: /s",
            may_be_empty=True,
            queries=(rate("quire_preemptions_total", "mode"),),
        ),
        distribution(
            "Step times",
            "quire_step_duration_seconds",
            "Distribution of step times at the worker. Two bands are usual: steps with prompts, and decode-only steps.",
        ),
        Panel(
            title="Step time",
            text="Duration of a step at the worker.",
            unit="s",
            width=12,
            queries=quantiles("quire_step_duration_seconds"),
        ),
        Panel(
            title="Tokens in steps",
            text="Tokens per second computed by steps: prefill (prompts and recomputation) and decode.",
            unit=_TOKENS,
            stacked=True,
            queries=(rate("quire_step_tokens_total", "phase"),),
        ),
        Panel(
            title="Steps",
            text="Steps per second: all, those that computed prompts, and those that workers repeated by grants.",
            unit="suffix: /s",
            queries=(
                Query(f"sum(rate(quire_steps_total[{RATE}]))", "all"),
                Query(f"sum(rate(quire_prompt_steps_total[{RATE}]))", "with prompts"),
                Query(f"sum(rate(quire_repeated_steps_total[{RATE}]))", "repeated by grants"),
            ),
        ),
        Panel(
            title="Revoked grants",
            text="Grants of decode steps per second that were revoked before their last step, by reason.",
            unit="suffix: /s",
            may_be_empty=True,
            queries=(rate("quire_revoked_grants_total", "reason"),),
        ),
        Panel(
            title="Scheduling time",
            text="Duration of a schedule() call. With overlapped steps it costs no time as long as it is shorter than a step.",
            unit="s",
            queries=quantiles("quire_schedule_duration_seconds"),
        ),
        Panel(
            title="Requests that ended",
            text="Requests per second that ended, by status and reason.",
            unit="reqps",
            stacked=True,
            queries=(rate("quire_requests_ended_total", "status", "reason"),),
        ),
        Panel(
            title="Failed steps",
            text="Failed steps per second, by reason. The scheduler's log has each of them with its contents.",
            unit="suffix: /s",
            may_be_empty=True,
            queries=(rate("quire_failed_steps_total", "reason"),),
        ),
        Panel(
            title="Stored responses",
            text="Bytes of the stored responses of /v1/responses; limited by --max-stored-bytes.",
            unit="bytes",
            queries=(Query("sum(quire_scheduler_stored_bytes)", "stored"),),
        ),
        Panel(
            title="Responses, stored and dropped",
            text="Number of stored responses, and those dropped per second, by cause: displaced ones made room for others.",
            unit="short",
            queries=(
                Query("sum(quire_scheduler_stored_responses)", "stored"),
                rate("quire_scheduler_dropped_responses_total", "cause"),
            ),
        ),
        Panel(
            title="Dropped spans",
            text="Spans per second that did not reach the collector, by service.",
            unit="suffix: /s",
            queries=(rate("quire_telemetry_dropped_spans_total", "job"),),
        ),
        *processes("scheduler"),
    ),
)
